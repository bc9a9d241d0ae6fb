"""Turns records into the Markdown tables of the README and of docs/performance.md.

python -m benchmarks.tables benchmarks/results/*.json
"""

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import LLAMA_8B
from benchmarks.matrix import FORWARD, SCAN_FORWARD, SCAN_STEP, STEP, Kind

Record = dict[str, Any]
Entry = dict[str, Any]


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _speedup(entry: Entry, *peers: str) -> float:
    """How many times faster than the fastest of the peers we are."""
    return min(entry["ms"][peer] for peer in peers) / entry["ms"]["ours"]


def speed_table(record: Record) -> str:
    """Milliseconds, and how many times faster than each peer we are, of Llama-3-8B."""
    rows = [
        (
            e["what"],
            str(e["m"]),
            *(f"{e['ms'][peer]:.3f}" for peer in ("ours", "xla", "xla_no_triton")),
            f"{_speedup(e, 'xla'):.2f}",
            f"{_speedup(e, 'xla_no_triton'):.2f}",
            f"{e['spread']:.1%}",
        )
        for e in _sorted(record["matrix"])
        if e["model"] == LLAMA_8B.name
    ]
    header = (
        *("what", "M", "ours", "XLA", "XLA, no Triton GEMMs"),
        *("XLA / ours", "no Triton / ours", "XLA / XLA again"),
    )
    return _table(header, rows)


def _sorted(entries: Iterable[Entry]) -> list[Entry]:
    order = [kind.name for kind in (FORWARD, STEP, SCAN_FORWARD, SCAN_STEP)]
    return sorted(entries, key=lambda e: (e["model"], order.index(e["what"]), e["m"]))


class Bar(NamedTuple):
    """One number to reach, over the cells of a kind with least <= M <= most.

    `value` is better the larger it is; `mean` and `least` bound its geometric mean and its minimum.
    """

    kind: Kind
    rows: tuple[int, int]
    against: str
    value: Callable[[Entry], float]
    mean: float | None = None
    least: float | None = None


def _than(*peers: str) -> Callable[[Entry], float]:
    return lambda entry: _speedup(entry, *peers)


def _bars(record: Record) -> list[Bar]:
    def of_limit(e: Entry) -> float:
        return e["weight_bytes"] / record["read_bytes_per_s"] * 1e3 / e["ms"]["ours"]

    xla, other = _than("xla"), _than("xla_no_triton")
    savers = _than("xla_dots_saveable", "pure_jax_vjp")
    gemms = _than("bare_gemms")
    return [
        Bar(SCAN_FORWARD, (1, 256), "XLA", xla, 2.5, 0.99),
        Bar(SCAN_FORWARD, (1, 256), "XLA, no Triton GEMMs", other, 1.05, 0.99),
        Bar(SCAN_FORWARD, (1, 64), "reading the weights", of_limit, least=1 / 1.15),
        Bar(SCAN_FORWARD, (512, 4096), "XLA", xla, 1.15),
        Bar(SCAN_FORWARD, (512, 4096), "XLA, no Triton GEMMs", other, 1.03),
        Bar(SCAN_STEP, (2048, 16384), "XLA", xla, 1.08, 1.0),
        Bar(SCAN_STEP, (2048, 16384), "best of `dots_saveable`, pure-JAX VJP", savers, 1.03),
        Bar(FORWARD, (1, 1024), "XLA", xla, 1.1, 0.99),
        Bar(FORWARD, (2048, 16384), "XLA", xla, 1.05, 1.0),
        Bar(FORWARD, (1, 16384), "the bare GEMMs", gemms, least=1 / 1.02),
        Bar(STEP, (1, 16384), "the bare GEMMs", gemms, least=1 / 1.02),
    ]


def bars_table(record: Record) -> str:
    """What the design asks for, what was reached, and by how many cells of Llama-3-8B."""
    rows = []
    for bar in _bars(record):
        values = [
            bar.value(e)
            for e in record["matrix"]
            if e["what"] == bar.kind.name
            and e["model"] == LLAMA_8B.name
            and bar.rows[0] <= e["m"] <= bar.rows[1]
        ]
        if not values:
            continue
        mean, least = statistics.geometric_mean(values), min(values)
        met = mean >= (bar.mean or 0) and least >= (bar.least or 0)
        rows.append(
            (
                f"{bar.kind.name}, M {bar.rows[0]} to {bar.rows[1]}",
                bar.against,
                "-" if bar.mean is None else f"{bar.mean:.2f}",
                "-" if bar.least is None else f"{bar.least:.2f}",
                f"{mean:.2f}",
                f"{least:.3f}",
                str(len(values)),
                "yes" if met else "no",
            )
        )
    header = (
        *("what", "against", "mean to reach", "least to reach"),
        *("mean", "least", "sizes", "met"),
    )
    return _table(header, rows)


def slower_table(record: Record) -> str:
    """Where a kind of XLA is faster by more than one percent and the spread of two runs."""
    rows = [
        (
            e["model"],
            e["what"],
            str(e["m"]),
            label,
            f"{_speedup(e, peer):.3f}",
            f"{e['spread']:.1%}",
        )
        for e in _sorted(record["matrix"])
        for peer, label in (("xla", "XLA"), ("xla_no_triton", "XLA, no Triton GEMMs"))
        if _speedup(e, peer) < 1 - 0.01 - e["spread"]
    ]
    header = ("model", "what", "M", "against", "peer / ours", "XLA / XLA again")
    return _table(header, rows)


