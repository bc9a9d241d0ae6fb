"""Checks of what users pass, with errors that say argument, expected, got and remedy."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        expected = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {expected}; got {value!r}")


def check_operands(weight_layout: str, operands: dict[str, jax.Array]) -> None:
    """Checks x, w_gate, w_up and, if present, w_down."""
    for name, value in operands.items():
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(
                f"{name} must have a floating-point dtype; got {value.dtype}. Cast it first"
            )
    x, w_gate, w_up = (operands[name] for name in ("x", "w_gate", "w_up"))
    if x.ndim == 0:
        raise ValueError("x must have shape (..., H); got a scalar")
    names = ("H", "I") if weight_layout == "in_out" else ("I", "H")
    for name, value, dims in (
        ("w_gate", w_gate, names),
        ("w_up", w_up, names),
        *(
            (("w_down", operands["w_down"], ("I", "O") if names[0] == "H" else ("O", "I")),)
            if "w_down" in operands
            else ()
        ),
    ):
        if value.ndim != 2:
            raise ValueError(
                f"{name} must have shape ({dims[0]}, {dims[1]}) for "
                f"weight_layout={weight_layout!r}; got {value.shape}"
            )
    hidden_axis = names.index("H")
    hidden, intermediate = w_gate.shape[hidden_axis], w_gate.shape[1 - hidden_axis]
    sizes = (hidden, intermediate) if hidden_axis == 0 else (intermediate, hidden)
    if x.shape[-1] != hidden:
        other = "out_in" if weight_layout == "in_out" else "in_out"
        hint = f'; weights stored as {w_gate.shape} need weight_layout="{other}"'
        raise ValueError(
            f"x must have shape (..., H) with H={hidden} to match w_gate of shape "
            f"({names[0]}, {names[1]})={w_gate.shape}; got x of shape {x.shape}"
            + (hint if x.shape[-1] == intermediate else "")
        )
    if w_up.shape != w_gate.shape:
        raise ValueError(
            f"w_up must have shape ({names[0]}, {names[1]})={sizes} to match w_gate; "
            f"got {w_up.shape}"
        )
    if "w_down" in operands:
        w_down = operands["w_down"]
        axis = 0 if weight_layout == "in_out" else 1
        if w_down.shape[axis] != intermediate:
            dims = "(I, O)" if weight_layout == "in_out" else "(O, I)"
            raise ValueError(
                f"w_down must have shape {dims} with I={intermediate} to match w_gate of shape "
                f"{w_gate.shape}; got {w_down.shape}"
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
