"""How the operations are split over several devices: Shardy rules and what each device computes.

A custom call is opaque to the partitioner: without a rule, all its operands are gathered. Rows and
columns of each product may be split freely; the contracted dimension must be whole, but for
`matmul`, which sums the parts of the devices itself.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import dispatch
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jax_swiglu._config import OpParams

# The axes of a mesh that one dimension is split over.
Axes = tuple[str, ...]


def spans_devices(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether a rule is needed: not on one device, nor inside `shard_map`.

    Where only some axes of a mesh are manual, JAX gives partitioning rules no mesh to work with
    (0.12); the call is then whole on each device of the other axes.
    """
    axes: Any = ctx.module_context.axis_context
    return isinstance(axes, mlir.ShardingContext) and axes.num_devices > 1


def with_explicit_sharding(product: Any, lhs: Any, row_dim: int, rhs: Any, column_dim: int) -> Any:
    """The aval of a product on a mesh with explicit axes: rows as in lhs, columns as in rhs.

    An axis that splits both splits the rows.
    """
    if lhs.sharding.mesh.empty or rhs.sharding.mesh.empty:
        return product
    *batch, rows = (*lhs.sharding.spec[:-2], lhs.sharding.spec[row_dim])
    columns = rhs.sharding.spec[column_dim]
    taken = {axis for part in (*batch, rows) for axis in _as_axes(part)}
    spec = PartitionSpec(*batch, rows, None if taken & set(_as_axes(columns)) else columns)
    return product.update(sharding=NamedSharding(lhs.sharding.mesh, spec))


def explicit_sharding(x: jax.Array) -> NamedSharding | None:
    """The sharding that is part of the type of x, if it is."""
    sharding: Any = jax.typeof(x).sharding
    explicit = any(kind == jax.sharding.AxisType.Explicit for kind in sharding.mesh.axis_types)
    return sharding if explicit else None


def with_explicit_leading(out: jax.Array, like: NamedSharding) -> NamedSharding:
    """Leading dimensions split as in `like`, the last as in the type of out where axes are left."""
    leading = like.spec[:-1]
    taken = {axis for part in leading for axis in _as_axes(part)}
    last = jax.typeof(out).sharding.spec[-1]
    last = None if taken & set(_as_axes(last)) else last
    return NamedSharding(like.mesh, PartitionSpec(*leading, last))


def _as_axes(part: Any) -> Axes:
    """One entry of a PartitionSpec."""
    return () if part is None else part if isinstance(part, tuple) else (part,)


def register(primitive: Primitive) -> None:
    """Lets the lowering of this primitive know the devices.

    JAX does so for `custom_partitioning` where it sees it in the program; here it appears in the
    lowering only, and there is no public way to ask for it.
    """
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def _factors(op: str, params: OpParams) -> tuple[list[str], list[str]]:
    """The dimensions of all operands and results but for a batch in front, by factor."""
    lhs = "km" if params.lhs_transposed else "mk"
    rhs = "nk" if params.rhs_transposed else "kn"
    if op == "glu_fwd":
        return [lhs, rhs, rhs], ["mn"] * (3 if params.extra else 1)
    if op == "glu_bwd":
        return [lhs, rhs, "mn", "mn"], ["mn"] * (3 if params.extra else 2)
    return [lhs, rhs] + ["mn"] * params.extra, ["mn"]


def _dim_axes(mesh: jax.sharding.Mesh, info: Any, dimension: int) -> Axes:
    """The axes that a dimension is split over; none where they do not divide it."""
    spec = info.sharding.spec
    axes = _as_axes(spec[dimension] if dimension < len(spec) else None)
    parts = math.prod(mesh.shape[axis] for axis in axes)
    return axes if info.shape[dimension] % parts == 0 else ()


