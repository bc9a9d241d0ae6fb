"""Calls run in CUDA graphs, and compute there what they compute outside."""

import functools
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from _programs import with_grads
from _reference64 import check, draw

import jax_swiglu as js
from jax_swiglu import _ffi

CALLS = 10


def executions():
    """How often XLA came to a handler of ours; replays of a graph do not."""
    return sum(plan["executions"] for plan in _ffi.prepared())


def profile(function, args, folder):
    """What ran on streams of the GPU, what of it in graphs, and how many graphs were launched."""
    with jax.profiler.trace(str(folder)):
        for _ in range(CALLS):
            # Results are dropped at once: with other buffers XLA would record the graph anew.
            jax.block_until_ready(function(*args))
    (path,) = Path(folder).rglob("*.xplane.pb")
    planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    on_streams = [
        event
        for plane in planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    in_graphs = [e for e in on_streams if any("graph" in str(key) for key, _ in e.stats)]
    launches = sum(
        event.name.startswith("cuGraphLaunch")
        for plane in planes
        for line in plane.lines
        for event in line.events
    )
    return *(
        Counter(event.name for event in events) for events in (on_streams, in_graphs)
    ), launches


# Few rows, where all is fused but the weight gradients are XLA's, and more.
@pytest.mark.parametrize("m", [16, 72, 333])
def test_kernels_run_in_a_graph_launch(m, tmp_path):
    inputs = draw(m, 64, 128, 64, "bfloat16")
    args = [jax.device_put(a) for a in inputs]
    step = functools.partial(with_grads, js.swiglu_mlp)
    replayed = jax.jit(step)
    # Empty: no kind of command goes into a command buffer.
    launched = jax.jit(step, compiler_options={"xla_gpu_enable_command_buffer": ""})
    for _ in range(3):
        jax.block_until_ready((replayed(*args), launched(*args)))

    before = executions()
    for _ in range(CALLS):
        jax.block_until_ready(launched(*args))
    assert executions() - before >= 3 * CALLS

    before = executions()
    on_streams, in_graphs, launches = profile(replayed, args, tmp_path)
    assert executions() == before
    assert launches >= CALLS
    assert on_streams.total() >= 5 * CALLS
    assert on_streams - in_graphs == Counter()

    got, want = replayed(*args), launched(*args)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))
    check(got, inputs)
