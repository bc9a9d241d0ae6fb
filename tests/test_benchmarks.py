"""The benchmarks run, count right and say what they did not reach."""

import math
import sys
import time
import types

import jax
import pytest

from benchmarks import matrix, tables


def tiny(kind):
    return matrix.Cell(kind, matrix.Model("tiny", 64, 128), 4)


@pytest.mark.parametrize("index", range(4))
def test_every_kind_of_cell(index):
    kind = matrix.KINDS[index]
    entry = matrix.measure(tiny(kind), rounds=2, seconds_per_round=1e-3)
    ms = entry["ms"]
    assert {"ours", "xla", "xla_again", "xla_no_triton"} <= ms.keys()
    assert ("bare_gemms" in ms) == (kind.layers is None)
    assert ("pure_jax_vjp" in ms) == ("xla_dots_saveable" in ms) == (kind == matrix.SCAN_STEP)
    assert ("ours, input" in entry["temp_bytes"]) == (kind == matrix.SCAN_STEP)
    assert entry["spread"] == abs(ms["xla_again"] / ms["xla"] - 1)
    layers = 8 if kind.layers else 1
    assert entry["weight_bytes"] == 3 * 64 * 128 * 2 * layers
    flops = 2 * 4 * 64 * 128 * (9 if kind.gradients else 3) * layers
    assert entry["tflop_per_s"] == pytest.approx(flops / (ms["ours"] * 1e-3) / 1e12)


def test_peers_compute_the_same():
    args = [a.astype("float32") for a in matrix.make_data(4, 64, 128, "float32", layers=8)]
    for kind in (matrix.SCAN_STEP, matrix.SCAN_FORWARD):
        given = args if kind.gradients else args[:-1]
        results = {name: peer(*given) for name, peer in matrix._peers(kind).items()}
        for result in results.values():
            assert matrix.relative_errors(result, results["xla"]).max() < 1e-4


@pytest.mark.parametrize("scanned", [False, True])
def test_tokamax_gets_packed_weights(monkeypatch, scanned):
    def gated_linear_unit(x, weights, *, activation):
        assert weights.shape == (64, 2, 128)
        return activation(x @ weights[:, 0]) * (x @ weights[:, 1])

    tokamax = types.SimpleNamespace(gated_linear_unit=gated_linear_unit)
    monkeypatch.setitem(sys.modules, "tokamax", tokamax)
    monkeypatch.setattr(matrix, "_has_tokamax", lambda: True)
    cell = tiny(matrix.SCAN_FORWARD if scanned else matrix.FORWARD)
    assert "tokamax" in matrix.measure(cell, rounds=1, seconds_per_round=1e-3)["ms"]


@pytest.fixture
def without_memory(monkeypatch):
    """Lets one peer run out of memory; returns the entry of a cell."""

    @jax.jit
    def hungry(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    def run(peer):
        peers = matrix._peers
        monkeypatch.setattr(matrix, "_peers", lambda kind: {**peers(kind), peer: hungry})
        cells = [tiny(matrix.FORWARD)]
        ((_, entry),) = matrix.run(cells, math.inf, rounds=1, seconds_per_round=1e-3)
        return entry

    return run


def test_a_peer_without_memory_is_left_out(without_memory):
    entry = without_memory("hungry")
    assert "hungry" not in entry["ms"]
    assert "RESOURCE_EXHAUSTED" in entry["failed"]["hungry"]


@pytest.mark.parametrize("peer", ["ours", "xla", "xla_again"])
def test_nothing_is_compared_without_memory_for_both(without_memory, peer):
    assert "RESOURCE_EXHAUSTED" in without_memory(peer)


def test_what_time_does_not_reach():
    cells = [tiny(matrix.FORWARD)]
    assert list(matrix.run(cells, time.monotonic() - 1)) == [(cells[0], "no time left")]


def test_cells():
    short, full = matrix.short(), matrix.full()
    assert full[: len(short)] == short
    assert len(set(full)) == len(full) == 4 * 6 * 15


def synthetic(kind, m, ours, **ms):
    times = {"ours": ours, "xla": 3.0, "xla_again": 3.0, "xla_no_triton": 2.0, **ms}
    return {
        "what": kind.name,
        "model": matrix.LLAMA_8B.name,
        "hidden": 4096,
        "intermediate": 14336,
        "m": m,
        "layers": kind.layers,
        "ms": times,
        "spread": 0.0,
        "tflop_per_s": 1.0,
        "weight_bytes": 1e9,
        "temp_bytes": dict.fromkeys(
            ("ours", "ours, input", "xla", "xla_dots_saveable", "pure_jax_vjp"),
            3 * 2 * m * 14336 * 8,
        ),
    }


@pytest.fixture
def record():
    kept = {"xla_dots_saveable": 3.0, "pure_jax_vjp": 2.5}
    return {
        "read_bytes_per_s": 1e12,
        "matrix": [
            synthetic(matrix.SCAN_FORWARD, 16, 1.0),
            synthetic(matrix.SCAN_FORWARD, 64, 1.2),
            synthetic(matrix.SCAN_STEP, 2048, 2.5, **kept),
            synthetic(matrix.FORWARD, 2048, 2.1, bare_gemms=2.1),
        ],
    }


def test_bars(record):
    bars = {tuple(line.split(" | ")[:2]): line for line in tables.bars_table(record).splitlines()}
    scan = "| forward, scan over 8 layers, M 1 to"
    mean = (3.0 / 1.0 * 3.0 / 1.2) ** 0.5
    assert f"| {mean:.2f} | 2.500 | 2 | yes |" in bars[f"{scan} 256", "XLA"]
    # Reading the weights takes 1 ms, and of the two runs one takes 1.2 ms.
    assert "| 0.833 | 2 | no |" in bars[f"{scan} 64", "reading the weights"]
    step = "| forward+backward, scan over 8 layers, M 2048 to 16384"
    assert "| 1.00 | 1.000 | 1 | no |" in bars[step, "best of `dots_saveable`, pure-JAX VJP"]


def test_slower_cells_are_listed(record):
    slower = tables.slower_table(record).splitlines()[2:]
    assert [line.split(" | ")[1:4] for line in slower] == [
        ["forward", "2048", "XLA, no Triton GEMMs"],
        ["forward+backward, scan over 8 layers", "2048", "XLA, no Triton GEMMs"],
    ]
    record["matrix"][3]["spread"] = 0.1
    assert len(tables.slower_table(record).splitlines()[2:]) == 1


def test_memory_is_in_arrays_of_a_layer(record):
    assert "| 2048 | 3.0 | 3.0 |" in tables.memory_table(record)


def test_plots(record, tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    for plot in (plots.speedup, plots.distance):
        plot(record).savefig(tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
