"""Times against plain `jax.jit`, measured in one process, in turn."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_swiglu as js
from benchmarks.common import MODELS, Model, make_data, median_ms, plain_mlp, with_gradients

ROWS = (16, 2048, 8192)
LAYERS = 8
# XLA's Triton GEMMs copy weights that are sliced from a stack; an informed user turns them off.
NO_TRITON = {"xla_gpu_enable_triton_gemm": False}

Mlp = Callable[..., jax.Array]


def _stacked(mlp: Mlp) -> Mlp:
    """The layers of a model, as JAX language models run them, with a residual connection."""

    def forward(x: jax.Array, *weights: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            return x + mlp(x, *weights), None

        return jax.lax.scan(layer, x, weights)[0]

    return forward


def _stacked_gradients(mlp: Mlp) -> Callable[..., Any]:
    return with_gradients(_stacked(mlp))


def _peers(make: Callable[[Mlp], Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    ours, plain = make(js.swiglu_mlp), make(plain_mlp)
    return {
        "ours": jax.jit(ours),
        "xla": jax.jit(plain),
        # The same once more: how far two runs of one program are apart.
        "xla_again": jax.jit(plain, compiler_options={}),
        "xla_no_triton": jax.jit(plain, compiler_options=NO_TRITON),
    }


@jax.jit
def _difference(ours: Any, xla: Any) -> jax.Array:
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(xla), strict=True)
    wide = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs]
    return jnp.stack([jnp.linalg.norm(a - b) / jnp.linalg.norm(b) for a, b in wide]).max()


def _entry(
    what: str,
    model: Model,
    m: int,
    make: Callable[[Mlp], Callable[..., Any]],
    args: tuple[jax.Array, ...],
    allowed_difference: float = 0.02,
) -> dict[str, Any]:
    peers = _peers(make)
    # The plans that were timed are also right.
    difference = float(_difference(peers["ours"](*args), peers["xla"](*args)))
    assert difference < allowed_difference, difference
    times = median_ms(peers, args, rounds=11)
    return {
        "what": what,
        "model": model.name,
        "hidden": model.hidden,
        "intermediate": model.intermediate,
        "m": m,
        "difference_from_xla": difference,
        "ms": times,
        "speedup_over_xla": times["xla"] / times["ours"],
        "spread": abs(times["xla_again"] / times["xla"] - 1),
        "speedup_over_xla_no_triton": times["xla_no_triton"] / times["ours"],
    }


def _mesh_of_one(model: Model, m: int) -> dict[str, Any]:
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


def run_mesh(models: Sequence[Model] = MODELS) -> Iterator[dict[str, Any]]:
    for m in ROWS:
        yield _mesh_of_one(models[0], m)


def run(models: Sequence[Model] = MODELS) -> Iterator[dict[str, Any]]:
    """Forward, and forward with backward, of one layer; then both in a scan over layers."""
    for model in models:
        for m in ROWS:
            args = make_data(m, model.hidden, model.intermediate, jnp.bfloat16)
            yield _entry("forward", model, m, lambda mlp: mlp, args[:-1])
            yield _entry("forward+backward", model, m, with_gradients, args)
    model = MODELS[1]
    for m in ROWS:
        args = make_data(m, model.hidden, model.intermediate, jnp.bfloat16, layers=LAYERS)
        where = f"scan over {LAYERS} layers"
        # Each layer amplifies the roundings of those before it.
        yield _entry(f"forward, {where}", model, m, _stacked, args[:-1], 0.2)
        yield _entry(f"forward+backward, {where}", model, m, _stacked_gradients, args, 0.2)
