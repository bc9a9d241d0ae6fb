"""Training steps of one MLP on two devices against plain XLA with the same shardings."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_swiglu as js
from benchmarks.collectives import collective_bytes
from benchmarks.common import (
    Arrays,
    make_data,
    median_ms,
    plain_mlp,
    relative_errors,
    temp_bytes,
    with_gradients,
)

# The axis of size two, which is all that tells the layouts apart.
LAYOUTS = ("data", "fsdp", "tensor")
MESH_KINDS = ("Auto", "shard_map")
RESULTS = ("out", "dx", "dw_gate", "dw_up", "dw_down")
# Of bfloat16, whose sums over devices are rounded once more than those of one device.
TOLERANCE = 0.02

_ROWS, _W_IN, _W_DOWN = P(("data", "fsdp")), P("fsdp", "tensor"), P("tensor", "fsdp")
SPECS = (_ROWS, _W_IN, _W_IN, _W_DOWN, _ROWS)  # of x, w_gate, w_up, w_down and dout

Mlp = Callable[..., jax.Array]


def _of_a_part(mlp: Mlp) -> Mlp:
    """For shard_map: weights are gathered over fsdp, and the parts of I summed over tensor."""

    def mapped(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
        gather = functools.partial(jax.lax.all_gather, axis_name="fsdp", tiled=True)
        out = mlp(x, gather(w_gate, axis=0), gather(w_up, axis=0), gather(w_down, axis=1))
        return jax.lax.psum(out, "tensor")

    return mapped


def _step(mlp: Mlp, mesh: Mesh, mesh_kind: str) -> Callable[..., Arrays]:
    """Forward and backward; out is split as x, and each gradient as its operand."""
    out_specs = (SPECS[0], *SPECS[:-1])
    if mesh_kind == "shard_map":
        step = with_gradients(_of_a_part(mlp))
        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=SPECS, out_specs=out_specs))
    shardings = tuple(NamedSharding(mesh, spec) for spec in out_specs)
    return jax.jit(with_gradients(mlp), out_shardings=shardings)


def _wait(call: Callable[[], Any]) -> Any:
    """On CPU devices, programs that queue up may wait for each other in their collectives."""
    return jax.block_until_ready(call())


def _entry(mlps: dict[str, Mlp], args: Arrays, mesh: Mesh, kind: str, rounds: int) -> Any:
    """What is measured, by whose MLP it is."""
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, SPECS, strict=True)
    ]
    calls: dict[str, Callable[..., Any]] = {}
    entry: dict[str, Any] = {"relative_errors": {}, "collective_bytes": {}, "temp_bytes": {}}
    for name, mlp in mlps.items():
        # Called as compiled here, so that it is not compiled twice.
        compiled = _step(mlp, mesh, kind).lower(*placed).compile()  # pyright: ignore[reportFunctionMemberAccess]
        call = functools.partial(compiled, *placed)
        calls[name] = call if jax.default_backend() == "gpu" else functools.partial(_wait, call)
        got = jax.device_put(call(), jax.devices()[0])
        errors = relative_errors(got, jax.jit(with_gradients(mlp))(*args))
        entry["relative_errors"][name] = dict(zip(RESULTS, errors.tolist(), strict=True))
        entry["collective_bytes"][name] = dict(collective_bytes(compiled.as_text()))
        entry["temp_bytes"][name] = temp_bytes(compiled)
    errors = entry["relative_errors"]["ours"].values()
    entry["ok"] = all(error <= TOLERANCE for error in errors)
    return {**entry, "ms": median_ms(calls, (), rounds=rounds)}


def run(
    layout: str,
    *,
    hidden: int,
    intermediate: int,
    rows: tuple[int, ...],
    rounds: int,
    implementation: Any,
) -> Iterator[dict[str, Any]]:
    """An entry for each mesh kind and number of rows; one that fails says why."""
    shape = tuple(2 if axis == layout else 1 for axis in LAYOUTS)
    mesh = jax.make_mesh(shape, LAYOUTS, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:2])
    mlps = {
        "ours": functools.partial(js.swiglu_mlp, implementation=implementation),
        "xla": plain_mlp,
    }
    for m in rows:
        args = make_data(m, hidden, intermediate, jnp.bfloat16)
        for kind in MESH_KINDS:
            cell = {"layout": layout, "mesh": kind, "m": m}
            cell |= {"hidden": hidden, "intermediate": intermediate}
            try:
                yield cell | _entry(mlps, args, mesh, kind, rounds)
            except Exception as error:  # the other cells go on
                yield cell | {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
