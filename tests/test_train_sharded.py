"""The sharded example: on eight devices, of one process or two, it trains as on one device.

The MLP is implementation="host", whose custom calls XLA cannot look into, as on a GPU.
"""

import dataclasses
import importlib
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

EXAMPLES = Path(__file__).parents[1] / "examples"
MESH = "--mesh=data=2,fsdp=2,tensor=2"
SIZES = "--hidden=16 --intermediate=24 --layers=2 --heads=2 --seq=16 --batch=4 --steps=4"


@pytest.fixture(scope="module")
def train_sharded():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("train_sharded")
    for name in ("train_sharded", "train_lm"):
        del sys.modules[name]


@pytest.fixture
def mesh(train_sharded):
    return jax.make_mesh((2, 2, 2), train_sharded.AXES, axis_types=(AxisType.Auto,) * 3)


@pytest.fixture
def config(train_sharded):
    preset = train_sharded.train_lm.PRESETS["cpu"]
    return dataclasses.replace(
        preset, hidden=16, intermediate=24, layers=2, heads=2, seq=16, batch=4
    )


def losses_in(output):
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+),", output, re.MULTILINE)]


def start(*arguments):
    """The example in a process of its own."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "JAX_PLATFORMS": "cpu",
        # In place of the devices of conftest.py; the programs are tiny, and most time is LLVM's.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    command = [sys.executable, EXAMPLES / "train_sharded.py", MESH, *SIZES.split()]
    return subprocess.Popen(
        [*command, "--implementation=host", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outputs_of(*processes):
    """What each wrote to stdout, once all have ended well."""
    try:
        results = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (stdout, stderr) in zip(processes, results, strict=True):
        assert process.returncode == 0, stdout + stderr
    return [stdout for stdout, _ in results]


@pytest.fixture(scope="module")
def one_process():
    """The output of training on the eight devices of one process, then on one device."""
    return outputs_of(start("--check"))[0]


def test_eight_devices_train_as_one(one_process):
    assert "mesh: {'data': 2, 'fsdp': 2, 'tensor': 2}, 1 processes" in one_process
    down = r"mlp/down_proj/kernel .* \(None, 'tensor', 'fsdp'\) +\(2, 12, 8\)\n"
    assert re.search(down, one_process)
    losses = losses_in(one_process)
    assert len(losses) == 8
    np.testing.assert_allclose(losses[:4], losses[4:], atol=1e-5)
    # The first step of the warm-up changes nothing; after it, training does.
    assert losses[3] < losses[0]
    assert "PASS: loss curves of the mesh and one device" in one_process


def test_two_processes_train_as_one_device(one_process):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    join = ["--cpu-devices=4", f"--coordinator=localhost:{port}", "--num-processes=2"]
    first, second = outputs_of(*(start(*join, f"--process-id={i}") for i in range(2)))
    assert "2 processes" in first
    assert not losses_in(second)
    np.testing.assert_allclose(losses_in(first), losses_in(one_process)[4:], atol=1e-5)


def test_rows_do_not_depend_on_the_mesh(train_sharded, config, mesh):
    text = np.arange(10_000) % 251
    rows = train_sharded.rows_of_step(text, config, 7, mesh)
    assert {shard.data.shape for shard in rows.addressable_shards} == {(1, 17)}
    one = jax.make_mesh((1, 1, 1), mesh.axis_names, devices=jax.devices()[:1])
    np.testing.assert_array_equal(rows, train_sharded.rows_of_step(text, config, 7, one))
    assert np.all(np.diff(rows) % 251 == 1)
    assert np.any(rows != train_sharded.rows_of_step(text, config, 8, mesh))


def test_kernels_and_their_moments_are_split_over_fsdp_and_tensor(train_sharded, config, mesh):
    _, state = jax.eval_shape(lambda: train_sharded.train_lm.init(config))
    split = [
        math.prod(jax.NamedSharding(mesh, spec).shard_shape(leaf.shape)) * 4 == leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        for spec in [train_sharded.spec_of(path, leaf)]
        if re.search("kernel|embedding", jax.tree_util.keystr(path))
    ]
    assert len(split) == 3 * 6
    assert all(split)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh=rows=8"], r"'rows=8' is not an axis of data, fsdp, tensor and its size"),
        (["--mesh=data=x"], r"'data=x' is not an axis"),
        (["--mesh=data=2,fsdp=2"], "as many devices as there are: 8"),
        ([MESH, "--batch=6"], "--batch is split in 4 by the mesh, which does not divide 6"),
        (["--mesh=tensor=8", "--heads=4"], "--heads is split in 8 by the mesh"),
    ],
)
def test_what_does_not_fit_the_mesh_is_refused(train_sharded, capsys, arguments, message):
    with pytest.raises(SystemExit):
        train_sharded.main(arguments)
    assert re.search(message, capsys.readouterr().err)
