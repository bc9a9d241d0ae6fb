"""The three primitives `glu_fwd`, `glu_bwd` and `matmul`: shapes, lowering, vmap, derivatives.

On CUDA they become custom calls that cuDNN serves, elsewhere plain JAX (`_reference`); with
implementation="host" they are the same custom calls, served by plain C++ on the CPU.
"""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import NamedSharding, PartitionSpec

from jax_swiglu import _ffi, _load, _partitioning, _reference
from jax_swiglu._config import CUDNN_DTYPES, HOST_DTYPES, OpParams
from jax_swiglu._dims import dims_of
from jax_swiglu._division import divide

Arrays = Sequence[jax.Array]
Reference = Callable[..., tuple[jax.Array, ...]]


def _product(op: str, lhs: Any, rhs: Any, params: OpParams) -> Any:
    """The aval of lhs @ rhs."""
    dims = dims_of(op, params, len(lhs.shape))
    sizes: dict[str, int] = {}
    for names, operand in zip(dims.operands, (lhs, rhs), strict=False):
        sizes |= zip(names, operand.shape, strict=True)
    # Derived from an operand, so that the result varies over the same manual mesh axes.
    return lhs.update(
        shape=tuple(sizes[name] for name in dims.results[0]),
        dtype=params.out_dtype,
        sharding=_partitioning.product_sharding(dims, lhs, rhs),
    )


def _glu_fwd_avals(x: Any, w_in: Any, *w_up: Any, params: OpParams) -> list[Any]:
    h = _product("glu_fwd", x, w_in, params)
    if not params.extra:
        return [h]
    if w_up:
        return [h, h, h]
    *rows, n = h.shape
    *split_rows, split = h.sharding.spec
    spec = PartitionSpec(*split_rows, None, split)
    return [h, h.update(shape=(*rows, 2, n), sharding=NamedSharding(h.sharding.mesh, spec))]


def _glu_bwd_avals(dout: Any, w_down: Any, gate: Any, *up: Any, params: OpParams) -> list[Any]:
    if not params.extra:
        return [gate, *up]
    if up:
        return [gate, *up, gate]
    *rows, _, n = gate.shape
    *split_rows, _, split = gate.sharding.spec
    spec = PartitionSpec(*split_rows, split)
    return [gate, gate.update(shape=(*rows, n), sharding=NamedSharding(gate.sharding.mesh, spec))]


def _matmul_avals(a: Any, b: Any, *second: Any, params: OpParams) -> list[Any]:
    return [_product("matmul", a, b, params)]


def _lower_ffi(
    op: str, ctx: mlir.LoweringRuleContext, *operands: Any, params: OpParams
) -> Sequence[Any]:
    """A custom call with a workspace as its last, hidden result."""
    out: Any = ctx.avals_out[0]
    lhs: Any = ctx.avals_in[0]
    *rows, n = out.shape
    batch, m = math.prod(rows[: params.batch_dims]), math.prod(rows[params.batch_dims :])
    size = _ffi.workspace_bytes(
        op,
        batch,
        m,
        n,
        itemsize=lhs.dtype.itemsize,
        out_itemsize=params.out_dtype.itemsize,
        lhs_transposed=params.lhs_transposed,
        extra=params.extra,
        packing=params.packing,
    )
    workspace = out.update(
        shape=(size,),
        dtype=np.dtype(np.uint8),
        sharding=NamedSharding(out.sharding.mesh, PartitionSpec(None)),
    )
    rule = jax.ffi.ffi_lowering(f"jax_swiglu_{op}")
    results = rule(
        ctx.replace(avals_out=[*ctx.avals_out, workspace]), *operands, **params.attributes()
    )
    return results[:-1]


def _lower_call(
    primitive: Primitive,
    op: str,
    mesh: _partitioning.DeviceMesh | None,
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    params: OpParams,
) -> Sequence[Any]:
    """The custom call; where the program spans devices, behind a rule for the partitioner."""
    if mesh is not None:
        if ctx.module_context.lowering_parameters.for_export:
            raise NotImplementedError(
                "jax.export cannot keep the partitioning rules of jax_swiglu; to export a program "
                "for several devices, call it inside jax.shard_map over all axes of the mesh"
            )
        return _partitioning.lower(primitive, op, mesh, ctx, *operands, params=params)
    if op == "matmul" and params.extra:
        # The epilogue of the second GEMM adds the first product.
        *pair, c, d = operands
        avals = ctx.avals_in[:2]
        first = _lower_ffi(op, ctx.replace(avals_in=avals), *pair, params=params.as_gemm())
        ctx, operands = ctx.replace(avals_in=[*avals, *ctx.avals_out]), (c, d, *first)
    return _lower_ffi(op, ctx, *operands, params=params)


def _operand_dtype(ctx: mlir.LoweringRuleContext) -> np.dtype:
    aval: Any = ctx.avals_in[0]
    return aval.dtype


def _is_static_and_full(ctx: mlir.LoweringRuleContext, params: OpParams) -> bool:
    """Whether all sizes are known and none is zero; XLA handles the rest."""
    avals: list[Any] = [*ctx.avals_in, *ctx.avals_out]
    sizes = [size for aval in avals for size in aval.shape]
    symbolic = [size for size in sizes if not isinstance(size, int)]
    if symbolic and params.implementation is not None:
        raise NotImplementedError(
            f"implementation={params.implementation!r} needs known sizes; got {symbolic[0]}. Use "
            'implementation=None or "xla" to run on XLA, or export a program for each size'
        )
    return all(isinstance(size, int) and size > 0 for size in sizes)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def cudnn_obstacle(dtype: np.dtype) -> str | None:
    """Why cuDNN cannot run operands of this dtype on the GPUs of this process, if so."""
    if dtype not in CUDNN_DTYPES:
        return f"cuDNN runs {' and '.join(str(d) for d in CUDNN_DTYPES)}; got {dtype}"
    status = _load.cudnn_status()
    return status.reason if status.usable is False else None