def models_table(record: Record) -> str:
    """The models beside Llama-3-8B: TFLOP/s, and what is faster by how much."""
    rows = [
        (
            f"{e['model']}, H{e['hidden']} I{e['intermediate']}",
            e["what"],
            str(e["m"]),
            f"{e['ms']['ours']:.3f}",
            f"{e['tflop_per_s']:.0f}",
            f"{_speedup(e, 'xla'):.2f}",
            f"{_speedup(e, 'xla_no_triton'):.2f}",
            f"{_speedup(e, 'bare_gemms'):.2f}" if "bare_gemms" in e["ms"] else "-",
        )
        for e in _sorted(record["matrix"])
        if e["model"] != LLAMA_8B.name
    ]
    header = (
        *("model", "what", "M", "ours, ms", "TFLOP/s"),
        *("XLA / ours", "no Triton / ours", "bare GEMMs / ours"),
    )
    return _table(header, rows)


_MEMORY_PEERS = {
    "ours": "ours",
    "ours, input": '`residuals="input"`',
    "xla": "XLA",
    "xla_dots_saveable": "`dots_saveable`",
    "pure_jax_vjp": "pure-JAX VJP",
}


def memory_table(record: Record) -> str:
    """Temporary memory of a training step, in arrays [M, I] of each layer."""
    rows = [
        (
            str(e["m"]),
            *(
                f"{e['temp_bytes'][peer] / (2 * e['m'] * e['intermediate'] * e['layers']):.1f}"
                for peer in _MEMORY_PEERS
            ),
        )
        for e in _sorted(record["matrix"])
        if e["what"] == SCAN_STEP.name and e["model"] == LLAMA_8B.name
    ]
    return _table(("M", *_MEMORY_PEERS.values()), rows)


def training_table(record: Record) -> str:
    """Milliseconds of a training step over stacked layers, by what is kept for the backward."""
    peers = {"ours": "ours", "xla": "XLA", "xla_no_triton": "XLA, no Triton GEMMs"}
    peers |= {"xla_dots_saveable": "`dots_saveable`", "pure_jax_vjp": "pure-JAX VJP"}
    rows = [
        (str(e["m"]), *(f"{e['ms'][peer]:.2f}" for peer in peers))
        for e in _sorted(record["matrix"])
        if e["what"] == SCAN_STEP.name and e["model"] == LLAMA_8B.name
    ]
    return _table(("M", *peers.values()), rows)


def first_call_table(record: Record) -> str:
    """Seconds of the first and the second call, in fresh processes."""
    labels = {
        "xla": "plain JAX",
        "cold": "no plans known",
        "warm": "plans on disk",
        "shipped": "plans shipped",
    }
    rows = [
        (
            labels[e["what"]],
            f"H{e['hidden']} I{e['intermediate']}, M {e['m']}",
            f"{e['first_s']:.2f}",
            f"{e['second_s']:.3f}",
        )
        for e in record["first_call"]
    ]
    return _table(("what", "sizes", "first call, s", "second call, s"), rows)


def packed_table(record: Record) -> str:
    """Milliseconds of a forward and backward pass, by how the parameters are stored."""
    peers = list(record["packed"][0]["ms"])
    rows = ((peer, *(f"{e['ms'][peer]:.3f}" for e in record["packed"])) for peer in peers)
    return _table(("parameters", *(f"M {e['m']}" for e in record["packed"])), rows)


def accuracy_table(record: Record) -> str:
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


def launches_table(record: Record) -> str:
    """Kernels per call and the microseconds of each, as the profiler saw them."""
    rows = []
    for e in record["launches"]:
        for kernel, count in e["kernels_per_call"].items():
            name = re.sub("(pointwise_)+", "pointwise_", kernel.split("<")[0])
            call = f"{e['what']}, {e['model']}, M {e['m']}"
            us = e["us_per_call"][kernel] / count
            rows.append((call, f"`{name}`", f"{count:g}", f"{us:.1f}"))
    return _table(("call", "kernel", "launches per call", "us each"), rows)


def mesh_table(record: Record) -> str:
    """Milliseconds of forward with backward."""
    rows = [
        (str(e["m"]), *(f"{e['ms'][where]:.3f}" for where in ("no_mesh", "mesh", "shard_map")))
        for e in record["mesh_of_one"]
    ]
    return _table(("M", "no mesh", "mesh of one device", "shard_map over it"), rows)


def multi_gpu_table(record: Record) -> str:
    """Milliseconds and bytes of collectives of a training step on two GPUs."""
    rows = []
    for e in record["multi_gpu"]:
        cell = (e["layout"], e["mesh"], str(e["m"]))
        if "error" in e:
            rows.append((*cell, *["failed"] * 5))
            continue
        ms, moved = e["ms"], e["collective_bytes"]
        rows.append(
            (
                *cell,
                *(f"{ms[peer]:.3f}" for peer in ("ours", "xla")),
                f"{_speedup(e, 'xla'):.2f}",
                *(f"{sum(moved[peer].values()):,}" for peer in ("ours", "xla")),
            )
        )
    header = ("layout", "mesh", "M", "ours", "XLA", "XLA / ours", "bytes, ours", "bytes, XLA")
    return _table(header, rows)


TABLES = {
    "matrix": (
        speed_table,
        bars_table,
        slower_table,
        models_table,
        training_table,
        memory_table,
    ),
    "first_call": (first_call_table,),
    "packed": (packed_table,),
    "accuracy": (accuracy_table,),
    "launches": (launches_table,),
    "mesh_of_one": (mesh_table,),
    "multi_gpu": (multi_gpu_table,),
}

if __name__ == "__main__":
    for path in sys.argv[1:]:
        record = json.loads(Path(path).read_text())
        for section in record.keys() & TABLES.keys():
            for make in TABLES[section]:
                print(f"{(make.__doc__ or '').strip()}\n\n{make(record)}\n")
