"""What a mesh costs: forward with backward on one of a single device, against no mesh."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_swiglu as js
from benchmarks.common import MODELS, Model, make_data, median_ms, with_gradients

ROWS = (16, 2048, 8192)


def _entry(model: Model, m: int) -> dict[str, Any]:
    """Forward with backward on a mesh of one device, and inside `shard_map`, against no mesh."""
    args = make_data(m, model.hidden, model.intermediate, jnp.bfloat16)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = P("data"), P()
    specs = (rows, whole, whole, whole, rows)
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, specs, strict=True)
    ]
    step = with_gradients(js.swiglu_mlp)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(rows, *specs[:-1]))
    calls = {
        "no_mesh": functools.partial(jax.jit(step), *args),
        "mesh": functools.partial(jax.jit(step), *placed),
        "shard_map": functools.partial(jax.jit(mapped), *placed),
    }
    sizes = {"hidden": model.hidden, "intermediate": model.intermediate, "m": m}
    return {"model": model.name, **sizes, "ms": median_ms(calls, (), rounds=11)}


def run(models: Sequence[Model] = MODELS) -> Iterator[dict[str, Any]]:
    for m in ROWS:
        yield _entry(models[0], m)
