"""How the operations are split over several devices: Shardy rules and what each device computes.

A custom call is opaque to the partitioner: without a rule, all its operands are gathered. Batch and
row dimensions and the columns of each product may be split freely; the contracted dimension must be
whole, but for `matmul`, which sums the parts of the devices itself.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import dispatch
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_swiglu._config import OpParams
from jax_swiglu._dims import Dims, dims_of

# The axes of a mesh that one dimension is split over, major to minor.
Axes = tuple[str, ...]


def product_sharding(dims: Dims, lhs: Any, rhs: Any) -> NamedSharding:
    """The sharding in the type of a product: on explicit axes, dimensions are split as in operands.

    An axis that would split two dimensions splits the first.
    """
    split: dict[str, Any] = {}
    for names, operand in zip(dims.operands, (lhs, rhs), strict=False):
        for name, part in zip(names, operand.sharding.spec, strict=True):
            split[name] = None if name in dims.whole else split.get(name) or part
    taken: set[str] = set()
    spec = []
    for name in dims.results[0]:
        axes = set(_as_axes(split[name]))
        spec.append(None if axes & taken else split[name])
        taken |= axes
    mesh = rhs.sharding.mesh if lhs.sharding.mesh.empty else lhs.sharding.mesh
    return NamedSharding(mesh, PartitionSpec(*spec))


def is_explicit(sharding: NamedSharding) -> bool:
    return any(kind == AxisType.Explicit for kind in sharding.mesh.axis_types)


def explicit_sharding(x: jax.Array) -> NamedSharding | None:
    """The sharding that is part of the type of x, if it is."""
    sharding: Any = jax.typeof(x).sharding
    return sharding if is_explicit(sharding) else None


def _as_axes(part: Any) -> Axes:
    """One entry of a PartitionSpec."""
    return () if part is None else part if isinstance(part, tuple) else (part,)


def register(primitive: Primitive) -> None:
    """Lets the lowering of this primitive know the devices.

    JAX does so for `custom_partitioning` where it sees it in the program; here it appears in the
    lowering only, and there is no public way to ask for it.
    """
    dispatch.prim_requires_devices_during_lowering.add(primitive)


@dataclasses.dataclass(frozen=True)
class DeviceMesh:
    """The devices of a program, as the rules see them.

    `whole` and `seen` have axes of prime size. Thus every sharding has names for its axes, also one
    that splits a dimension over a part of an axis, as the partitioner does where the whole axis
    does not divide it.
    """

    given: AbstractMesh
    whole: AbstractMesh
    # Without manual axes, and in the order in which the partitioner numbers devices.
    seen: AbstractMesh

    @classmethod
    def of(cls, sizes: Mapping[str, int], manual: Collection[str]) -> "DeviceMesh":
        types = tuple(AxisType.Manual if name in manual else AxisType.Auto for name in sizes)
        whole, seen = (
            {
                f"{name}.{i}": prime
                for name, size in sizes.items()
                if name not in left_out
                for i, prime in enumerate(_prime_factors(size))
            }
            for left_out in ((), manual)
        )
        given = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
        return cls(given, _mesh(whole), _mesh(seen))

    def compass(self) -> jax.Array:
        """One element on each device that the partitioner sees, for `numbered`."""
        names = self.given.auto_axes
        with jax.sharding.use_abstract_mesh(self.given):
            elements = jnp.zeros([self.given.shape[name] for name in names], jnp.int8)
            sharding = NamedSharding(self.given, PartitionSpec(*names))
            return jax.lax.with_sharding_constraint(elements, sharding)

    def numbered(self, compass: Any) -> "DeviceMesh":
        """The mesh with the order of axes that the partitioner has given a compass.

        Where some axes are manual, it numbers the devices of the others in an order of its own for
        each call, which shardings do not tell: a mesh of 2 x 2 looks the same both ways.
        """
        tiling = compass.sharding._to_xla_hlo_sharding(len(compass.shape))
        numbers = np.reshape(tiling.tile_assignment_devices(), self.seen.axis_sizes)
        strides = [numbers.take(1, i).flat[0] - numbers.flat[0] for i in range(numbers.ndim)]
        order = np.argsort(strides)[::-1]
        if list(numbers.transpose(order).flat) != list(range(numbers.size)):
            raise NotImplementedError(f"devices are not numbered by axes of the mesh: {tiling}")
        seen = {self.seen.axis_names[i]: self.seen.axis_sizes[i] for i in order}
        return dataclasses.replace(self, seen=_mesh(seen))

    def axes(self, info: Any) -> list[Axes]:
        """The axes that split each dimension of an array; none where they do not divide it."""
        rank = len(info.shape)
        tiling = info.sharding and info.sharding._to_xla_hlo_sharding(rank)
        if tiling is None or tiling.is_replicated():
            return [()] * rank
        tiles = np.reshape(tiling.tile_assignment_devices(), tiling.tile_assignment_dimensions())
        found = []
        for dimension, size in enumerate(info.shape):
            devices = np.moveaxis(tiles, dimension, 0).reshape(tiles.shape[dimension], -1)[:, 0]
            found.append(self._along(devices) if size % len(devices) == 0 else ())
        return found

    def _along(self, devices: np.ndarray) -> Axes:
        names, sizes = self.seen.axis_names[::-1], self.seen.axis_sizes[::-1]
        by_stride = dict(zip(np.cumprod([1, *sizes]), names, strict=False))
        axes: Axes = ()
        offsets = np.zeros(1, int)
        while len(offsets) < len(devices):
            stride = devices[len(offsets)] - devices[0]
            if stride not in by_stride:
                return ()
            axes = (by_stride[stride], *axes)
            offsets = np.add.outer(stride * np.arange(self.seen.shape[axes[0]]), offsets).ravel()
        return axes if np.array_equal(devices - devices[0], offsets) else ()

    def sharding(self, names: Sequence[str], split: Mapping[str, Axes]) -> NamedSharding:
        return NamedSharding(self.seen, PartitionSpec(*(split.get(name) or None for name in names)))


def _mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def _prime_factors(n: int) -> list[int]:
    for prime in range(2, n + 1):
        if n % prime == 0:
            return [prime, *_prime_factors(n // prime)]
    return []


def device_mesh(ctx: mlir.LoweringRuleContext) -> DeviceMesh | None:
    """The devices, if a rule is needed: not on one device, nor where all axes are manual."""
    context: Any = ctx.module_context.axis_context
    if isinstance(context, mlir.ShardingContext):
        mesh = context.abstract_mesh
        found = DeviceMesh.of({"": context.num_devices} if mesh is None else mesh.shape, ())
    else:  # inside `shard_map`; of one inside another, JAX 0.9 knows the inner axes only
        lhs: Any = ctx.avals_in[0]
        manual = context.manual_axes | {*lhs.sharding.mesh.manual_axes}
        found = DeviceMesh.of(context.mesh.shape, manual)
    return found if found.seen.size > 1 else None


def _summed(
    dims: Dims, operands: Sequence[Sequence[Axes]], result: Mapping[str, Axes]
) -> dict[str, Axes]:
    """The axes to split contracted dimensions over, given how arrays are split."""
    lhs, rhs = (
        dict(zip(*pair, strict=True)) for pair in zip(dims.operands, operands, strict=False)
    )
    summed: dict[str, Axes] = dict.fromkeys(dims.summed, ())
    for split, other in ((lhs, rhs), (rhs, lhs)):
        # Where only one operand is split, each device takes its part of the other, unless that and
        # the result are split over the same axis elsewhere: then the first is gathered.
        taken = {axis for axes in summed.values() for axis in axes}
        taken |= {
            axis for name, axes in result.items() for axis in axes if axis in other.get(name, ())
        }
        for name in dims.summed:
            summed[name] = summed[name] or tuple(axis for axis in split[name] if axis not in taken)
    return summed


def _partition(
    primitive: Primitive,
    dims: Dims,
    params: OpParams,
    mesh: DeviceMesh,
    _: Any,
    operands: Sequence[Any],
    results: Sequence[Any],
) -> tuple[Any, Callable[..., Any], Any, Any]:
    """The shardings to use, given those that were propagated, and the part of one device."""
    compass, operands = operands[: -len(dims.operands)], operands[-len(dims.operands) :]
    if compass:
        mesh = mesh.numbered(*compass)
    names = dims.results[0]
    result_split = dict(zip(names, mesh.axes(results[0]), strict=True))
    result_split |= dict.fromkeys(dims.whole, ())
    summed: dict[str, Axes] = {}
    if dims.summable:
        summed = _summed(dims, [mesh.axes(operand) for operand in operands[:2]], result_split)
    sum_axes = tuple(axis for axes in summed.values() for axis in axes)
    # An axis that splits both the sum and the result: the sum is scattered over it.
    operand_split = {
        name: tuple(axis for axis in axes if axis not in sum_axes)
        for name, axes in result_split.items()
    }
    scattered: list[tuple[int, Axes]] = []
    for dimension, name in enumerate(names):
        axes, kept = result_split[name], operand_split[name]
        if axes[: len(kept)] != kept:
            # The parts of a device would not be contiguous; XLA slices the sum instead.
            result_split[name] = kept
        elif axes != kept:
            scattered.append((dimension, axes[len(kept) :]))
    scattered_axes = {axis for _, axes in scattered for axis in axes}
    reduced = tuple(axis for axis in sum_axes if axis not in scattered_axes)

    def compute(*parts: jax.Array) -> tuple[jax.Array, ...]:
        parts = parts[len(compass) :]
        outs = tuple(primitive.bind(*parts, params=params))
        if not sum_axes:
            return outs
        shape = mesh.sharding(names, result_split).shard_shape(results[0].shape)
        where = {"scattered": tuple(scattered), "reduced": reduced}
        return tuple(_device_sum_p.bind(*outs, shape=shape, **where))

    operand_shardings = (mesh.sharding(of, operand_split | summed) for of in dims.operands)
    result_shardings = tuple(mesh.sharding(of, result_split) for of in dims.results)
    operand_shardings = (*(c.sharding for c in compass), *operand_shardings)
    return mesh.whole, compute, result_shardings, operand_shardings


def _device_sum(
    x: jax.Array,
    *,
    shape: tuple[int, ...],
    scattered: Sequence[tuple[int, Axes]],
    reduced: Axes,
) -> tuple[jax.Array]:
    """The sum over devices; each gets its part of scattered dimensions."""
    del shape
    for dimension, axes in scattered:
        x = jax.lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)
    if reduced:
        x = jax.lax.psum(x, reduced)
    return (x,)


def lower_function(
    function: Callable[..., tuple[jax.Array, ...]],
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    **params: Any,
) -> Sequence[Any]:
    """Lowers a function of JAX on the mesh that the types of its operands have.

    In the part of one device there is none, while that of `jax.set_mesh` is still around: JAX (0.9
    to 0.12) would annotate what is computed there with shardings that XLA refuses.
    """
    lhs: Any = ctx.avals_in[0]
    with jax.sharding.use_abstract_mesh(lhs.sharding.mesh):
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands, **params)


_device_sum_p = Primitive("jax_swiglu_device_sum")
_device_sum_p.def_abstract_eval(lambda x, *, shape, **_: [x.update(shape=shape)])
_device_sum_p.multiple_results = True
mlir.register_lowering(_device_sum_p, functools.partial(lower_function, _device_sum))


def lower(
    primitive: Primitive,
    op: str,
    mesh: DeviceMesh,
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    params: OpParams,
) -> Sequence[Any]:
    """Lowers to a call that the partitioner can split."""
    lhs: Any = ctx.avals_in[0]
    dims = dims_of(op, params, len(lhs.shape))
    # A sum must name the devices that it is over.
    with_compass = dims.summable and bool(mesh.given.manual_axes)
    compass = (tuple(f"c{i}" for i in range(len(mesh.given.auto_axes))),) * with_compass

    def whole(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(primitive.bind(*operands[with_compass:], params=params))

    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return function(*([mesh.compass()] * with_compass), *operands)

    function = custom_partitioning(whole)
    first, *others = dims.operands
    if op == "glu_bwd":
        # How gate and up are split counts: were the rows of dout (what w_down has not) the same
        # dimensions in the rule, a cotangent with another sharding than the output would spread to
        # the forward pass.
        first = tuple(name if name in others[0] else f"d{name}" for name in first)
    groups = ((*compass, first, *others), dims.results)
    function.def_partition(
        partition=functools.partial(_partition, primitive, dims, params, mesh),
        sharding_rule=" -> ".join(", ".join(map(" ".join, group)) for group in groups),
        decode_shardings=False,
        reduction_factors=dims.summed,
        need_replication_factors=dims.whole,
    )
    return mlir.lower_fun(call, multiple_results=True)(_with_devices(ctx), *operands)


def _with_devices(ctx: mlir.LoweringRuleContext) -> mlir.LoweringRuleContext:
    """The context with devices in its mesh, which has none inside a `shard_map` inside another.

    `custom_partitioning` (JAX 0.9 to 0.12) asks for them but goes by their number only.
    """
    context: Any = ctx.module_context.axis_context
    if not isinstance(getattr(context, "mesh", None), AbstractMesh):
        return ctx
    devices = np.full(context.mesh.axis_sizes, jax.devices()[0])
    context = dataclasses.replace(context, mesh=Mesh(devices, context.mesh.axis_names))
    return ctx.replace(module_context=ctx.module_context.replace(axis_context=context))
