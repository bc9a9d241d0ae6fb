"""Which kernels a call launches, by the profiler, and whether CUDA graphs replay them."""

import collections
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jax_swiglu as js
from benchmarks.common import MODELS, Model, make_data, with_gradients
from jax_swiglu import _ffi
from jax_swiglu._explain import format_plan

CALLS = 10


def _profile(function: Callable[..., Any], args: Sequence[jax.Array]) -> dict[str, Any]:
    """Kernel launches per call, and graph launches per call, over `CALLS` calls."""
    for _ in range(3):
        jax.block_until_ready(function(*args))
    before = sum(plan["executions"] for plan in _ffi.prepared())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                jax.block_until_ready(function(*args))
        (path,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    kernels: collections.Counter[str] = collections.Counter()
    in_graphs = 0
    graph_launches = 0
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                if plane.name.startswith("/device:GPU") and line.name.startswith("Stream"):
                    kernels[event.name] += 1
                    in_graphs += any("graph" in str(key) for key, _ in event.stats)
                elif event.name.startswith("cuGraphLaunch"):
                    graph_launches += 1
    executed = sum(plan["executions"] for plan in _ffi.prepared()) - before
    return {
        "kernels_per_call": {name: count / CALLS for name, count in kernels.most_common()},
        "kernels_in_graphs_per_call": in_graphs / CALLS,
        "graph_launches_per_call": graph_launches / CALLS,
        "handler_executions_per_call": executed / CALLS,
    }


def run(models: Sequence[Model] = MODELS) -> Iterator[dict[str, Any]]:
    """Forward, and forward with backward, of the first model, for few and for many rows."""
    model = models[0]
    for m in (16, 2048):
        args = make_data(m, model.hidden, model.intermediate, jnp.bfloat16)
        forward = jax.jit(js.swiglu_mlp)
        step = jax.jit(with_gradients(js.swiglu_mlp))
        for what, function, operands in (
            ("forward", forward, args[:-1]),
            ("forward+backward", step, args),
        ):
            seen = len(_ffi.prepared())
            entry = {"what": what, "model": model.name, "m": m, **_profile(function, operands)}
            entry["plans"] = [format_plan(plan) for plan in _ffi.prepared()[seen:]]
            yield entry
