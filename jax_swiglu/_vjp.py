"""Values and gradients in terms of the primitives."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding

from jax_swiglu import _reference
from jax_swiglu._config import Config, op_params
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
    w_gate: _Type | None
    w_up: _Type | None
    w_down: _Type | None = None

    @property
    def weights_in(self) -> bool:
        return self.w_gate is not None or self.w_up is not None

    @property
    def inner(self) -> bool:
        """Whether anything in front of h is wanted."""
        return self.x is not None or self.weights_in


def _wanted(*primals: Any) -> _Wanted:
    return _Wanted(
        *(
            _Type(np.dtype(p.value.dtype), explicit_sharding(p.value)) if p.perturbed else None
            for p in primals
        )
    )


def _glu_fwd(
    config: Config, x: jax.Array, w_gate: jax.Array, w_up: jax.Array, *, save: bool
) -> list[jax.Array]:
    params = op_params(
        config,
        config.glu_fwd_route,
        rhs_transposed=config.weight_layout == "out_in",
        extra=save,
    )
    cast = (a.astype(config.dtype) for a in (x, w_gate, w_up))
    return glu_fwd_p.bind(*cast, params=params)


def _named_glu_fwd(
    config: Config, x: jax.Array, w_gate: jax.Array, w_up: jax.Array, *, save: bool
) -> tuple[jax.Array, list[jax.Array]]:
    """h, and gate and up if they are saved, with the names that `jax.checkpoint` policies see."""
    gate_name, up_name, h_name = config.residual_names
    values = _glu_fwd(config, x, w_gate, w_up, save=save)
    h, *gate_up = map(checkpoint_name, values, (h_name, gate_name, up_name))
    return h, gate_up


def _matmul(
    config: Config,
    a: jax.Array,
    b: jax.Array,
    *addend: jax.Array,
    lhs_transposed: bool = False,
    rhs_transposed: bool = False,
    out_type: _Type | None = None,
) -> jax.Array:
    """`a @ b [+ addend]` in the computation dtype, with a result of any dtype.

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
        extra=bool(addend),
        out_dtype=gemm_dtype,
    )
    operands = (a.astype(config.dtype), b.astype(config.dtype))
    (out,) = matmul_p.bind(*operands, *(c.astype(gemm_dtype) for c in addend), params=params)
    out = out.astype(out_dtype)
    if out_type is None or out_type.sharding is None:
        return out
    return jax.sharding.reshard(out, out_type.sharding)


def _weight_grad(
    config: Config, inputs: jax.Array | None, doutputs: jax.Array, out_type: _Type | None
) -> jax.Array | None:
    """The gradient of a weight that maps `inputs` to the outputs with cotangent `doutputs`."""
    if out_type is None:
        return None
    assert inputs is not None
    pair = (inputs, doutputs) if config.weight_layout == "in_out" else (doutputs, inputs)
    return _matmul(config, *pair, lhs_transposed=True, out_type=out_type)


