"""On a mesh of one GPU, and in `shard_map` over it, the program computes what it does without."""

import functools
import sys

import jax
import numpy as np
import pytest
from _reference64 import draw
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_swiglu as js

SPECS = (P("data"), P(None, "tensor"), P(None, "tensor"), P("tensor"), P("data"))


def step(*args):
    out, pullback = jax.vjp(js.swiglu_mlp, *args[:-1])
    return (out, *pullback(args[-1]))


def on_mesh(kind, args):
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(kind,) * 2)
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, SPECS, strict=True)
    ]
    return mesh, placed


def under_shard_map(args):
    mesh, placed = on_mesh(AxisType.Auto, args)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=SPECS, out_specs=(SPECS[0], *SPECS[:-1]), check_vma=True
    )
    def mapped(x, w_gate, w_up, w_down, dout):
        out, pullback = jax.vjp(js.swiglu_mlp, x, w_gate, w_up, w_down)
        out = jax.lax.psum(out, "tensor")
        return (out, *pullback(jax.lax.pcast(dout, ("tensor",), to="varying")))

    return jax.jit(mapped)(*placed)


# Few rows, where all is fused, and many, where elementwise parts are left to XLA.
@pytest.mark.parametrize("m", [16, 333])
def test_mesh_of_one(m):
    args = draw(m, 256, 640, 256, "bfloat16")
    want = jax.jit(step)(*args)
    results = {
        "auto": jax.jit(step)(*on_mesh(AxisType.Auto, args)[1]),
        "explicit": jax.jit(step)(*on_mesh(AxisType.Explicit, args)[1]),
        "shard_map": under_shard_map(args),
    }
    for where, got in results.items():
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.asarray(g), np.asarray(w), where)


SHARD_MAP_IN_GRAPHS = """
import jax, jax.numpy as jnp, numpy as np, jax_swiglu as js
from jax.sharding import PartitionSpec as P

n = jax.device_count()
keys = jax.random.split(jax.random.key(0), 4)
shapes = ((72 * n, 64), (64, 128), (64, 128), (128, 64))
args = [jax.random.normal(k, s, jnp.bfloat16) / 8 for k, s in zip(keys, shapes)]
mesh = jax.make_mesh((n,), ("data",))
specs = (P("data"), P(), P(), P())
args = [jax.device_put(a, jax.NamedSharding(mesh, s)) for a, s in zip(args, specs)]
mapped = jax.jit(jax.shard_map(js.swiglu_mlp, mesh=mesh, in_specs=specs, out_specs=P("data")))
results = [np.asarray(mapped(*args), np.float32) for _ in range(10)]
assert all((r == results[0]).all() for r in results)
x, w_gate, w_up, w_down = (np.asarray(a, np.float64) for a in args)
gate = x @ w_gate
want = (gate / (1 + np.exp(-gate)) * (x @ w_up)) @ w_down
print(np.linalg.norm(results[0] - want) / np.linalg.norm(want))
"""


def test_captured_in_a_fresh_process(run_python):
    """Every call in a CUDA graph from the first one on, over as many GPUs as there are."""
    environment = {**run_python.keywords["env"], "XLA_FLAGS": "--xla_gpu_graph_min_graph_size=1"}
    del environment["JAX_PLATFORMS"]
    result = run_python([sys.executable, "-c", SHARD_MAP_IN_GRAPHS], env=environment)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) <= 2**-7
    assert "capture" not in result.stderr
