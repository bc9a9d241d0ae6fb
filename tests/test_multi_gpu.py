"""The proofs of benchmarks.multi_gpu on two CPU devices, and what it makes of failures."""

import json
import os
import textwrap

import pytest

from benchmarks import multi_gpu, sharded_step, tables
from benchmarks.collectives import collective_bytes
from benchmarks.multi_gpu_parts import CHECKS, STEPS

SIZES = "--hidden=32 --intermediate=64 --rows 8 4 --rounds=1 --thread-calls=4 --timeout=100"
EXAMPLE = "--hidden=16 --intermediate=24 --layers=2 --heads=2 --seq=16 --batch=4 --steps=4"
EXAMPLES = ("train_data", "train_fsdp", "train_tensor", "train_two_processes")


@pytest.fixture
def prove(monkeypatch, tmp_path):
    """Runs the parts; returns the exit status and the record."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    # In place of the devices of conftest.py; the programs are tiny, and most time is LLVM's.
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")

    def run(*parts, example=EXAMPLE):
        out = tmp_path / "record.json"
        sizes = [*SIZES.split(), "--implementation=host", "--commit=tested"]
        status = multi_gpu.main([*parts, "--out", str(out), *sizes, f"--example={example}"])
        return status, json.loads(out.read_text())

    return run


def test_checks_and_steps(prove):
    status, record = prove(*CHECKS, *STEPS)
    assert status == 0, record
    assert record["environment"]["commit"] == "tested"
    assert [part["part"] for part in record["parts"]] == [*CHECKS, *STEPS]
    cells = [(e["layout"], e["mesh"], e["m"]) for e in record["multi_gpu"]]
    assert len(set(cells)) == len(cells) == 3 * 2 * 2
    for entry in record["multi_gpu"]:
        for name in ("ms", "relative_errors", "collective_bytes", "temp_bytes"):
            assert entry[name].keys() == {"ours", "xla"}
        assert set(entry["collective_bytes"]["ours"]) >= {"all-reduce"}
        # Weights are gathered where they are split and rows are too, and nowhere else.
        for moved in entry["collective_bytes"].values():
            assert ("all-gather" in moved) == (entry["layout"] == "fsdp")
    assert len(tables.multi_gpu_table(record).splitlines()) == 2 + len(cells)


def test_examples(prove):
    status, record = prove(*EXAMPLES)
    assert status == 0, record
    assert [part["part"] for part in record["parts"]] == list(EXAMPLES)
    for part in record["parts"]:
        assert any(line.startswith("PASS") for line in part["says"])
    assert "2 processes" in record["parts"][-1]["says"][0]


def test_what_fails_is_recorded_and_the_rest_goes_on(prove):
    status, record = prove("second_device", "train_data", example="--steps=1")
    assert status == 1
    good, bad = record["parts"]
    assert good["ok"]
    assert not bad["ok"]
    assert "--steps must be at least 2" in bad["log_ends"]


@pytest.mark.parametrize(
    ("program", "code"),
    [("raise SystemExit(3)", 3), ("import time; time.sleep(100)", "timeout")],
    ids=["exit", "hang"],
)
def test_failing_processes(tmp_path, program, code):
    part = multi_gpu.Part("part", [["-c", "pass"], ["-c", program]])
    entry = multi_gpu._run(part, tmp_path, timeout=3)
    assert entry["exit_codes"] == [0, code]
    assert not entry["ok"]


def test_complaints_about_capture_are_failures(tmp_path):
    part = multi_gpu.Part("part", [["-c", "print('Failed to capture gpu graph')"]])
    entry = multi_gpu._run(part, tmp_path, timeout=60)
    assert entry["exit_codes"] == [0]
    assert not entry["ok"]


def test_a_cell_that_fails_says_why_and_the_others_go_on():
    sizes = {"hidden": 8, "intermediate": 16, "rounds": 1, "implementation": "host"}
    cells = list(sharded_step.run("data", rows=(3, 4), **sizes))
    assert [cell["ok"] for cell in cells] == [False, False, True, True]
    assert "evenly divide" in cells[0]["error"]
    assert "| data | Auto | 3 | failed |" in tables.multi_gpu_table({"multi_gpu": cells})


def test_wrong_values_are_failures(monkeypatch):
    monkeypatch.setattr(sharded_step, "_of_a_part", lambda mlp, layout: lambda *a: 2 * mlp(*a))
    sizes = {"hidden": 8, "intermediate": 16, "rounds": 1, "implementation": "host"}
    cells = list(sharded_step.run("data", rows=(4,), **sizes))
    assert [cell["ok"] for cell in cells] == [True, False]


def test_devices_of_each_process(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    one, second = multi_gpu._environment(0, 1), multi_gpu._environment(1, 2)
    assert one["CUDA_VISIBLE_DEVICES"] == second["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert second["JAX_LOCAL_DEVICE_IDS"] == "1"
    assert "JAX_LOCAL_DEVICE_IDS" not in one
    assert os.environ.get("XLA_FLAGS", "") in one["XLA_FLAGS"]


def test_bytes_of_collectives_that_are_started_first():
    """As GPUs print them: the type of a start has the operands, except that of an all-reduce."""
    hlo = textwrap.dedent("""
        %a = bf16[4,8]{1,0} parameter(0)
        %b = f32[4]{0} parameter(1)
        %ag = (bf16[4,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%a), dimensions={0}
        %ag.done = bf16[8,8]{1,0} all-gather-done(%ag)
        %two = ((bf16[4,8]{1,0}, f32[4]{0}), (bf16[8,8]{1,0}, f32[8]{0})) all-gather-start(%a, %b)
        %ar = bf16[4,8]{1,0} all-reduce-start(%a), to_apply=%add
        %ars = (bf16[4,8]{1,0}, f32[4]{0}) all-reduce-start(%a, %b), to_apply=%add
        %rs = ((bf16[4,8], f32[4]), (bf16[2,8], f32[2])) reduce-scatter-start(%a, %b)
        %cp = (bf16[4,8]{1,0}, bf16[4,8]{1,0}, u32[], u32[]) collective-permute-start(%a)
    """)
    assert collective_bytes(hlo) == {
        "all-gather": 128 + (128 + 32),
        "all-reduce": 64 + (64 + 16) + (64 + 16) // 2,
        "collective-permute": 64,
    }
