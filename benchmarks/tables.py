"""Turns a record into the Markdown tables of the README.

python -m benchmarks.tables benchmarks/results/h200-2026-12-01.json
"""

import json
import re
import sys
from pathlib import Path
from typing import Any


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def speed_table(record: dict[str, Any]) -> str:
    """Milliseconds, and how many times faster than each peer."""
    rows = [
        (
            f"{e['what']}, H{e['hidden']} I{e['intermediate']}",
            str(e["m"]),
            *(f"{e['ms'][peer]:.3f}" for peer in ("ours", "xla", "xla_no_triton")),
            f"{e['speedup_over_xla']:.2f}",
            f"{e['speedup_over_xla_no_triton']:.2f}",
            f"{e['spread']:.1%}",
        )
        for e in record["speed"]
    ]
    header = (
        *("what", "M", "ours", "XLA", "XLA, no Triton GEMMs"),
        *("XLA / ours", "no Triton / ours", "XLA / XLA again"),
    )
    return _table(header, rows)


def accuracy_table(record: dict[str, Any]) -> str:
    """The largest ratio of our error to that of plain XLA, by dtype and routes."""
    worst: dict[tuple[str, str], list[float]] = {}
    for e in record["accuracy"]:
        worst.setdefault((e["dtype"], e["routes"]), []).append(e["worst_ratio"])
    rows = [
        (dtype, routes.replace("/", ", "), str(len(ratios)), f"{max(ratios):.2f}")
        for (dtype, routes), ratios in worst.items()
    ]
    header = ("dtype", "routes of glu_fwd, glu_bwd", "cases", "largest error / XLA's error")
    return _table(header, rows)


def launches_table(record: dict[str, Any]) -> str:
    """Kernels per call and the microseconds of each, as the profiler saw them."""
    rows = []
    for e in record["launches"]:
        for kernel, count in e["kernels_per_call"].items():
            name = re.sub("(pointwise_)+", "pointwise_", kernel.split("<")[0])
            call = f"{e['what']}, {e['model']}, M {e['m']}"
            us = e["us_per_call"][kernel] / count
            rows.append((call, f"`{name}`", f"{count:g}", f"{us:.1f}"))
    return _table(("call", "kernel", "launches per call", "us each"), rows)


def mesh_table(record: dict[str, Any]) -> str:
    """Milliseconds of forward with backward."""
    rows = [
        (str(e["m"]), *(f"{e['ms'][where]:.3f}" for where in ("no_mesh", "mesh", "shard_map")))
        for e in record["mesh_of_one"]
    ]
    return _table(("M", "no mesh", "mesh of one device", "shard_map over it"), rows)


TABLES = {
    "speed": speed_table,
    "accuracy": accuracy_table,
    "launches": launches_table,
    "mesh_of_one": mesh_table,
}

if __name__ == "__main__":
    for make in TABLES.values():
        print(make(json.loads(Path(sys.argv[1]).read_text())), end="\n\n")
