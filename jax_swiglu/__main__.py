"""`python -m jax_swiglu`: what would run here; `python -m jax_swiglu plans`: the plans it keeps."""

import argparse
import importlib.metadata
import os
import platform
import time
from collections.abc import Sequence

import jax
import numpy as np

import jax_swiglu
from jax_swiglu import _load, _plans
from jax_swiglu._config import PACKINGS, WEIGHT_LAYOUTS
from jax_swiglu._explain import format_plan
from jax_swiglu._warm import warm


def report() -> None:
    """Prints versions, devices, the cuDNN found, and what would run."""
    print(f"jax_swiglu {jax_swiglu.__version__}, Python {platform.python_version()}")
    packages = ("jax", "jaxlib", "numpy")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages))
    for device in jax.devices():
        capability = getattr(device, "compute_capability", None)
        suffix = f", compute capability {capability}" if capability else ""
        print(f"device {device.id}: {device.device_kind}{suffix}")
    status = _load.cudnn_status()
    print(f"cuDNN: {'usable' if status.usable else 'not usable'}: {status.reason}")
    for dtype in (jax.numpy.bfloat16, np.float16, np.float32):
        x, w = jax.ShapeDtypeStruct((16, 64), dtype), jax.ShapeDtypeStruct((64, 64), dtype)
        print(jax_swiglu.explain(x, w, w, w).summary())


def list_plans() -> None:
    """Prints every plan of the cache folder and of the shipped tables."""
    machine = ""
    for source, table in _plans.tables():
        version = _load.format_version(table["cudnn"])
        here = f"{table['gpu']}, compute capability {table['compute_capability']}, cuDNN {version}"
        if here != machine:
            machine = here
            print(f"{machine}:")
        for problem, plan in table["plans"].items():
            print(f"  {format_plan({'problem': problem, 'source': source, **plan})}")
    if not machine:
        print("no plans")


def warm_plans(args: argparse.Namespace) -> None:
    """Chooses plans for the shapes asked for, and keeps them."""
    status = _load.cudnn_status()
    if not status.usable:
        raise SystemExit(f"plans can be chosen on an NVIDIA GPU only; {status.reason}")
    os.environ["JAX_SWIGLU_TUNING"] = str(args.seconds)
    for rows in args.rows:
        for backward in (False, True) if args.backward else (False,):
            start = time.perf_counter()
            plans = warm(
                args.hidden,
                args.intermediate,
                rows,
                dtype=args.dtype,
                param_dtype=args.param_dtype,
                weight_layout=args.weight_layout,
                packing=args.packing,
                backward=backward,
            )
            what = "forward and backward" if backward else "forward"
            print(f"{rows} rows, {what}: {time.perf_counter() - start:.1f} s", flush=True)
            for plan in plans:
                print(f"  {format_plan(plan)}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jax_swiglu", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    plans = commands.add_parser("plans", help="the plans that are kept between processes")
    actions = plans.add_subparsers(dest="action", required=True)
    actions.add_parser("list", help="those of the cache folder and those shipped")
    actions.add_parser("path", help="the cache folder (JAX_SWIGLU_CACHE_DIR)")
    actions.add_parser("clear", help="remove those of the cache folder")
    warming = actions.add_parser("warm", help="choose plans for given shapes now")
    warming.add_argument("--hidden", type=int, required=True, metavar="H")
    warming.add_argument("--intermediate", type=int, required=True, metavar="I")
    warming.add_argument(
        "--rows",
        type=lambda text: [int(part) for part in text.split(",")],
        required=True,
        metavar="M,...",
        help="rows of x: the product of its leading dimensions",
    )
    warming.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    warming.add_argument("--param-dtype", help="of the weights, where it is not --dtype")
    warming.add_argument("--weight-layout", choices=WEIGHT_LAYOUTS, default="in_out")
    warming.add_argument("--packing", choices=PACKINGS, help="gate and up are one parameter")
    warming.add_argument("--backward", action="store_true", help="also for the gradients")
    warming.add_argument(
        "--seconds", type=float, default=3, help="for each graph without a plan (default 3)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command line."""
    args = _parser().parse_args(arguments)
    if args.command is None:
        report()
    elif args.action == "list":
        list_plans()
    elif args.action == "path":
        print(_plans.cache_folder() or "plans are not kept: JAX_SWIGLU_CACHE_DIR is empty")
    elif args.action == "clear":
        print(f"{_plans.clear()} files removed")
    else:
        warm_plans(args)


if __name__ == "__main__":
    main()
