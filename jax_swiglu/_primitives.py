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

from jax_swiglu import _ffi, _load, _partitioning, _reference
from jax_swiglu._config import CUDNN_DTYPES, HOST_DTYPES, OpParams

Arrays = Sequence[jax.Array]


def _product(lhs: Any, rhs: Any, params: OpParams) -> Any:
    """The aval of lhs @ rhs."""
    row_dim = -1 if params.lhs_transposed else -2
    column_dim = -2 if params.rhs_transposed else -1
    shape = (*lhs.shape[:-2], lhs.shape[row_dim], rhs.shape[column_dim])
    # Derived from an operand, so that the result varies over the same manual mesh axes.
    product = lhs.update(shape=shape, dtype=params.out_dtype)
    return _partitioning.with_explicit_sharding(product, lhs, row_dim, rhs, column_dim)


def _glu_fwd_avals(x: Any, w_gate: Any, w_up: Any, *, params: OpParams) -> list[Any]:
    h = _product(x, w_gate, params)
    return [h, h, h] if params.extra else [h]


def _glu_bwd_avals(dout: Any, w_down: Any, gate: Any, up: Any, *, params: OpParams) -> list[Any]:
    return [gate, up, gate] if params.extra else [gate, up]


def _matmul_avals(a: Any, b: Any, *addend: Any, params: OpParams) -> list[Any]:
    return [_product(a, b, params)]


def _lower_ffi(
    op: str, ctx: mlir.LoweringRuleContext, *operands: Any, params: OpParams
) -> Sequence[Any]:
    """A custom call with a workspace as its last, hidden result."""
    out: Any = ctx.avals_out[0]
    lhs: Any = ctx.avals_in[0]
    *batch, m, n = out.shape
    workspace = out.update(
        shape=(_ffi.workspace_bytes(op, math.prod(batch), m, n, lhs.dtype.itemsize, params.extra),),
        dtype=np.dtype(np.uint8),
    )
    rule = jax.ffi.ffi_lowering(f"jax_swiglu_{op}")
    results = rule(
        ctx.replace(avals_out=[*ctx.avals_out, workspace]), *operands, **params.attributes()
    )
    return results[:-1]


def _lower_call(
    primitive: Primitive,
    op: str,
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    params: OpParams,
) -> Sequence[Any]:
    """The custom call; where the program spans devices, behind a rule for the partitioner."""
    if _partitioning.spans_devices(ctx):
        return _partitioning.lower(primitive, op, ctx, *operands, params=params)
    return _lower_ffi(op, ctx, *operands, params=params)


def _operand_dtype(ctx: mlir.LoweringRuleContext) -> np.dtype:
    aval: Any = ctx.avals_in[0]
    return aval.dtype


