"""Runs calls of given shapes once, so that plans for them are chosen and kept."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_swiglu import _ffi
from jax_swiglu._api import swiglu_mlp
from jax_swiglu._config import WeightLayout


def warm(
    hidden: int,
    intermediate: int,
    rows: int,
    *,
    dtype: DTypeLike = "bfloat16",
    param_dtype: DTypeLike | None = None,
    weight_layout: WeightLayout = "in_out",
    backward: bool = False,
) -> list[dict[str, Any]]:
    """Runs a forward pass, or a forward and backward pass; returns the plans new to the process."""
    in_out = weight_layout == "in_out"
    w_in, w_out = (
        jnp.zeros(shape if in_out else shape[::-1], param_dtype or dtype)
        for shape in ((hidden, intermediate), (intermediate, hidden))
    )
    x = jnp.zeros((rows, hidden), dtype)

    def forward(*args: jax.Array) -> jax.Array:
        return swiglu_mlp(*args, dtype=dtype, weight_layout=weight_layout)

    def both(*args: jax.Array) -> Any:
        out, pullback = jax.vjp(forward, *args)
        return out, pullback(out)

    seen = len(_ffi.prepared())
    jax.block_until_ready(jax.jit(both if backward else forward)(x, w_in, w_in, w_out))
    return _ffi.prepared()[seen:]
