"""What the operations compute, in plain JAX: the implementation wherever cuDNN does not run.

All functions take matrices `[rows, columns]` or, with a batch in front, `[batch, rows, columns]`.
GEMM results are rounded to their dtype; the activation is computed in at least float32.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_swiglu._config import OpParams


def dot(
    a: jax.Array,
    b: jax.Array,
    *,
    lhs_transposed: bool = False,
    rhs_transposed: bool = False,
    out_dtype: np.dtype | None = None,
    precision: str | None = None,
) -> jax.Array:
    """`a @ b` over the last two dimensions; a transposed operand is stored the other way round."""
    batch = tuple(range(a.ndim - 2))
    contract_a = a.ndim - (2 if lhs_transposed else 1)
    contract_b = b.ndim - (1 if rhs_transposed else 2)
    wider = None if out_dtype in (None, a.dtype) else out_dtype
    return lax.dot_general(
        a,
        b,
        (((contract_a,), (contract_b,)), (batch, batch)),
        precision=precision,
        preferred_element_type=wider,
    )


def _sigmoid_slope(x: jax.Array) -> jax.Array:
    """The derivative of silu, sigmoid(x) * (1 + x * (1 - sigmoid(x))).

    For very negative x sigmoid(x) is subnormal, and flushed to zero, while the product is not.
    """
    sigmoid = lax.logistic(x)
    slope = sigmoid * (1 + x * (1 - sigmoid))
    far = float(np.log(jnp.finfo(x.dtype).tiny)) / 2
    root = jnp.exp(jnp.minimum(x, far) / 2)
    return jnp.where(x < far, root * (root * (1 + x)), slope)


@jax.custom_jvp
def silu(x: jax.Array) -> jax.Array:
    """`x * sigmoid(x)`, with a derivative that is right down to the smallest numbers."""
    return x * lax.logistic(x)


@silu.defjvp
def _silu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (t,) = primals, tangents
    return silu(x), t * _sigmoid_slope(x)


def _wide(x: jax.Array) -> jax.Array:
    return x if x.dtype.itemsize > 4 else x.astype(jnp.float32)


def activation(gate: jax.Array, up: jax.Array) -> jax.Array:
    """`silu(gate) * up`, rounded once."""
    return (silu(_wide(gate)) * _wide(up)).astype(gate.dtype)


def activation_grad(dh: jax.Array, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The cotangents of gate and up for the cotangent dh of `activation`."""
    wide_dh, wide_gate, wide_up = _wide(dh), _wide(gate), _wide(up)
    dgate = wide_dh * wide_up * _sigmoid_slope(wide_gate)
    return dgate.astype(gate.dtype), (wide_dh * silu(wide_gate)).astype(up.dtype)


def glu_fwd(
    x: jax.Array, w_gate: jax.Array, w_up: jax.Array, params: OpParams
) -> tuple[jax.Array, ...]:
    """h = silu(x @ w_gate) * (x @ w_up), and with `extra` also gate and up."""
    t, precision = params.rhs_transposed, params.precision
    gate = dot(x, w_gate, rhs_transposed=t, precision=precision)
    up = dot(x, w_up, rhs_transposed=t, precision=precision)
    h = activation(gate, up)
    return (h, gate, up) if params.extra else (h,)


def glu_bwd(
    dout: jax.Array, w_down: jax.Array, gate: jax.Array, up: jax.Array, params: OpParams
) -> tuple[jax.Array, ...]:
    """dgate and dup for dh = dout @ rhs, and with `extra` also h."""
    dh = dot(dout, w_down, rhs_transposed=params.rhs_transposed, precision=params.precision)
    grads = activation_grad(dh, gate, up)
    return (*grads, activation(gate, up)) if params.extra else grads


def matmul(
    a: jax.Array, b: jax.Array, *addend: jax.Array, params: OpParams
) -> tuple[jax.Array, ...]:
    """a @ b, plus the addend with `extra`."""
    out = dot(
        a,
        b,
        lhs_transposed=params.lhs_transposed,
        rhs_transposed=params.rhs_transposed,
        out_dtype=params.out_dtype,
        precision=params.precision,
    )
    return (out + addend[0],) if params.extra else (out,)