def _inner_grads(
    config: Config,
    wanted: _Wanted,
    x: jax.Array | None,
    w_gate: jax.Array | None,
    w_up: jax.Array | None,
    dgate: jax.Array,
    dup: jax.Array,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """Gradients of x, w_gate and w_up."""
    dx = None
    if wanted.x is not None:
        assert w_gate is not None and w_up is not None
        back = functools.partial(
            _matmul, config, rhs_transposed=config.weight_layout == "in_out", out_type=wanted.x
        )
        dx = back(dup, w_up, back(dgate, w_gate))
    return (
        dx,
        _weight_grad(config, x, dgate, wanted.w_gate),
        _weight_grad(config, x, dup, wanted.w_up),
    )


# The gated half.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def swiglu(config: Config, x: jax.Array, w_gate: jax.Array, w_up: jax.Array) -> jax.Array:
    """h = silu(x @ w_gate) * (x @ w_up) for x of shape [..., H]."""
    return _glu_fwd(config, x, w_gate, w_up, save=False)[0]


def _swiglu_fwd(config: Config, x: Any, w_gate: Any, w_up: Any) -> tuple[jax.Array, Any]:
    wanted = _wanted(x, w_gate, w_up)
    save = wanted.inner and config.residuals != "input"
    h, gate_up = _named_glu_fwd(config, x.value, w_gate.value, w_up.value, save=save)
    return h, (wanted, *_saved_inputs(config, wanted, x, w_gate, w_up), gate_up)


def _saved_inputs(
    config: Config, wanted: _Wanted, x: Any, w_gate: Any, w_up: Any
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """Of x, w_gate and w_up, what the backward pass reads."""
    recompute = wanted.inner and config.residuals == "input"
    keep_x = recompute or wanted.weights_in
    keep_w = recompute or wanted.x is not None
    return (
        x.value if keep_x else None,
        w_gate.value if keep_w else None,
        w_up.value if keep_w else None,
    )


def _swiglu_bwd(config: Config, residuals: Any, dh: Any) -> tuple[Any, ...]:
    wanted, x, w_gate, w_up, gate_up = residuals
    if isinstance(dh, SymbolicZero) or not wanted.inner:
        return None, None, None
    gate, up = gate_up or _glu_fwd(config, x, w_gate, w_up, save=True)[1:]
    # There is no GEMM to fuse this with, and XLA's elementwise kernels run at full bandwidth.
    dgate, dup = _reference.activation_grad(dh, gate, up)
    return _inner_grads(config, wanted, x, w_gate, w_up, dgate, dup)


swiglu.defvjp(_swiglu_fwd, _swiglu_bwd, symbolic_zeros=True)


# The whole MLP.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def swiglu_mlp(
    config: Config, x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array
) -> jax.Array:
    """(silu(x @ w_gate) * (x @ w_up)) @ w_down for x of shape [..., H]."""
    return _down(config, _glu_fwd(config, x, w_gate, w_up, save=False)[0], w_down)


def _down(config: Config, h: jax.Array, w_down: jax.Array) -> jax.Array:
    return _matmul(config, h, w_down, rhs_transposed=config.weight_layout == "out_in")


def _swiglu_mlp_fwd(
    config: Config, x: Any, w_gate: Any, w_up: Any, w_down: Any
) -> tuple[jax.Array, Any]:
    wanted = _wanted(x, w_gate, w_up, w_down)
    save = wanted.inner and config.residuals != "input"
    h, gate_up = _named_glu_fwd(config, x.value, w_gate.value, w_up.value, save=save)
    # The backward pass gets h from the epilogue of its first GEMM, unless that GEMM is not needed.
    keep_h = wanted.w_down is not None and (config.residuals == "full" or not wanted.inner)
    residuals = (
        wanted,
        *_saved_inputs(config, wanted, x, w_gate, w_up),
        w_down.value if wanted.inner else None,
        gate_up,
        h if keep_h else None,
    )
    return _down(config, h, w_down.value), residuals


def _swiglu_mlp_bwd(config: Config, residuals: Any, dout: Any) -> tuple[Any, ...]:
    wanted, x, w_gate, w_up, w_down, gate_up, h = residuals
    if isinstance(dout, SymbolicZero):
        return None, None, None, None
    inner: tuple[Any, Any, Any] = (None, None, None)
    if wanted.inner:
        if gate_up:
            gate, up = gate_up
        else:
            h, gate, up = _glu_fwd(config, x, w_gate, w_up, save=True)
        params = op_params(
            config,
            config.glu_bwd_route,
            rhs_transposed=config.weight_layout == "in_out",
            extra=wanted.w_down is not None and h is None,
        )
        dgate, dup, *recomputed = glu_bwd_p.bind(
            dout, w_down.astype(config.dtype), gate, up, params=params
        )
        h = recomputed[0] if recomputed else h
        inner = _inner_grads(config, wanted, x, w_gate, w_up, dgate, dup)
    return *inner, _weight_grad(config, h, dout, wanted.w_down)


swiglu_mlp.defvjp(_swiglu_mlp_fwd, _swiglu_mlp_bwd, symbolic_zeros=True)


# The same in plain JAX, differentiated by JAX: this one has a forward mode too.


def swiglu_xla(config: Config, x: jax.Array, w_gate: jax.Array, w_up: jax.Array) -> jax.Array:
    x, w_gate, w_up = (a.astype(config.dtype) for a in (x, w_gate, w_up))
    params = op_params(config, "", rhs_transposed=config.weight_layout == "out_in")
    gate, up = (
        checkpoint_name(_reference.dot(x, w, params), name)
        for w, name in zip((w_gate, w_up), config.residual_names[:2], strict=True)
    )
    return checkpoint_name(_reference.activation(gate, up), config.residual_names[2])


def swiglu_mlp_xla(
    config: Config, x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array
) -> jax.Array:
    h = swiglu_xla(config, x, w_gate, w_up)
    params = op_params(config, "", rhs_transposed=config.weight_layout == "out_in")
    return _reference.dot(h, w_down.astype(config.dtype), params)
