"""Tunes the shapes of common models on the GPU at hand and writes them as a table to ship.

python -m benchmarks.tune --minutes 25 [--table jax_swiglu/plans/NVIDIA_H200-cudnn91900.json]

What the table holds already is not tuned again, so that a run that was cut short goes on where it
stopped. Several processes, each with a GPU of its own, share the work with the same --work folder
and --part 0/2, 1/2.
"""

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jax_swiglu import _ffi, _load, _plans
from jax_swiglu._warm import warm

# The shapes of the benchmarks first: (H, I).
SIZES = (
    (4096, 14336),  # Llama-3-8B, Mistral-7B
    (5120, 17408),  # Qwen3.5-27B, Qwen3-14B
    (8192, 3584),  # Llama-3-70B, one of eight tensor-parallel slices
    (896, 4864),  # Qwen2.5-0.5B
    (7168, 2048),  # DeepSeek-V3, shared expert
    (1280, 3420),  # Qwen2.5-VL, vision
    (4096, 12288),  # Qwen3-8B
    (2048, 8192),  # Llama-3.2-1B
    (3072, 8192),  # Llama-3.2-3B, Phi-3-mini
    (3584, 18944),  # Qwen2.5-7B
    (4096, 11008),  # Llama-2-7B
    (1024, 3072),  # Qwen3-0.6B
    (2048, 6144),  # Qwen3-1.7B
    (2560, 9728),  # Qwen3-4B
    (5120, 13824),  # Qwen2.5-14B
    (5120, 25600),  # Qwen3-32B
    (5120, 27648),  # Qwen2.5-32B, OLMo-3-32B
)
BENCHMARKED = 6
# Rows: those of decoding, prefill and training that stand for many first, then those between.
ROWS = ((16, 2048, 8192, 4096, 1, 256), (64, 512, 1024, 16384, 128, 32, 8, 2, 4))


class Case(NamedTuple):
    hidden: int
    intermediate: int
    rows: int


def cases() -> Iterator[Case]:
    """The most important ones first."""
    for sizes in (SIZES[:BENCHMARKED], SIZES[BENCHMARKED:]):
        for rows in ROWS:
            for m in rows:
                yield from (Case(h, i, m) for h, i in sizes)


def merge(machine: dict[str, Any], files: Iterable[Path]) -> dict[str, Any]:
    """One table of all that the files hold for this GPU and cuDNN; the later ones win."""
    plans: dict[str, Any] = {}
    for path in files:
        table = _plans.read(path)
        if table is not None and {name: table[name] for name in machine} == machine:
            plans |= table["plans"]
    return {"schema": _ffi.PLAN_SCHEMA, **machine, "plans": dict(sorted(plans.items()))}


def tuned_before(path: Path) -> set[Case]:
    """The shapes whose plans are in a table."""
    return (
        {Case(*case) for case in json.loads(path.read_text())["shapes"]} if path.exists() else set()
    )


def write(table: dict[str, Any], shapes: Iterable[Case], path: Path) -> None:
    """One line for each problem, so that changes can be read; in one step."""
    head = {name: value for name, value in table.items() if name != "plans"}
    lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in table["plans"].items())
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    start = json.dumps({**head, "shapes": sorted(shapes)})[:-1]
    temporary.write_text(f'{start}, "plans": {{\n{lines}\n}}}}\n')
    temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30, help="begin no shape after this")
    parser.add_argument("--table", type=Path, help="default: the one shipped for this machine")
    parser.add_argument("--work", type=Path, help="folder of what is tuned, for several processes")
    parser.add_argument("--part", default="0/1", help="which part of the shapes: 0/2 is one half")
    parser.add_argument("--seconds", type=float, default=2, help="for each choice (default 2)")
    parser.add_argument("--list", action="store_true", help="print the shapes, and tune nothing")
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    todo = list(cases())[part::parts]
    if args.list:
        for case in todo:
            print(*case)
        return
    status = _load.cudnn_status()
    if not status.usable:
        parser.error(f"needs an NVIDIA GPU; {status.reason}")

    device = jax.devices()[0]
    machine = {
        "gpu": device.device_kind,
        "compute_capability": device.compute_capability,
        "cudnn": status.version,
    }
    name = re.sub(r"\W+", "_", device.device_kind)
    table = args.table or _plans.SHIPPED / f"{name}-cudnn{status.version}.json"
    os.environ["JAX_SWIGLU_TUNING"] = str(args.seconds)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary) if args.work is None else args.work.absolute()
        # Only this table counts as tuned, not what other runs left in the user's cache.
        known = Path(temporary) / "known"
        known.mkdir()
        write(merge(machine, [table]), [], known / "known.json")
        _ffi.set_plan_folders(os.fspath(work), os.fspath(known))
        end = time.monotonic() + args.minutes * 60
        for done, case in enumerate(todo):
            if case in tuned_before(table):
                continue
            if time.monotonic() > end:
                print(f"time is over: {done} of {len(todo)} shapes; run again for the rest")
                break
            start = time.monotonic()
            plans = [*warm(*case), *warm(*case, backward=True)]
            tuned = sum(plan["source"] == "tuned" for plan in plans)
            seconds = time.monotonic() - start
            print(f"{case}: {tuned} of {len(plans)} plans tuned, {seconds:.1f} s", flush=True)
            files = [table, *sorted(work.glob("*/*.json"))]
            write(merge(machine, files), tuned_before(table) | {case}, table)
        else:
            print("all shapes are tuned")
    print(f"{len(merge(machine, [table])['plans'])} plans in {table}")


if __name__ == "__main__":
    main()