def _partition(
    primitive: Primitive,
    op: str,
    params: OpParams,
    mesh: jax.sharding.Mesh,
    operands: Sequence[Any],
    results: Sequence[Any],
) -> tuple[Any, Callable[..., Any], Any, Any]:
    """The shardings to use, given those that were propagated, and the part of one device."""
    batched = len(operands[0].shape) == 3
    operand_factors, result_factors = (
        ["b" * batched + f for f in group] for group in _factors(op, params)
    )
    result_split: dict[str, Axes] = {
        factor: _dim_axes(mesh, results[0], i) for i, factor in enumerate(result_factors[0])
    }
    summed: Axes = ()
    if op == "matmul":
        # Where only one operand is split, each device takes its part of the other.
        lhs, rhs = (
            _dim_axes(mesh, info, factors.index("k"))
            for info, factors in zip(operands[:2], operand_factors[:2], strict=True)
        )
        summed = lhs or rhs
    # An axis that splits both the sum and the result: the sum is scattered over it.
    operand_split = {
        factor: tuple(axis for axis in axes if axis not in summed)
        for factor, axes in result_split.items()
    }
    scattered: list[tuple[int, str]] = []
    for dimension, factor in enumerate(result_factors[0]):
        axes, kept = result_split[factor], operand_split[factor]
        if axes[: len(kept)] == kept:
            scattered += [(dimension, axis) for axis in axes[len(kept) :]]
        else:  # the parts of a device would not be contiguous; XLA slices the sum instead
            result_split[factor] = kept
    reduced = tuple(axis for axis in summed if axis not in [name for _, name in scattered])

    def shardings(groups: list[str], split: dict[str, Axes]) -> tuple[NamedSharding, ...]:
        return tuple(
            NamedSharding(mesh, PartitionSpec(*(split[factor] or None for factor in factors)))
            for factors in groups
        )

    def compute(*parts: jax.Array) -> tuple[jax.Array, ...]:
        if not summed:
            return tuple(primitive.bind(*parts, params=params))
        a, b, *addend = parts
        (out,) = primitive.bind(a, b, params=params.without_addend())
        shape = shardings(result_factors, result_split)[0].shard_shape(results[0].shape)
        where = {"scattered": tuple(scattered), "reduced": reduced}
        return (_device_sum_p.bind(out, *addend, shape=shape, **where),)

    operand_split["k"] = summed
    operand_shardings = [
        *shardings(operand_factors[:2], operand_split),
        # What has the shape of the result is split as it is.
        *shardings(operand_factors[2:], result_split | {"k": summed}),
    ]
    return mesh, compute, shardings(result_factors, result_split), tuple(operand_shardings)


def _device_sum(
    x: jax.Array,
    *addend: jax.Array,
    shape: tuple[int, ...],
    scattered: Sequence[tuple[int, str]],
    reduced: Axes,
) -> jax.Array:
    """The sum over devices, plus the addend; each device gets its part of scattered dimensions."""
    del shape
    for dimension, axis in scattered:
        x = jax.lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True)
    if reduced:
        x = jax.lax.psum(x, reduced)
    return x + addend[0] if addend else x


def _lower_device_sum(
    ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any
) -> Sequence[Any]:
    # Under `jax.set_mesh` with explicit axes, JAX (0.9 to 0.12) would annotate what is computed
    # here with shardings, which XLA refuses inside the part of one device.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        summed = functools.partial(_device_sum, **params)
        return mlir.lower_fun(summed, multiple_results=False)(ctx, *operands)


_device_sum_p = Primitive("jax_swiglu_device_sum")
_device_sum_p.def_abstract_eval(lambda x, *_, shape, **__: x.update(shape=shape))
mlir.register_lowering(_device_sum_p, _lower_device_sum)


@functools.cache
def _partitioned(primitive: Primitive, op: str, params: OpParams, rank: int) -> Callable[..., Any]:
    """The primitive behind a partitioning rule."""

    def whole(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(primitive.bind(*operands, params=params))

    function = custom_partitioning(whole)
    operands, results = (
        ", ".join(" ".join("b" * (rank == 3) + factors) for factors in group)
        for group in _factors(op, params)
    )
    function.def_partition(
        partition=functools.partial(_partition, primitive, op, params),
        sharding_rule=f"{operands} -> {results}",
        reduction_factors=("k",) if op == "matmul" else (),
        need_replication_factors=() if op == "matmul" else ("k",),
    )
    return function


def lower(
    primitive: Primitive,
    op: str,
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    params: OpParams,
) -> Sequence[Any]:
    """Lowers to a call that the partitioner can split."""
    lhs: Any = ctx.avals_in[0]
    function = _partitioned(primitive, op, params, len(lhs.shape))
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)
