"""All that only several GPUs can prove, on two of them, in one command and one record.

    python -m benchmarks.multi_gpu --out benchmarks/results/two-gpus.json

Each part is a process of its own, or two, one part after the other, with every call in a CUDA graph
from the first one on. Each prints into a file of its own in the folder of the record. Where a part
fails or hangs, the record says so and the rest goes on.
"""

import argparse
import json
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, NamedTuple

from benchmarks.common import MODELS
from benchmarks.multi_gpu_parts import CHECKS, STEPS, Settings
from benchmarks.processes import ROOT, start
from benchmarks.sharded_step import LAYOUTS

GRAPHS = "--xla_gpu_graph_min_graph_size=1"
# What the training example says of its result.
VERDICT = re.compile(r"^(PASS|FAIL|mesh:|[\d,]+ tokens/s)")


class Part(NamedTuple):
    name: str
    commands: list[list[str]]  # of Python, at the same time
    checks_losses: bool = False


def _environment(process: int, count: int) -> dict[str, str]:
    """Two devices for each process, or one where there are two processes."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    env = {
        "CUDA_VISIBLE_DEVICES": ",".join(visible),
        "JAX_NUM_CPU_DEVICES": str(2 // count),  # without GPUs
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {GRAPHS}",
    }
    return env if count == 1 else {**env, "JAX_LOCAL_DEVICE_IDS": str(process)}


def _examples(arguments: list[str]) -> list[Part]:
    """Trains on each mesh and on one device; then in two processes of one device each."""
    script = [str(ROOT / "examples" / "train_sharded.py"), *arguments, "--check"]
    one = [
        Part(f"train_{axis}", [[*script, "--cpu-devices=2", f"--mesh={axis}=2"]], True)
        for axis in LAYOUTS
    ]
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    join = ["--cpu-devices=1", f"--coordinator=localhost:{port}", "--num-processes=2"]
    both = [[*script, "--mesh=fsdp=2", *join, f"--process-id={i}"] for i in range(2)]
    return [*one, Part("train_two_processes", both, True)]


def _worker(name: str, folder: Path, settings: Settings) -> Part:
    out = str(folder / f"{name}.json")
    command = ["-m", "benchmarks.multi_gpu_parts", name, out, json.dumps(settings._asdict())]
    return Part(name, [command])


def _run(part: Part, folder: Path, timeout: float) -> dict[str, Any]:
    """One entry of the record."""
    began = time.monotonic()
    count = len(part.commands)
    logs = [folder / (f"{part.name}-{i}.log" if i else f"{part.name}.log") for i in range(count)]
    entries = folder / f"{part.name}.json"
    entries.unlink(missing_ok=True)  # of an earlier run
    processes = [
        start(command, log, folder, _environment(i, count))
        for i, (command, log) in enumerate(zip(part.commands, logs, strict=True))
    ]
    codes: list[int | str] = []
    for process in processes:
        try:
            codes.append(process.wait(max(0, began + timeout - time.monotonic())))
        except TimeoutExpired:
            process.kill()
            process.wait()
            codes.append("timeout")
    text = "\n".join(log.read_text(errors="replace") for log in logs)
    says = [line for line in text.splitlines() if VERDICT.match(line)]
    entry: dict[str, Any] = {
        "part": part.name,
        "ok": not any(codes) and "capture" not in text,
        "exit_codes": codes,
        "seconds": round(time.monotonic() - began, 1),
    }
    if part.checks_losses:
        entry["says"] = says
        entry["ok"] &= any(line.startswith("PASS") for line in says)
    elif entries.exists():
        entry["entries"] = json.loads(entries.read_text())
    if not entry["ok"]:
        entry["log_ends"] = text[-3000:]
    return entry


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if all parts are ok."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    model = MODELS[0]
    parser.add_argument("parts", nargs="*", help="run these only")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--commit", help="what is proved, where the tree is no git checkout")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each part")
    parser.add_argument("--hidden", type=int, default=model.hidden, help="of the training steps")
    parser.add_argument("--intermediate", type=int, default=model.intermediate, help="of these too")
    parser.add_argument("--rows", type=int, nargs="+", default=[8192, 16], help="M, even")
    parser.add_argument("--rounds", type=int, default=9, help="of the timing")
    parser.add_argument("--thread-calls", type=int, default=200, help="of each thread")
    parser.add_argument("--implementation", choices=["cudnn", "host"], help="host: on CPU devices")
    parser.add_argument(
        "--example", default="--steps=100", help="options of train_sharded.py, behind a ="
    )
    args = parser.parse_args(argv)
    out = args.out.absolute()
    folder = out.parent
    settings = Settings(**{name: getattr(args, name) for name in Settings._fields})
    example = args.example.split()
    if args.implementation:
        example.append(f"--implementation={args.implementation}")
    parts = [*(_worker(n, folder, settings) for n in (*CHECKS, *STEPS)), *_examples(example)]
    if unknown := set(args.parts) - {part.name for part in parts}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")

    # This process must not start JAX's devices: it would hold the memory of the GPUs.
    described = _run(_worker("describe", folder, settings), folder, args.timeout)
    if not described["ok"]:
        parser.exit(2, f"needs two NVIDIA GPUs:\n{described['log_ends']}\n")
    results: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    record = {
        "command": " ".join(["python -m benchmarks.multi_gpu", *(argv or sys.argv[1:])]),
        "environment": described["entries"][0]["environment"],
        "xla_flags": _environment(0, 1)["XLA_FLAGS"].strip(),
        "parts": results,
        "multi_gpu": steps,
    }
    for part in parts:
        if args.parts and part.name not in args.parts:
            continue
        result = _run(part, folder, args.timeout)
        if part.name in STEPS:
            steps += result.pop("entries", [])
        results.append(result)
        verdict = "ok" if result["ok"] else "FAILED"
        print(f"{part.name}: {verdict}, {result['seconds']} s", flush=True)
        out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
