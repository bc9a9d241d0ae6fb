"""Everything that only a GPU can prove, in one command and one record; about seven minutes.

    JAX_SWIGLU_CACHE_DIR= python -m benchmarks.prove --out benchmarks/results/h200.json

The GPU tests, the errors of each model and the training example run beside each other, since they
depend on no time; what is timed then has the GPU for itself. Each prints into a file of
its own in the folder of the record. Where a part fails, the record says so and the rest goes on.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import MODELS

ROOT = Path(__file__).resolve().parents[1]
TIMED = ("launches", "speed", "mesh_of_one", "first_call")
# What the training example says of its result.
VERDICT = re.compile(r"^(PASS|FAIL|\w+: [\d,]+ tokens/s|\w+ on \w+, computing)")


class Part(NamedTuple):
    name: str
    command: list[str]  # of Python
    cwd: Path = ROOT


def _record(
    name: str, folder: Path, commit: list[str], sections: tuple[str, ...], model: str
) -> Part:
    out = str(folder / f"{name}.json")
    command = ["-m", "benchmarks.record", "--out", out, "--model", model, *commit, *sections]
    return Part(name, command)


def _start(part: Part, folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *part.command],
        cwd=part.cwd,
        stdout=(folder / f"{part.name}.log").open("wb"),
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **environment},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--model", default="Llama-3-8B", help="whose speed is measured")
    parser.add_argument("--commit", help="what is measured, where the tree is no git checkout")
    args = parser.parse_args()
    out = args.out.absolute()
    folder = out.parent
    commit = ["--commit", args.commit] if args.commit else []

    tests = Part("gpu_tests", ["-m", "pytest", "-q", "gpu"], ROOT / "tests")
    training = Part("train_lm", ["examples/train_lm.py", "--mlp", "both"])
    errors = [_record(f"accuracy-{m.name}", folder, commit, ("accuracy",), m.name) for m in MODELS]
    timed = _record("timed", folder, commit, TIMED, args.model)

    started = time.monotonic()
    codes: dict[str, int] = {}
    beside = {
        part.name: _start(
            part, folder, XLA_PYTHON_CLIENT_PREALLOCATE="false", JAX_SWIGLU_REQUIRE_GPU="1"
        )
        for part in (tests, training, *errors)
    }
    for name, process in beside.items():
        codes[name] = process.wait()
        print(f"{name}: exit {codes[name]}, {time.monotonic() - started:.0f} s", flush=True)
    codes["timed"] = _start(timed, folder).wait()
    print(f"timed: exit {codes['timed']}, {time.monotonic() - started:.0f} s", flush=True)

    def log(name: str) -> list[str]:
        text = (folder / f"{name}.log").read_text(errors="replace")
        return [line.strip() for line in re.split(r"[\r\n]+", text)]

    def sections(name: str) -> dict[str, Any]:
        path = folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    parts = (tests, training, *errors, timed)
    record: dict[str, Any] = {
        **sections("timed"),
        "commands": [
            " ".join(["python", *part.command]).replace(f"{folder}/", "") for part in parts
        ],
        "exit_codes": codes,
        "accuracy": [e for part in errors for e in sections(part.name).get("accuracy", [])],
        "gpu_tests": [
            line for line in log("gpu_tests") if re.search(r"^(FAILED|ERROR)|\d passed", line)
        ],
        "train_lm": [line for line in log("train_lm") if VERDICT.match(line)],
    }
    out.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(max(map(abs, codes.values())))


if __name__ == "__main__":
    main()