def _gemm(a: jax.Array, b: jax.Array, params: OpParams) -> jax.Array:
    return matmul_p.bind(a, b, params=params.as_gemm())[0]


def _lower_cuda(
    primitive: Primitive,
    op: str,
    reference: Reference,
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    params: OpParams,
) -> Sequence[Any]:
    if params.implementation == "host":
        raise NotImplementedError(
            'implementation="host" runs on the CPU only; use None or "cudnn" on a GPU'
        )
    dtype = _operand_dtype(ctx)
    obstacle = cudnn_obstacle(dtype)
    if obstacle is not None and params.implementation == "cudnn":
        raise NotImplementedError(
            f'implementation="cudnn": {obstacle}. Use implementation=None or "xla" to run on XLA'
        )
    if obstacle is not None and dtype in CUDNN_DTYPES:
        _warn_once(f"jax_swiglu runs on XLA: {obstacle}")
    if obstacle is None and _is_static_and_full(ctx, params):
        mesh = _partitioning.device_mesh(ctx)
        lhs: Any = ctx.avals_in[0]
        # With several devices, the part of each decides.
        to_xla = "nothing" if mesh else divide(op, params, lhs.shape, dtype).to_xla
        if to_xla == "nothing":
            return _lower_call(primitive, op, mesh, ctx, *operands, params=params)
        if to_xla == "elementwise":
            reference = functools.partial(reference, gemm=_gemm)
    return _partitioning.lower_function(reference, ctx, *operands, params=params)


def _lower_default(
    primitive: Primitive,
    op: str,
    reference: Reference,
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    params: OpParams,
) -> Sequence[Any]:
    if params.implementation == "cudnn":
        raise NotImplementedError(
            f'implementation="cudnn" needs an NVIDIA GPU; {_load.cudnn_status().reason}. '
            'Use implementation=None or "xla" to run on XLA'
        )
    if params.implementation == "host" and _is_static_and_full(ctx, params):
        dtype = _operand_dtype(ctx)
        if dtype not in HOST_DTYPES:
            raise NotImplementedError(
                f'implementation="host" runs {", ".join(str(d) for d in HOST_DTYPES)}; got '
                f'{dtype}. Use implementation=None or "xla"'
            )
        mesh = _partitioning.device_mesh(ctx)
        return _lower_call(primitive, op, mesh, ctx, *operands, params=params)
    return _partitioning.lower_function(reference, ctx, *operands, params=params)


def _jvp(
    primitive: Primitive,
    reference: Reference,
    primals: Arrays,
    tangents: Arrays,
    *,
    params: OpParams,
) -> tuple[Arrays, Arrays]:
    """Derivatives of the primitives, which second derivatives need, come from the reference."""
    out = primitive.bind(*primals, params=params)
    _, out_tangents = jax.jvp(
        functools.partial(reference, params=params),
        tuple(primals),
        tuple(ad.instantiate_zeros(t) for t in tangents),
    )
    return out, out_tangents


def _batch(
    primitive: Primitive,
    row_operands: Callable[[OpParams], tuple[int, ...]],
    axis_data: Any,
    args: Arrays,
    dims: Sequence[int | None],
    *,
    params: OpParams,
) -> tuple[Arrays, Sequence[int]]:
    """The rule for vmap.

    If only operands with rows of the product are mapped, they get one more dimension of rows;
    otherwise all operands get one more batch dimension.
    """
    rows = row_operands(params)
    only_rows = bool(rows) and all(d is None or i in rows for i, d in enumerate(dims))
    position = params.batch_dims if only_rows else 0
    operands = [
        a
        if only_rows and i not in rows
        else jnp.moveaxis(
            batching.bdim_at_front(a, d, axis_data.size, axis_data.explicit_mesh_axis), 0, position
        )
        for i, (a, d) in enumerate(zip(args, dims, strict=True))
    ]
    out = primitive.bind(*operands, params=params if only_rows else params.with_batch_dim())
    return out, [position] * len(out)


def _make(
    op: str,
    avals: Callable[..., list[Any]],
    reference: Reference,
    row_operands: Callable[[OpParams], tuple[int, ...]],
) -> Primitive:
    primitive = Primitive(f"jax_swiglu_{op}")
    primitive.multiple_results = True
    primitive.def_abstract_eval(avals)
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    mlir.register_lowering(primitive, functools.partial(_lower_default, primitive, op, reference))
    mlir.register_lowering(
        primitive, functools.partial(_lower_cuda, primitive, op, reference), platform="cuda"
    )
    _partitioning.register(primitive)
    ad.primitive_jvps[primitive] = functools.partial(_jvp, primitive, reference)
    batching.fancy_primitive_batchers[primitive] = functools.partial(
        _batch, primitive, row_operands
    )
    return primitive


# Packed, gate and up are one operand or result, gate_up, and so are w_gate and w_up, dgate and dup.

# (x, w_gate, w_up) -> (h,) or (h, gate, up)
glu_fwd_p = _make("glu_fwd", _glu_fwd_avals, _reference.glu_fwd, lambda params: (0,))
# (dout, w_down, gate, up) -> (dgate, dup) or (dgate, dup, h)
glu_bwd_p = _make("glu_bwd", _glu_bwd_avals, _reference.glu_bwd, lambda params: (0, 2, 3))
# (a, b) -> (a @ b,) or (a, b, c, d) -> (a @ b + c @ d,)
matmul_p = _make(
    "matmul",
    _matmul_avals,
    _reference.matmul,
    lambda params: () if params.lhs_transposed else (0, 2),
)