def _is_static_and_full(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether all sizes are known and none is zero; XLA handles the rest."""
    avals: list[Any] = [*ctx.avals_in, *ctx.avals_out]
    sizes = [size for aval in avals for size in aval.shape]
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


# A weight gradient over fewer rows than one K tile is all writing. Measured on an H200 at 16 rows
# and [4096, 14336]: cuDNN's best GEMM takes 42 us, half as long again as the write; XLA's does not.
MAX_XLA_WEIGHT_GRAD_ROWS = 64


def _xla_is_faster(op: str, ctx: mlir.LoweringRuleContext, params: OpParams) -> bool:
    """A rule by op and shape alone, so that all processes of a job compile the same program."""
    lhs: Any = ctx.avals_in[0]
    return op == "matmul" and params.lhs_transposed and lhs.shape[-2] <= MAX_XLA_WEIGHT_GRAD_ROWS


def _lower_cuda(
    primitive: Primitive,
    op: str,
    reference: Any,
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
    if obstacle is None and _is_static_and_full(ctx):
        if params.implementation is None and _xla_is_faster(op, ctx, params):
            return reference(ctx, *operands, params=params)
        return _lower_call(primitive, op, ctx, *operands, params=params)
    if obstacle is not None and params.implementation == "cudnn":
        raise NotImplementedError(
            f'implementation="cudnn": {obstacle}. Use implementation=None or "xla" to run on XLA'
        )
    if obstacle is not None and dtype in CUDNN_DTYPES:
        _warn_once(f"jax_swiglu runs on XLA: {obstacle}")
    return reference(ctx, *operands, params=params)


def _lower_default(
    primitive: Primitive,
    op: str,
    reference: Any,
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    params: OpParams,
) -> Sequence[Any]:
    if params.implementation == "cudnn":
        raise NotImplementedError(
            f'implementation="cudnn" needs an NVIDIA GPU; {_load.cudnn_status().reason}. '
            'Use implementation=None or "xla" to run on XLA'
        )
    if params.implementation == "host" and _is_static_and_full(ctx):
        dtype = _operand_dtype(ctx)
        if dtype not in HOST_DTYPES:
            raise NotImplementedError(
                f'implementation="host" runs {", ".join(str(d) for d in HOST_DTYPES)}; got '
                f'{dtype}. Use implementation=None or "xla"'
            )
        return _lower_call(primitive, op, ctx, *operands, params=params)
    return reference(ctx, *operands, params=params)


def _jvp(
    primitive: Primitive,
    reference: Callable[..., Any],
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
    args: Arrays,
    dims: Sequence[int | None],
    *,
    params: OpParams,
) -> tuple[Arrays, Sequence[int]]:
    """The rule for vmap.

    If only operands that hold rows of the product are mapped, the batch is folded into the rows;
    otherwise it becomes a batch dimension of the graph.
    """
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    rows = row_operands(params)
    fold = bool(rows) and all(d is None or i in rows for i, d in enumerate(dims))

    def mapped(i: int) -> jax.Array:
        """Operand i with the new batch dimension in front."""
        dim = dims[i]
        if dim is None:
            return jnp.broadcast_to(args[i], (size, *args[i].shape))
        return jnp.moveaxis(args[i], dim, 0)

    def fold_rows(a: jax.Array) -> jax.Array:
        a = jnp.moveaxis(a, 0, -3)
        return a.reshape(*a.shape[:-3], size * a.shape[-2], a.shape[-1])

    def unfold_rows(a: jax.Array) -> jax.Array:
        a = a.reshape(*a.shape[:-2], size, a.shape[-2] // size if size else 0, a.shape[-1])
        return jnp.moveaxis(a, -3, 0)

    if fold and size:
        operands = [fold_rows(mapped(i)) if i in rows else a for i, a in enumerate(args)]
        out = [unfold_rows(a) for a in primitive.bind(*operands, params=params)]
    else:
        operands = [mapped(i) for i in range(len(args))]
        inner = operands[0].shape[1:-2]
        batch = math.prod((size, *inner))
        merged = [a.reshape(batch, *a.shape[-2:]) for a in operands]
        out = [
            a.reshape(size, *inner, *a.shape[-2:]) for a in primitive.bind(*merged, params=params)
        ]
    return out, [0] * len(out)


def _make(
    op: str,
    avals: Callable[..., list[Any]],
    reference: Callable[..., tuple[jax.Array, ...]],
    row_operands: Callable[[OpParams], tuple[int, ...]],
) -> Primitive:
    primitive = Primitive(f"jax_swiglu_{op}")
    primitive.multiple_results = True
    primitive.def_abstract_eval(avals)
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    lowered = mlir.lower_fun(reference, multiple_results=True)
    mlir.register_lowering(primitive, functools.partial(_lower_default, primitive, op, lowered))
    mlir.register_lowering(
        primitive, functools.partial(_lower_cuda, primitive, op, lowered), platform="cuda"
    )
    _partitioning.register(primitive)
    ad.primitive_jvps[primitive] = functools.partial(_jvp, primitive, reference)
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive, row_operands)
    return primitive


# (x, w_gate, w_up) -> (h,) or (h, gate, up)
glu_fwd_p = _make("glu_fwd", _glu_fwd_avals, _reference.glu_fwd, lambda params: (0,))
# (dout, w_down, gate, up) -> (dgate, dup) or (dgate, dup, h)
glu_bwd_p = _make("glu_bwd", _glu_bwd_avals, _reference.glu_bwd, lambda params: (0, 2, 3))
# (a, b) or (a, b, addend) -> (out,)
matmul_p = _make(
    "matmul",
    _matmul_avals,
    _reference.matmul,
    lambda params: () if params.lhs_transposed else (0, 2),
)
