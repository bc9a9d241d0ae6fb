"""Which kernels a call launches and how long they take, and whether CUDA graphs replay them."""

import collections
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jax_swiglu as js
from benchmarks.common import MODELS, Model, make_data, plain_mlp, with_gradients
from jax_swiglu import _ffi
from jax_swiglu._explain import format_plan

CALLS = 10
ROWS = (16, 2048, 8192)


def profile(function: Callable[..., Any], args: Sequence[jax.Array]) -> dict[str, Any]:
    """Launches per call of each kernel, and its microseconds per call, over `CALLS` calls."""
    for _ in range(3):
        jax.block_until_ready(function(*args))
    before = sum(plan["executions"] for plan in _ffi.prepared())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                # Results are dropped at once: for other buffers XLA would record the graph anew.
                jax.block_until_ready(function(*args))
        (path,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    kernels: collections.Counter[str] = collections.Counter()
    nanoseconds: collections.Counter[str] = collections.Counter()
    outside: set[str] = set()
    graph_launches = 0
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                if plane.name.startswith("/device:GPU") and line.name.startswith("Stream"):
                    kernels[event.name] += 1
                    nanoseconds[event.name] += int(event.duration_ns)
                    if not any("graph" in str(key) for key, _ in event.stats):
                        outside.add(event.name)
                elif event.name.startswith("cuGraphLaunch"):
                    graph_launches += 1
    executed = sum(plan["executions"] for plan in _ffi.prepared()) - before
    return {
        "kernels_per_call": {name: count / CALLS for name, count in kernels.most_common()},
        "us_per_call": {name: nanoseconds[name] / 1e3 / CALLS for name in kernels},
        "kernels_outside_graphs": sorted(outside),
        "graph_launches_per_call": graph_launches / CALLS,
        "handler_executions_per_call": executed / CALLS,
    }


def run(models: Sequence[Model] = MODELS) -> Iterator[dict[str, Any]]:
    """Forward, and forward with backward, of the first model, and the latter in plain JAX."""
    model = models[0]
    for m in ROWS:
        args = make_data(m, model.hidden, model.intermediate, jnp.bfloat16)
        for what, function, operands in (
            ("forward", js.swiglu_mlp, args[:-1]),
            ("forward+backward", with_gradients(js.swiglu_mlp), args),
            ("forward+backward, plain JAX", with_gradients(plain_mlp), args),
        ):
            seen = len(_ffi.prepared())
            entry = {"what": what, "model": model.name, "m": m}
            entry |= profile(jax.jit(function), operands)
            entry["plans"] = [format_plan(plan) for plan in _ffi.prepared()[seen:]]
            yield entry
