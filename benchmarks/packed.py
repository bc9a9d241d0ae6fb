"""Training steps with one parameter for gate and up against two, and with float32 parameters.

Milliseconds of a forward and backward of one layer, measured in turn. "plain ..." is plain JAX
on the same parameters.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_swiglu as js
from benchmarks.common import MODELS, Model, make_data, median_ms, plain_mlp, with_gradients
from jax_swiglu.convert import Packing, pack

ROWS = (16, 2048, 8192, 16384)
AXES = ("H 2 I", "2 I H", "2 H I")


def plain_packed_mlp(x: jax.Array, w_gate_up: jax.Array, w_down: jax.Array) -> jax.Array:
    """What a user writes without this package for a parameter `[H, 2, I]`."""
    gate_up = jnp.einsum("mh,hgi->mgi", x, w_gate_up)
    return (jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1]) @ w_down


def _in_bfloat16(mlp: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda x, *weights: mlp(x, *(w.astype(jnp.bfloat16) for w in weights))


def _steps(args: Sequence[jax.Array]) -> dict[str, Callable[[], Any]]:
    x, w_gate, w_up, w_down, dout = args

    def step(mlp: Callable[..., jax.Array], *weights: jax.Array) -> Callable[[], Any]:
        return functools.partial(jax.jit(with_gradients(mlp)), x, *weights, dout)

    separate = (w_gate, w_up, w_down)
    packed = {axes: (pack(w_gate, w_up, Packing(axes)), w_down) for axes in AXES}
    master = [jax.tree.map(lambda w: w.astype(jnp.float32), w) for w in (separate, packed[AXES[0]])]
    return {
        "separate": step(js.swiglu_mlp, *separate),
        **{
            axes: step(functools.partial(js.swiglu_mlp_packed, packing=axes), *weights)
            for axes, weights in packed.items()
        },
        "plain separate": step(plain_mlp, *separate),
        "plain H 2 I": step(plain_packed_mlp, *packed["H 2 I"]),
        "separate, float32": step(functools.partial(js.swiglu_mlp, dtype="bfloat16"), *master[0]),
        "H 2 I, float32": step(
            functools.partial(js.swiglu_mlp_packed, dtype="bfloat16"), *master[1]
        ),
        "plain separate, float32": step(_in_bfloat16(plain_mlp), *master[0]),
        "plain H 2 I, float32": step(_in_bfloat16(plain_packed_mlp), *master[1]),
    }


def run(models: Sequence[Model] = MODELS) -> Iterator[dict[str, Any]]:
    for model in models:
        for m in ROWS:
            steps = _steps(make_data(m, model.hidden, model.intermediate, jnp.bfloat16))
            yield {"model": model.name, "m": m, "ms": median_ms(steps, ())}
