"""What the benchmarks share: shapes, data, the plain-JAX baseline, timing, the record's header."""

import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib

from jax_swiglu import _ffi, _load
from jax_swiglu._explain import format_plan

Arrays = tuple[jax.Array, ...]


class Model(NamedTuple):
    name: str
    hidden: int
    intermediate: int


QWEN_27B = Model("Qwen3.5-27B", 5120, 17408)
LLAMA_8B = Model("Llama-3-8B", 4096, 14336)
QWEN_HALF_B = Model("Qwen2.5-0.5B", 896, 4864)
MODELS = (QWEN_27B, LLAMA_8B, QWEN_HALF_B)


def make_data(m: int, h: int, i: int, dtype: Any, *, layers: int | None = None) -> Arrays:
    """x, w_gate, w_up, w_down and a cotangent, scaled so that every value is of order one."""
    stack = () if layers is None else (layers,)
    keys = jax.random.split(jax.random.key(m * 7919 + h * 31 + i), 5)
    shapes = ((m, h), (*stack, h, i), (*stack, h, i), (*stack, i, h), (m, h))
    scales = (1.0, h**-0.5, h**-0.5, i**-0.5, 1.0)

    @jax.jit
    def draw(keys: jax.Array) -> Arrays:
        return tuple(
            (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype)
            for key, shape, scale in zip(keys, shapes, scales, strict=True)
        )

    return draw(keys)


def plain_mlp(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    """What a user writes without this package."""
    return (jax.nn.silu(x @ w_gate) * (x @ w_up)) @ w_down


def with_gradients(mlp: Callable[..., jax.Array]) -> Callable[..., Arrays]:
    """(x, w_gate, w_up, w_down, dout) -> (out, dx, dw_gate, dw_up, dw_down)."""

    def step(*args: jax.Array) -> Arrays:
        out, pullback = jax.vjp(mlp, *args[:-1])
        return (out, *pullback(args[-1]))

    return step


@jax.jit
def relative_errors(got: Any, want: Any) -> jax.Array:
    """Norm of the difference over the norm of what is wanted, of each array."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    wide = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs]
    return jnp.stack([jnp.linalg.norm(a - b) / jnp.linalg.norm(b) for a, b in wide])


def temp_bytes(compiled: Any) -> int:
    """Temporary memory of a compiled program, on each device."""
    return compiled.memory_analysis().temp_size_in_bytes


def median_ms(
    candidates: dict[str, Callable[..., Any]],
    args: Sequence[jax.Array],
    *,
    rounds: int = 9,
    seconds_per_round: float = 0.06,
) -> dict[str, float]:
    """Median milliseconds of one call of each candidate.

    Each round measures all of them, in an order of its own: a GPU that is limited by power goes on
    feeling the one before. For the same reason each runs for a while before its time is taken.
    """

    def seconds(function: Callable[..., Any], calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            out = function(*args)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / calls

    calls = {}
    for name, function in candidates.items():
        jax.block_until_ready(function(*args))
        calls[name] = max(1, min(1000, int(seconds_per_round / seconds(function, 3))))
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(candidates), len(candidates)):
            if calls[name] > 1:
                seconds(candidates[name], calls[name] // 2)
            times[name].append(seconds(candidates[name], calls[name]) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def environment(commit: str | None) -> dict[str, Any]:
    """Versions, device and commit; None asks git."""
    device = jax.devices()[0]
    if commit is None:
        git = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        commit = subprocess.run(
            git, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    return {
        "device": device.device_kind,
        "platform_version": getattr(device.client, "platform_version", ""),
        "cudnn": _load.format_version(_load.cudnn_status().version),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "commit": commit,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def plans_used() -> list[str]:
    """The plans of this process that are more than a first proposal, for the record."""
    return [format_plan(plan) for plan in _ffi.prepared() if plan["source"] != "heuristics"]
