"""Runs the proofs and benchmarks on a GPU and writes their record.

python -m benchmarks.record --out benchmarks/results/h200.json [section ...]
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks import accuracy, common, launches, mesh, packed

SECTIONS = {
    "launches": launches.run,
    "mesh_of_one": mesh.run,
    "packed": packed.run,
    "accuracy": accuracy.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--model", action="append", help="restrict to this model; may be repeated")
    parser.add_argument("--commit", help="what is measured, where the tree is no git checkout")
    args = parser.parse_args()
    models = [m for m in common.MODELS if args.model is None or m.name in args.model]
    if jax.default_backend() != "gpu":
        parser.error("needs an NVIDIA GPU")
    record: dict[str, Any] = {"environment": common.environment(args.commit)}
    print(record["environment"], flush=True)
    for name in args.sections or SECTIONS:
        start = time.perf_counter()
        record[name] = []
        # The float64 reference needs 64-bit types; nothing else does.
        with jax.enable_x64(name == "accuracy"):
            for entry in SECTIONS[name](models):
                print(name, json.dumps(entry), flush=True)
                record[name].append(entry)
                args.out.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    record["plans"] = common.plans_used()
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
