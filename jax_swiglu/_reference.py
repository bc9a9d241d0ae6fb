"""What the operations compute, in plain JAX: the implementation wherever cuDNN does not run.

Shapes are those of `_dims`. GEMM results are rounded to their dtype; the activation is computed in
at least float32.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_swiglu._config import OpParams
from jax_swiglu._dims import PAIR, Dims, dims_of
from jax_swiglu._partitioning import is_explicit, product_sharding


def dot(a: jax.Array, b: jax.Array, params: OpParams) -> jax.Array:
    """`a @ b`; a transposed operand is stored the other way round."""
    return _contract(a, b, dims_of("matmul", params, a.ndim), params)


def _plan(dims: Dims, params: OpParams, mixed: bool) -> tuple[bool, tuple[str, ...]]:
    """Whether to swap the operands of a product, and its dimensions in the order XLA makes them."""
    a, b = dims.operands[:2]
    result = dims.results[0]
    # Where the right operand contributes several dimensions, XLA on the CPU (0.9 to 0.12) has no
    # product of mixed dtypes, and adds up 16-bit rows in 16 bits.
    swap = (mixed or params.lhs_transposed) and PAIR in b and PAIR in result
    first, second = (b, a) if swap else (a, b)
    free = [name for name in (*first, *second) if (name in a) != (name in b)]
    return swap, (*a[: params.batch_dims], *free)


def gives_transposed(dims: Dims, params: OpParams, dtype: np.dtype) -> bool:
    """Whether the product that XLA makes has to be transposed."""
    return _plan(dims, params, params.out_dtype != dtype)[1] != dims.results[0]


def _contract(a: jax.Array, b: jax.Array, dims: Dims, params: OpParams) -> jax.Array:
    mixed = params.out_dtype != a.dtype
    swap, made = _plan(dims, params, mixed)
    names, result = dims.operands[:2], dims.results[0]
    sharding = product_sharding(dims, jax.typeof(a), jax.typeof(b))
    split = dict(zip(result, sharding.spec, strict=True))
    sharding = sharding.update(spec=tuple(split[name] for name in made))
    if swap:
        a, b, names = b, a, names[::-1]
    contract_a, contract_b = (tuple(of.index(name) for name in dims.contracted) for of in names)
    batch = tuple(range(params.batch_dims))
    out = lax.dot_general(
        a,
        b,
        ((contract_a, contract_b), (batch, batch)),
        precision=params.precision,
        preferred_element_type=params.out_dtype if mixed else None,
        # JAX cannot choose it where a contracted dimension is split over explicit axes.
        out_sharding=sharding if is_explicit(sharding) else None,
    )
    return out if made == result else out.transpose([made.index(name) for name in result])


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


Gemm = Callable[[jax.Array, jax.Array, OpParams], jax.Array]


def halves(*gate_up: jax.Array, params: OpParams) -> tuple[jax.Array, jax.Array]:
    """gate and up, of themselves or of the one array that holds both."""
    if not params.packing:
        gate, up = gate_up
        return gate, up
    first, second = (lax.index_in_dim(gate_up[0], i, -2, keepdims=False) for i in (0, 1))
    return (second, first) if params.up_first else (first, second)


def _join(gate_up: tuple[jax.Array, ...], params: OpParams) -> tuple[jax.Array, ...]:
    if not params.packing:
        return gate_up
    return (jnp.stack(gate_up[::-1] if params.up_first else gate_up, axis=-2),)


def gate_up(
    x: jax.Array, *w_in: jax.Array, params: OpParams, gemm: Gemm = dot
) -> tuple[jax.Array, ...]:
    """The products of x with w_gate and w_up, or with the one array that holds both."""
    if not params.packing:
        return tuple(gemm(x, w, params) for w in w_in)
    dims = dims_of("glu_fwd", dataclasses.replace(params, extra=True), x.ndim)
    return (_contract(x, w_in[0], dims._replace(results=dims.results[1:]), params),)


def glu_fwd(
    x: jax.Array, *w_in: jax.Array, params: OpParams, gemm: Gemm = dot
) -> tuple[jax.Array, ...]:
    """h = silu(x @ w_gate) * (x @ w_up), and with `extra` also gate and up."""
    products = gate_up(x, *w_in, params=params, gemm=gemm)
    h = activation(*halves(*products, params=params))
    return (h, *products) if params.extra else (h,)


def glu_bwd(
    dout: jax.Array,
    w_down: jax.Array,
    *gate_up: jax.Array,
    params: OpParams,
    gemm: Gemm = dot,
) -> tuple[jax.Array, ...]:
    """dgate and dup for dh = dout @ rhs, and with `extra` also h."""
    gate, up = halves(*gate_up, params=params)
    dh = gemm(dout, w_down, dataclasses.replace(params, packing=""))
    grads = _join(activation_grad(dh, gate, up), params)
    return (*grads, activation(gate, up)) if params.extra else grads


def matmul(
    a: jax.Array, b: jax.Array, *second: jax.Array, params: OpParams, gemm: Gemm = dot
) -> tuple[jax.Array, ...]:
    """a @ b, and with `extra` plus the product of a second pair."""
    out = gemm(a, b, params)
    if params.extra:
        c, d = second
        out += gemm(c, d, params)
    return (out,)
