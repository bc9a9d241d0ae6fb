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

# How x (and the cotangent), w_gate and w_up, and w_down are split, over the mesh's only axis.
LAYOUTS = {
    "data": (P("data"), P(), P()),
    "fsdp": (P("fsdp"), P("fsdp", None), P(None, "fsdp")),
    "tensor": (P(), P(None, "tensor"), P("tensor", None)),
}
MESH_KINDS = ("Auto", "shard_map")
RESULTS = ("out", "dx", "dw_gate", "dw_up", "dw_down")
# Of bfloat16, whose sums over devices are rounded once more than those of one device.
TOLERANCE = 0.02

Mlp = Callable[..., jax.Array]


def _specs(layout: str) -> tuple[P, ...]:
    """Of x, w_gate, w_up, w_down and dout."""
    rows, w_in, w_down = LAYOUTS[layout]
    return rows, w_in, w_in, w_down, rows


def _of_a_part(mlp: Mlp, layout: str) -> Mlp:
    """For shard_map: FSDP gathers the weights, tensor parallel sums over the parts of I."""

    def mapped(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
        if layout == "fsdp":
            gather = functools.partial(jax.lax.all_gather, axis_name=layout, tiled=True)
            w_gate, w_up = gather(w_gate, axis=0), gather(w_up, axis=0)
            w_down = gather(w_down, axis=1)
        out = mlp(x, w_gate, w_up, w_down)
        return jax.lax.psum(out, layout) if layout == "tensor" else out

    return mapped


def _step(mlp: Mlp, layout: str, mesh: Mesh, mesh_kind: str) -> Callable[..., Arrays]:
    """Forward and backward; out is split as x, and each gradient as its operand."""
    specs = _specs(layout)
    out_specs = (specs[0], *specs[:-1])
    if mesh_kind == "shard_map":
        step = with_gradients(_of_a_part(mlp, layout))
        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out_specs))
    shardings = tuple(NamedSharding(mesh, spec) for spec in out_specs)
    return jax.jit(with_gradients(mlp), out_shardings=shardings)


def _wait(call: Callable[[], Any]) -> Any:
    """On CPU devices, programs that queue up may wait for each other in their collectives."""
    return jax.block_until_ready(call())


def _entry(mlps: dict[str, Mlp], args: Arrays, layout: str, kind: str, rounds: int) -> Any:
    """What is measured, by whose MLP it is."""
    mesh = jax.make_mesh((2,), (layout,), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip(args, _specs(layout), strict=True)
    ]
    calls: dict[str, Callable[..., Any]] = {}
    entry: dict[str, Any] = {"relative_errors": {}, "collective_bytes": {}, "temp_bytes": {}}
    for name, mlp in mlps.items():
        # Called as compiled here, so that it is not compiled twice.
        compiled = _step(mlp, layout, mesh, kind).lower(*placed).compile()  # pyright: ignore[reportFunctionMemberAccess]
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
                yield cell | _entry(mlps, args, layout, kind, rounds)
            except Exception as error:  # the other cells go on
                yield cell | {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
