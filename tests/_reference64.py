"""The SwiGLU-MLP and its gradients in float64 NumPy, and how closely results must agree with them.

The formulas are written out here and share no code with the package.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

# Largest relative error (Frobenius norm of the difference over that of the right value).
#
# 16-bit dtypes: gate, up, h and the result are each rounded to nearest, which is off by up to half
# an eps, a third of that in the root mean square; a handful of such roundings stay below one eps,
# whatever the scale of the inputs. A wrong formula, operand or stride is off by tens of per cent.
# 32- and 64-bit dtypes: the summation errors of GEMMs of up to a few thousand terms dominate.
TOLERANCE = {
    "bfloat16": float(jnp.finfo(jnp.bfloat16).eps),
    "float16": float(np.finfo(np.float16).eps),
    "float32": 32 * float(np.finfo(np.float32).eps),
    "float64": 32 * float(np.finfo(np.float64).eps),
}

NAMES = ("out", "dx", "dw_gate", "dw_up", "dw_down")


class Inputs(NamedTuple):
    """Operands of the MLP, and a cotangent of its result."""

    x: np.ndarray
    w_gate: np.ndarray
    w_up: np.ndarray
    w_down: np.ndarray
    dout: np.ndarray

    @property
    def operands(self) -> tuple[np.ndarray, ...]:
        return self[:4]


def draw(
    m: int,
    h: int,
    i: int,
    o: int,
    dtype: object,
    *,
    layout: str = "in_out",
    scale: float = 1.0,
    seed: int = 0,
    positive: bool = False,
) -> Inputs:
    """Random inputs. Weights are scaled so that gate and up come out about as large as x."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        values = rng.standard_normal(shape) * scale
        return (np.abs(values) if positive else values).astype(dtype)

    x, dout = normal(m, h, scale=scale), normal(m, o)
    weights = [normal(h, i, scale=h**-0.5) for _ in range(2)] + [normal(i, o, scale=i**-0.5)]
    if layout == "out_in":
        weights = [np.ascontiguousarray(w.T) for w in weights]
    return Inputs(x, *weights, dout)


def sigmoid(a: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(a))
    return np.where(a >= 0, 1, e) / (1 + e)


def wide(*arrays: object) -> list[np.ndarray]:
    return [np.asarray(a).astype(np.float64) for a in arrays]


def mlp(
    x: object, w_gate: object, w_up: object, w_down: object, *, layout: str = "in_out"
) -> np.ndarray:
    """The output, [M, O]."""
    x, w_gate, w_up, w_down = wide(x, w_gate, w_up, w_down)
    if layout == "out_in":
        w_gate, w_up, w_down = w_gate.T, w_up.T, w_down.T
    gate, up = x @ w_gate, x @ w_up
    return (gate * sigmoid(gate) * up) @ w_down


def mlp_and_grads(
    x: object,
    w_gate: object,
    w_up: object,
    w_down: object,
    dout: object,
    *,
    layout: str = "in_out",
) -> tuple[np.ndarray, ...]:
    """out, dx, dw_gate, dw_up, dw_down for x of shape [M, H] and the cotangent dout of out."""
    x, w_gate, w_up, w_down, dout = wide(x, w_gate, w_up, w_down, dout)
    if layout == "out_in":
        w_gate, w_up, w_down = w_gate.T, w_up.T, w_down.T
    gate, up = x @ w_gate, x @ w_up
    s = sigmoid(gate)
    h = gate * s * up
    dh = dout @ w_down.T
    dgate = dh * up * (s + gate * s * (1 - s))
    dup = dh * gate * s
    dx = dgate @ w_gate.T + dup @ w_up.T
    dweights = [x.T @ dgate, x.T @ dup, h.T @ dout]
    if layout == "out_in":
        dweights = [dw.T for dw in dweights]
    return (h @ w_down, dx, *dweights)


def relative_error(got: object, want: np.ndarray) -> float:
    (got,) = wide(got)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    norm = np.linalg.norm(want)
    difference = np.linalg.norm(got - want)
    return float(difference / norm if norm else difference)


def check_value(got: object, want: np.ndarray, tolerance: float, name: str = "value") -> None:
    error = relative_error(got, want)
    # Not `error > tolerance`, which a NaN passes.
    assert error <= tolerance, f"{name}: relative error {error:.3g}, allowed {tolerance:.3g}"


def check(
    got: object, inputs: Inputs, *, layout: str = "in_out", tolerance: float | None = None
) -> None:
    """Compares (out, dx, dw_gate, dw_up, dw_down) with the reference, dtypes included."""
    dtype = inputs.x.dtype
    if tolerance is None:
        tolerance = TOLERANCE[str(dtype)]
    want = mlp_and_grads(*inputs, layout=layout)
    for name, g, w in zip(NAMES, got, want, strict=True):
        assert g.dtype == dtype, f"{name} has dtype {g.dtype}"
        check_value(g, w, tolerance, name)
