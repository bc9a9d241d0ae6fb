"""What benchmarks.multi_gpu runs in processes of their own, each of which writes its entries.

python -m benchmarks.multi_gpu_parts PART OUT.json SETTINGS
"""

import functools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_swiglu as js
from benchmarks import sharded_step
from benchmarks.common import Arrays, environment, make_data

Entries = Iterator[dict[str, Any]]
# Of bfloat16, against float64.
TOLERANCE = 2**-7
THREADS = 8


class Settings(NamedTuple):
    hidden: int
    intermediate: int
    rows: tuple[int, ...]
    rounds: int
    thread_calls: int
    implementation: str | None  # of swiglu_mlp
    commit: str | None

    @property
    def mlp(self) -> Callable[..., jax.Array]:
        implementation: Any = self.implementation
        return functools.partial(js.swiglu_mlp, implementation=implementation)


def _error(out: jax.Array, args: Arrays) -> float:
    """Against float64."""
    x, w_gate, w_up, w_down = (np.asarray(a, np.float64) for a in args)
    gate = x @ w_gate
    want = (gate / (1 + np.exp(-gate)) * (x @ w_up)) @ w_down
    return float(np.linalg.norm(np.asarray(out, np.float64) - want) / np.linalg.norm(want))


def describe(settings: Settings) -> Entries:
    """The environment, and whether it is one that this can run in."""
    devices, backend = len(jax.devices()), jax.default_backend()
    fits = devices >= 2 and (backend == "gpu" or settings.implementation == "host")
    about = {"backend": backend, "devices": devices, **environment(settings.commit)}
    yield {"ok": fits, "environment": about}


def shard_map_in_graphs(settings: Settings) -> Entries:
    """Ten calls from the first of the process on; a failing capture shows up in the log."""
    *args, _ = make_data(72 * 2, 64, 128, jnp.bfloat16)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = (P("data"), P(), P(), P())
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, specs, strict=True)
    ]
    call = jax.jit(jax.shard_map(settings.mlp, mesh=mesh, in_specs=specs, out_specs=P("data")))
    results = [call(*placed) for _ in range(10)]
    equal = all(np.array_equal(r, results[0]) for r in results)
    error = _error(results[0], tuple(args))
    yield {"ok": equal and error <= TOLERANCE, "calls_equal": equal, "relative_error": error}


def second_device(settings: Settings) -> Entries:
    """A call on the first device, then one of the same function on the second."""
    args = make_data(72, 64, 128, jnp.bfloat16)[:-1]
    call = jax.jit(settings.mlp)
    errors, where = [], []
    for device in jax.devices()[:2]:
        out = call(*jax.device_put(args, device))
        errors.append(_error(out, args))
        where.append(out.devices() == {device})
    ok = all(where) and all(error <= TOLERANCE for error in errors)
    yield {"ok": ok, "relative_errors": errors, "on_its_device": where}


def threads(settings: Settings) -> Entries:
    """Many threads call one function on both devices in turn, and get the bits that one does."""
    args = make_data(64, 128, 256, jnp.bfloat16)[:-1]
    call = jax.jit(settings.mlp)
    placed = [jax.device_put(args, device) for device in jax.devices()[:2]]
    want = [np.asarray(call(*a)) for a in placed]
    equal = [0, 0]
    lock = threading.Lock()

    def work(first: int) -> None:
        for i in range(settings.thread_calls):
            device = (first + i) % 2
            same = np.array_equal(call(*placed[device]), want[device])
            with lock:
                equal[device] += same

    workers = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    calls = THREADS * settings.thread_calls
    # Counted from the good ones: a thread that died has made none.
    yield {"ok": sum(equal) == calls, "calls": calls, "bit_equal_by_device": equal}


def _steps(layout: str, settings: Settings) -> Entries:
    sizes = {"hidden": settings.hidden, "intermediate": settings.intermediate}
    return sharded_step.run(
        layout,
        **sizes,
        rows=settings.rows,
        rounds=settings.rounds,
        implementation=settings.implementation,
    )


STEPS = {f"steps_{layout}": functools.partial(_steps, layout) for layout in sharded_step.LAYOUTS}
CHECKS = {f.__name__: f for f in (shard_map_in_graphs, second_device, threads)}
PARTS: dict[str, Callable[[Settings], Entries]] = {"describe": describe, **CHECKS, **STEPS}


def main(name: str, out: str, settings: str) -> int:
    """Returns 0 if all entries are ok."""
    entries = []
    for entry in PARTS[name](Settings(**json.loads(settings))):
        print(json.dumps(entry), flush=True)
        entries.append(entry)
        Path(out).write_text(json.dumps(entries))
    return 0 if all(entry["ok"] for entry in entries) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
