"""Values and gradients in terms of the primitives.

`w_in` are w_gate and w_up, or the one array that holds both; what belongs to them (gate and up, and
all cotangents) comes in as many parts.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding

from jax_swiglu import _reference
from jax_swiglu._config import Config, OpParams, WeightLayout, op_params
from jax_swiglu._partitioning import explicit_sharding
from jax_swiglu._primitives import glu_bwd_p, glu_fwd_p, matmul_p


@dataclasses.dataclass(frozen=True)
class _Type:
    """What the gradient of an operand has in common with it, beside the shape."""

    dtype: np.dtype
    sharding: NamedSharding | None  # on meshes with explicit axes


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """The operands whose gradients are wanted; None for the others."""

    x: _Type | None
    w_in: tuple[_Type | None, ...]
    w_down: _Type | None = None

    @property
    def weights_in(self) -> bool:
        return any(w is not None for w in self.w_in)

    @property
    def inner(self) -> bool:
        """Whether anything in front of h is wanted."""
        return self.x is not None or self.weights_in


def _wanted(primal: Any) -> _Type | None:
    if not primal.perturbed:
        return None
    return _Type(np.dtype(primal.value.dtype), explicit_sharding(primal.value))


def _glu_fwd(config: Config, x: jax.Array, *w_in: jax.Array, save: bool) -> list[jax.Array]:
    params = _glu_fwd_params(config, config.glu_fwd_route, save)
    return glu_fwd_p.bind(*(a.astype(config.dtype) for a in (x, *w_in)), params=params)


def _glu_fwd_params(config: Config, route: str, save: bool) -> OpParams:
    transposed = config.layout_in == "out_in"
    return op_params(config, route, rhs_transposed=transposed, extra=save, packed=True)


def _matmul(
    config: Config,
    *operands: jax.Array,
    lhs_transposed: bool = False,
    rhs_transposed: bool = False,
    packed: bool = False,
    out_type: _Type | None = None,
) -> jax.Array:
    """`a @ b` or, of four operands, `a @ b + c @ d` in the computation dtype; its result has any.

    A result wider than the computation dtype comes out of the float32 accumulators.
    """
    out_dtype = config.dtype if out_type is None else out_type.dtype
    narrow = config.dtype.itemsize == 2
    gemm_dtype = np.dtype(np.float32) if narrow and out_dtype != config.dtype else config.dtype
    params = op_params(
        config,
        config.matmul_route,
        lhs_transposed=lhs_transposed,
        rhs_transposed=rhs_transposed,
        extra=len(operands) > 2,
        out_dtype=gemm_dtype,
        packed=packed,
    )
    (out,) = matmul_p.bind(*(a.astype(config.dtype) for a in operands), params=params)
    out = out.astype(out_dtype)
    if out_type is None or out_type.sharding is None:
        return out
    return jax.sharding.reshard(out, out_type.sharding)


def _weight_grad(
    config: Config,
    layout: WeightLayout,
    inputs: jax.Array | None,
    doutputs: jax.Array,
    out_type: _Type | None,
    *,
    packed: bool = False,
) -> jax.Array | None:
    """The gradient of a weight that maps `inputs` to the outputs with cotangent `doutputs`."""
    if out_type is None:
        return None
    assert inputs is not None
    pair = (inputs, doutputs) if layout == "in_out" else (doutputs, inputs)
    return _matmul(config, *pair, lhs_transposed=True, packed=packed, out_type=out_type)


def _inner_grads(
    config: Config,
    wanted: _Wanted,
    x: jax.Array | None,
    w_in: Sequence[jax.Array | None],
    dgate_up: Sequence[jax.Array],
) -> tuple[jax.Array | None, ...]:
    """Gradients of x and w_in."""
    dx = None
    if wanted.x is not None:
        products: Any = itertools.chain(*zip(dgate_up, w_in, strict=True))
        transposed = config.layout_in == "in_out"
        dx = _matmul(config, *products, rhs_transposed=transposed, packed=True, out_type=wanted.x)
    dw_in = (
        _weight_grad(config, config.layout_in, x, d, w, packed=True)
        for d, w in zip(dgate_up, wanted.w_in, strict=True)
    )
    return dx, *dw_in


# The gated half.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def swiglu(config: Config, x: jax.Array, w_gate: jax.Array, w_up: jax.Array) -> jax.Array:
    """h = silu(x @ w_gate) * (x @ w_up) for x of shape [..., H]."""
    return _glu_fwd(config, x, w_gate, w_up, save=False)[0]


def _swiglu_fwd(config: Config, x: Any, w_gate: Any, w_up: Any) -> tuple[jax.Array, Any]:
    w_in = w_gate, w_up
    wanted = _Wanted(_wanted(x), tuple(map(_wanted, w_in)))
    h, *saved = _inner_fwd(config, wanted, x, w_in)
    return h, (wanted, *saved)


def _inner_fwd(config: Config, wanted: _Wanted, x: Any, w_in: Sequence[Any]) -> tuple[Any, ...]:
    """h, and what the backward pass reads of x, w_in, gate and up."""
    recompute = wanted.inner and config.residuals == "input"
    keep_x = recompute or wanted.weights_in
    keep_w = recompute or wanted.x is not None
    save = wanted.inner and not recompute
    values = _glu_fwd(config, x.value, *(w.value for w in w_in), save=save)
    # Policies of `jax.checkpoint` see these names; packed gate and up have the first.
    *gate_up_names, h_name = config.residual_names
    h, *gate_up = map(checkpoint_name, values, (h_name, *gate_up_names))
    return (
        h,
        x.value if keep_x else None,
        [w.value if keep_w else None for w in w_in],
        gate_up,
    )


def _swiglu_bwd(config: Config, residuals: Any, dh: Any) -> tuple[Any, ...]:
    wanted, x, w_in, gate_up = residuals
    if isinstance(dh, SymbolicZero) or not wanted.inner:
        return None, None, None
    gate, up = gate_up or _glu_fwd(config, x, *w_in, save=True)[1:]
    # There is no GEMM to fuse this with, and XLA's elementwise kernels run at full bandwidth.
    return _inner_grads(config, wanted, x, w_in, _reference.activation_grad(dh, gate, up))


swiglu.defvjp(_swiglu_fwd, _swiglu_bwd, symbolic_zeros=True)


# The whole MLP.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def swiglu_mlp(config: Config, x: jax.Array, *weights: jax.Array) -> jax.Array:
    """(silu(x @ w_gate) * (x @ w_up)) @ w_down for x of shape [..., H], of w_in and w_down."""
    *w_in, w_down = weights
    return _down(config, _glu_fwd(config, x, *w_in, save=False)[0], w_down)


def _down(config: Config, h: jax.Array, w_down: jax.Array) -> jax.Array:
    return _matmul(config, h, w_down, rhs_transposed=config.weight_layout == "out_in")


def _swiglu_mlp_fwd(config: Config, x: Any, *weights: Any) -> tuple[jax.Array, Any]:
    *w_in, w_down = weights
    wanted = _Wanted(_wanted(x), tuple(map(_wanted, w_in)), _wanted(w_down))
    h, *saved = _inner_fwd(config, wanted, x, w_in)
    # The backward pass gets h from the epilogue of its first GEMM, unless that GEMM is not needed.
    keep_h = wanted.w_down is not None and (config.residuals == "full" or not wanted.inner)
    residuals = (
        wanted,
        *saved,
        w_down.value if wanted.inner else None,
        h if keep_h else None,
    )
    return _down(config, h, w_down.value), residuals


def _swiglu_mlp_bwd(config: Config, residuals: Any, dout: Any) -> tuple[Any, ...]:
    wanted, x, w_in, gate_up, w_down, h = residuals
    inner: tuple[Any, ...] = (None,) * (1 + len(w_in))
    if isinstance(dout, SymbolicZero):
        return *inner, None
    if wanted.inner:
        if not gate_up:
            h, *gate_up = _glu_fwd(config, x, *w_in, save=True)
        params = op_params(
            config,
            config.glu_bwd_route,
            rhs_transposed=config.weight_layout == "in_out",
            extra=wanted.w_down is not None and h is None,
            packed=True,
        )
        results = glu_bwd_p.bind(dout, w_down.astype(config.dtype), *gate_up, params=params)
        h = results[-1] if params.extra else h
        inner = _inner_grads(config, wanted, x, w_in, results[: len(w_in)])
    return *inner, _weight_grad(config, config.weight_layout, h, dout, wanted.w_down)


swiglu_mlp.defvjp(_swiglu_mlp_fwd, _swiglu_mlp_bwd, symbolic_zeros=True)


# The same in plain JAX, differentiated by JAX: this one has a forward mode too.


def swiglu_xla(config: Config, x: jax.Array, *w_in: jax.Array) -> jax.Array:
    operands = [a.astype(config.dtype) for a in (x, *w_in)]
    params = _glu_fwd_params(config, "", save=True)
    *gate_up_names, h_name = config.residual_names
    products = _reference.gate_up(*operands, params=params)
    gate, up = _reference.halves(*map(checkpoint_name, products, gate_up_names), params=params)
    return checkpoint_name(_reference.activation(gate, up), h_name)


def swiglu_mlp_xla(config: Config, x: jax.Array, *weights: jax.Array) -> jax.Array:
    *w_in, w_down = weights
    h = swiglu_xla(config, x, *w_in)
    params = op_params(config, "", rhs_transposed=config.weight_layout == "out_in")
    return _reference.dot(h, w_down.astype(config.dtype), params)
