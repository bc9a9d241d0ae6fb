"""All that only a GPU can prove of correctness, in one command and one record.

    JAX_SWIGLU_CACHE_DIR= python -m benchmarks.prove --out benchmarks/results/h200.json

The GPU tests, the errors of each model and the training example run beside each other, which they
can because none depends on time; `benchmarks.matrix` and `benchmarks.record` measure speed. Each
prints into a file of its own in the folder of the record. Where a part fails, the record says so
and the rest goes on.
"""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import MODELS
from benchmarks.processes import ROOT, start

# What the training example says of its result.
VERDICT = re.compile(r"^(PASS|FAIL|\w+: [\d,]+ tokens/s|\w+ on \w+, computing)")


class Part(NamedTuple):
    name: str
    command: list[str]  # of Python
    cwd: Path = ROOT


def _accuracy(model: str, folder: Path, commit: list[str]) -> Part:
    name = f"accuracy-{model}"
    out = str(folder / f"{name}.json")
    command = ["-m", "benchmarks.record", "--out", out, "--model", model, *commit, "accuracy"]
    return Part(name, command)


def _start(part: Part, folder: Path) -> subprocess.Popen[bytes]:
    env = {
        # All of them share the GPU's memory.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_SWIGLU_REQUIRE_GPU": "1",
    }
    return start(part.command, folder / f"{part.name}.log", part.cwd, env)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--commit", help="what is proved, where the tree is no git checkout")
    parser.add_argument(
        "--jobs", type=int, default=4, help="processes of the GPU tests, with pytest-xdist"
    )
    args = parser.parse_args()
    out = args.out.absolute()
    folder = out.parent
    commit = ["--commit", args.commit] if args.commit else []

    jobs = ["-n", str(args.jobs)] if importlib.util.find_spec("xdist") else []
    tests = Part("gpu_tests", ["-m", "pytest", "-q", *jobs, "gpu"], ROOT / "tests")
    training = Part("train_lm", ["examples/train_lm.py", "--mlp", "both"])
    errors = [_accuracy(model.name, folder, commit) for model in MODELS]
    parts = (tests, training, *errors)

    started = time.monotonic()
    codes: dict[str, int] = {}
    processes = {part.name: _start(part, folder) for part in parts}
    for name, process in processes.items():
        codes[name] = process.wait()
        print(f"{name}: exit {codes[name]}, {time.monotonic() - started:.0f} s", flush=True)

    def log(name: str) -> list[str]:
        text = (folder / f"{name}.log").read_text(errors="replace")
        return [line.strip() for line in re.split(r"[\r\n]+", text)]

    def sections(part: Part) -> dict[str, Any]:
        path = folder / f"{part.name}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    records = [sections(part) for part in errors]
    record: dict[str, Any] = {
        "environment": next((r["environment"] for r in records if r), None),
        "commands": [
            " ".join(["python", *part.command]).replace(f"{folder}/", "") for part in parts
        ],
        "exit_codes": codes,
        "accuracy": [entry for r in records for entry in r.get("accuracy", [])],
        "gpu_tests": [
            line for line in log("gpu_tests") if re.search(r"^(FAILED|ERROR)|\d passed", line)
        ],
        "train_lm": [line for line in log("train_lm") if VERDICT.match(line)],
    }
    out.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(max(map(abs, codes.values())))


if __name__ == "__main__":
    main()
