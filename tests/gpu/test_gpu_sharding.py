"""On a mesh of one GPU, and in `shard_map` over it, the program computes what it does without."""

import functools

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
