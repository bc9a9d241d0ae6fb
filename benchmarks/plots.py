"""Plots of a record of `benchmarks.matrix`.

python -m benchmarks.plots benchmarks/results/h200-matrix.json --folder docs/images
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.common import LLAMA_8B
from benchmarks.matrix import FORWARD, SCAN_FORWARD, SCAN_STEP, STEP, Kind

COLORS = {SCAN_FORWARD: "tab:blue", SCAN_STEP: "tab:green", FORWARD: "tab:orange", STEP: "tab:red"}


def _cells(record: dict[str, Any], kind: Kind) -> list[dict[str, Any]]:
    cells = (e for e in record["matrix"] if e["what"] == kind.name and e["model"] == LLAMA_8B.name)
    return sorted(cells, key=lambda e: e["m"])


def _lines(
    axes: Axes, record: dict[str, Any], kinds: tuple[Kind, ...], peer: str, **line: Any
) -> None:
    for kind in kinds:
        cells = _cells(record, kind)
        axes.plot(
            [e["m"] for e in cells],
            [e["ms"][peer] / e["ms"]["ours"] for e in cells],
            marker="o",
            color=COLORS[kind],
            **{"label": kind.name, **line},
        )


def _figure(title: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set(title=f"{title}, {LLAMA_8B.name} on an NVIDIA H200", xlabel="M (rows)", ylabel=ylabel)
    axes.grid(alpha=0.3)
    return figure, axes


def speedup(record: dict[str, Any]) -> Figure:
    """How many times faster than XLA, with its Triton GEMMs (solid) and without (dotted)."""
    figure, axes = _figure("Speed-up over XLA", "time of XLA / ours")
    _lines(axes, record, tuple(COLORS), "xla")
    _lines(axes, record, tuple(COLORS), "xla_no_triton", linestyle=":", label=None)
    axes.plot([], [], color="gray", linestyle=":", label="dotted: XLA without its Triton GEMMs")
    axes.legend()
    return figure


def distance(record: dict[str, Any]) -> Figure:
    """The time of the bare GEMMs over ours."""
    figure, axes = _figure("Distance to the bare GEMMs", "time of the bare GEMMs / ours")
    _lines(axes, record, (FORWARD, STEP), "bare_gemms")
    axes.legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="for the two PNG files")
    args = parser.parse_args()
    record = json.loads(args.record.read_text())
    args.folder.mkdir(parents=True, exist_ok=True)
    for plot in (speedup, distance):
        plot(record).savefig(args.folder / f"{plot.__name__}.png", dpi=120)


if __name__ == "__main__":
    main()
