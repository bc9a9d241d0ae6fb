"""Checks of what users pass, with errors that say argument, expected, got and remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jax_swiglu._packing import Packing


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        expected = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {expected}; got {value!r}")


def weight_dims(weight_layout: str) -> tuple[tuple[str, str], ...]:
    """Names of the dimensions of gate, up and down."""
    dims = (("H", "I"), ("H", "I"), ("I", "O"))
    return dims if weight_layout == "in_out" else tuple((b, a) for a, b in dims)


def _other(weight_layout: str) -> str:
    return "out_in" if weight_layout == "in_out" else "in_out"


def check_operands(weight_layout: str, operands: dict[str, jax.Array]) -> None:
    """Checks x, w_gate, w_up and, if present, w_down."""
    _check_kinds(operands)
    x, *weights = operands.values()
    w_gate, w_up, *w_down = weights
    dims = weight_dims(weight_layout)
    for name, value, of in zip(("w_gate", "w_up", "w_down"), weights, dims, strict=False):
        _check_matrix(name, value, of, weight_layout)
    sizes = dict(zip(dims[0], w_gate.shape, strict=True))
    in_dims = f"({', '.join(dims[0])})"
    if x.shape[-1] != sizes["H"]:
        hint = f'; weights stored as {w_gate.shape} need weight_layout="{_other(weight_layout)}"'
        raise ValueError(
            f"x must have shape (..., H) with H={sizes['H']} to match w_gate of shape "
            f"{in_dims}={w_gate.shape}; got x of shape {x.shape}"
            + (hint if x.shape[-1] == sizes["I"] else "")
        )
    if w_up.shape != w_gate.shape:
        raise ValueError(
            f"w_up must have shape {in_dims}={w_gate.shape} to match w_gate; got {w_up.shape}"
        )
    for value in w_down:
        _check_down(value, weight_layout, sizes["I"], f"w_gate of shape {w_gate.shape}")


def check_packed_operands(
    packing: Packing, weight_layout: str, operands: dict[str, jax.Array]
) -> None:
    """Checks x, w_gate_up and w_down."""
    _check_kinds(operands)
    x, w_gate_up, w_down = operands.values()
    expected = packing.expected()
    if not packing.fits(w_gate_up.shape):
        raise ValueError(
            f"w_gate_up must have shape {expected} for {packing}; got {w_gate_up.shape}. "
            "Pass the packing that it has"
        )
    sizes = dict(zip(packing.letters, packing.split(w_gate_up.shape), strict=True))
    match = f"w_gate_up of shape {expected}={w_gate_up.shape}"
    if x.shape[-1] != sizes["H"]:
        raise ValueError(
            f"x must have shape (..., H) with H={sizes['H']} to match {match}; "
            f"got x of shape {x.shape}. Pass the packing that w_gate_up has"
        )
    _check_matrix("w_down", w_down, weight_dims(weight_layout)[2], weight_layout)
    hint = f'; a w_down stored the other way round needs weight_layout="{_other(weight_layout)}"'
    _check_down(w_down, weight_layout, sizes["I"], match, hint)


def _check_kinds(operands: dict[str, jax.Array]) -> None:
    for name, value in operands.items():
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(
                f"{name} must have a floating-point dtype; got {value.dtype}. Cast it first"
            )
    if operands["x"].ndim == 0:
        raise ValueError("x must have shape (..., H); got a scalar")


def _check_matrix(name: str, value: jax.Array, dims: tuple[str, str], weight_layout: str) -> None:
    if value.ndim != 2:
        raise ValueError(
            f"{name} must have shape ({', '.join(dims)}) for weight_layout={weight_layout!r}; "
            f"got {value.shape}"
        )


def _check_down(
    w_down: jax.Array, weight_layout: str, intermediate: int, match: str, turned: str = ""
) -> None:
    """Checks I of w_down; `turned` is what to say where its other dimension has that size."""
    dims = weight_dims(weight_layout)[2]
    size, other = w_down.shape if dims[0] == "I" else w_down.shape[::-1]
    if size != intermediate:
        raise ValueError(
            f"w_down must have shape ({', '.join(dims)}) with I={intermediate} to match {match}; "
            f"got {w_down.shape}" + (turned if other == intermediate else "")
        )


def computation_dtype(dtype: Any, operands: Sequence[jax.Array]) -> np.dtype:
    """The dtype to compute in: the one asked for, else JAX's promotion of all operands."""
    try:
        result = np.dtype(jnp.result_type(*operands) if dtype is None else dtype)
        supported = jnp.issubdtype(result, jnp.floating) and result.itemsize >= 2
    except TypeError:
        if dtype is None:
            raise
        result, supported = dtype, False
    if not supported:
        raise TypeError(f"dtype must be bfloat16, float16, float32 or float64; got {result}")
    # As everywhere in JAX, without 64-bit types float64 becomes float32, with a warning.
    return np.dtype(jnp.empty(0, result).dtype)
