"""Checks of what users pass, with errors that say argument, expected, got and remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jax_swiglu.convert import Packing


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        expected = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {expected}; got {value!r}")


def check_operands(weight_layout: str, operands: dict[str, jax.Array]) -> None:
    """Checks x, w_gate, w_up and, if present, w_down."""
    _check_kinds(operands)
    x, w_gate, w_up = (operands[name] for name in ("x", "w_gate", "w_up"))
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


def _check_kinds(operands: dict[str, jax.Array]) -> None:
    for name, value in operands.items():
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(
                f"{name} must have a floating-point dtype; got {value.dtype}. Cast it first"
            )
    if operands["x"].ndim == 0:
        raise ValueError("x must have shape (..., H); got a scalar")


def check_packed_operands(
    packing: Packing, weight_layout: str, operands: dict[str, jax.Array]
) -> None:
    """Checks x, w_gate_up and w_down."""
    _check_kinds(operands)
    x, w_gate_up, w_down = operands.values()
    expected = packing._expected()
    if not packing._fits(w_gate_up.shape):
        raise ValueError(
            f"w_gate_up must have shape {expected} for {packing}; got {w_gate_up.shape}. "
            "Pass the packing that it has"
        )
    sizes = dict(zip(packing._letters, packing._split(w_gate_up.shape), strict=True))
    if x.shape[-1] != sizes["H"]:
        raise ValueError(
            f"x must have shape (..., H) with H={sizes['H']} to match w_gate_up of shape "
            f"{expected}={w_gate_up.shape}; got x of shape {x.shape}. "
            "Pass the packing that w_gate_up has"
        )
    dims = "(I, O)" if weight_layout == "in_out" else "(O, I)"
    if w_down.ndim != 2:
        raise ValueError(
            f"w_down must have shape {dims} for weight_layout={weight_layout!r}; got {w_down.shape}"
        )
    axis = 0 if weight_layout == "in_out" else 1
    if w_down.shape[axis] != sizes["I"]:
        other = "out_in" if weight_layout == "in_out" else "in_out"
        hint = f'; a w_down stored the other way round needs weight_layout="{other}"'
        raise ValueError(
            f"w_down must have shape {dims} with I={sizes['I']} to match w_gate_up of shape "
            f"{expected}={w_gate_up.shape}; got {w_down.shape}"
            + (hint if w_down.shape[1 - axis] == sizes["I"] else "")
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
