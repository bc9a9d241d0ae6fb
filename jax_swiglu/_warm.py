"""Runs calls of given shapes once, so that plans for them are chosen and kept."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_swiglu import _ffi
from jax_swiglu._api import swiglu_mlp, swiglu_mlp_packed
from jax_swiglu._config import PackedAxes, WeightLayout
from jax_swiglu._packing import Packing
from jax_swiglu.convert import pack


def warm(
    hidden: int,
    intermediate: int,
    rows: int,
    *,
    dtype: DTypeLike = "bfloat16",
    param_dtype: DTypeLike | None = None,
    weight_layout: WeightLayout = "in_out",
    packing: PackedAxes | None = None,
    backward: bool = False,
) -> list[dict[str, Any]]:
    """Runs a forward pass, or a forward and backward pass; returns the plans new to the process."""
    w_shape = (hidden, intermediate) if weight_layout == "in_out" else (intermediate, hidden)
    w_in, w_out = (jnp.zeros(shape, param_dtype or dtype) for shape in (w_shape, w_shape[::-1]))
    x = jnp.zeros((rows, hidden), dtype)
    if packing is None:
        function, weights = swiglu_mlp, [w_in, w_in, w_out]
    else:
        function = functools.partial(swiglu_mlp_packed, packing=packing)
        weights = [pack(w_in, w_in, Packing(packing), weight_layout=weight_layout), w_out]
    forward = functools.partial(function, dtype=dtype, weight_layout=weight_layout)

    def both(*args: jax.Array) -> Any:
        out, pullback = jax.vjp(forward, *args)
        return out, pullback(out)

    seen = len(_ffi.prepared())
    jax.block_until_ready(jax.jit(both if backward else forward)(x, *weights))
    return _ffi.prepared()[seen:]
