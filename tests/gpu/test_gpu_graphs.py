"""Calls run in CUDA graphs, and compute there what they compute outside."""

import functools

import jax
import numpy as np
import pytest
from _programs import with_grads
from _reference64 import check, draw

import jax_swiglu as js
from benchmarks.launches import profile


# Few rows, where all is fused but the weight gradients are XLA's, and more.
@pytest.mark.parametrize("m", [16, 72, 333])
def test_kernels_run_in_a_graph_launch(m):
    inputs = draw(m, 64, 128, 64, "bfloat16")
    args = [jax.device_put(a) for a in inputs]
    step = functools.partial(with_grads, js.swiglu_mlp)
    replayed = jax.jit(step)
    # Empty: no kind of command goes into a command buffer.
    launched = jax.jit(step, compiler_options={"xla_gpu_enable_command_buffer": ""})
    assert profile(launched, args)["handler_executions_per_call"] >= 3

    replay = profile(replayed, args)
    assert replay["handler_executions_per_call"] == 0
    assert replay["graph_launches_per_call"] >= 1
    assert sum(replay["kernels_per_call"].values()) >= 5
    assert replay["kernels_outside_graphs"] == []

    got, want = replayed(*args), launched(*args)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))
    check(got, inputs)
