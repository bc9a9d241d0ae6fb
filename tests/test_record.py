"""The README's tables are those of the committed record."""

import json
from pathlib import Path

from benchmarks import tables

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "h200-2026-12-01.json"


def test_tables():
    record = json.loads(RECORD.read_text())
    readme = (ROOT / "README.md").read_text()
    assert RECORD.name in readme
    assert record["environment"]["commit"] in readme
    assert tables.accuracy_table(record) in readme
    assert tables.mesh_table(record) in (ROOT / "docs" / "performance.md").read_text()


def test_required_accuracy_was_met():
    accuracy = json.loads(RECORD.read_text())["accuracy"]
    assert len(accuracy) == 3 * 5 * 2 * 2 * 4
    assert max(entry["worst_ratio"] for entry in accuracy) <= 1.1
