"""Times, memory and first calls against everything that users have today.

    python -m benchmarks.matrix --out short.json             # at most eight minutes on one GPU
    python -m benchmarks.matrix --out full.json --full       # all models and sizes; hours

The cells come in an order of their own, the most important first, and what is not reached in time
is listed in the record. All peers of a cell run in one process, in turn, and return all results.
"""

import argparse
import functools
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_swiglu as js
from benchmarks import first_call
from benchmarks.common import (
    LLAMA_8B,
    QWEN_27B,
    QWEN_HALF_B,
    Arrays,
    Model,
    environment,
    make_data,
    median_ms,
    plain_mlp,
    plans_used,
    relative_errors,
    temp_bytes,
    with_gradients,
)
from jax_swiglu.convert import Packing, pack

Mlp = Callable[..., jax.Array]

LAYERS = 8
ITEMSIZE = 2  # bfloat16
MODELS = (
    LLAMA_8B,
    QWEN_27B,
    Model("Llama-3-70B, one of 8 slices", 8192, 3584),
    QWEN_HALF_B,
    Model("DeepSeek-V3 shared expert", 7168, 2048),
    Model("Qwen2.5-VL vision", 1280, 3420),
)
ROWS = tuple(2**k for k in range(15))
# XLA's Triton GEMMs copy weights that are sliced from a stack; an informed user turns them off.
NO_TRITON = {"xla_gpu_enable_triton_gemm": False}


class Kind(NamedTuple):
    name: str
    gradients: bool
    layers: int | None  # of a scan over stacked weights

    @property
    def gemms(self) -> int:
        return (9 if self.gradients else 3) * (self.layers or 1)


FORWARD = Kind("forward", False, None)
STEP = Kind("forward+backward", True, None)
SCAN_FORWARD = Kind(f"forward, scan over {LAYERS} layers", False, LAYERS)
SCAN_STEP = Kind(f"forward+backward, scan over {LAYERS} layers", True, LAYERS)
KINDS = (SCAN_FORWARD, SCAN_STEP, FORWARD, STEP)
# Without one of these there is nothing to say of a cell.
COMPARED = ("ours", "xla", "xla_again", "xla_no_triton")


class Cell(NamedTuple):
    kind: Kind
    model: Model
    m: int

    def __str__(self) -> str:
        return f"{self.kind.name}, {self.model.name}, M {self.m}"

    @property
    def flops(self) -> int:
        return self.kind.gemms * 2 * self.m * self.model.hidden * self.model.intermediate


def short() -> list[Cell]:
    """What each statement of docs/performance.md rests on, then a look at the other models."""
    sizes = {
        LLAMA_8B: (
            (SCAN_FORWARD, (16, 2048)),
            (SCAN_STEP, (2048, 8192)),
            (FORWARD, (16, 2048, 8192)),
            (STEP, (16, 2048, 8192)),
            (SCAN_FORWARD, (8192, 256, 64, 1, 512, 4096)),
            (SCAN_STEP, (16, 16384)),
            (FORWARD, (256, 1024, 4096, 16384)),
            (STEP, (4096, 16384)),
        ),
        QWEN_27B: ((SCAN_FORWARD, (16,)), (FORWARD, (16, 2048)), (STEP, (2048,))),
        **dict.fromkeys(MODELS[2:], ((FORWARD, (16, 2048)), (STEP, (2048,)))),
    }
    return [
        Cell(kind, model, m) for model, kinds in sizes.items() for kind, rows in kinds for m in rows
    ]


def full() -> list[Cell]:
    """Those of the short matrix first."""
    every = (Cell(kind, model, m) for model in MODELS for m in ROWS for kind in KINDS)
    return list(dict.fromkeys((*short(), *every)))


def scanned(mlp: Mlp) -> Mlp:
    """The layers of a model, as JAX language models run them, with a residual connection."""

    def forward(x: jax.Array, *weights: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weights: Arrays) -> tuple[jax.Array, None]:
            return x + mlp(x, *weights), None

        return jax.lax.scan(layer, x, weights)[0]

    return forward


def _program(kind: Kind, mlp: Mlp) -> Callable[..., Any]:
    mlp = scanned(mlp) if kind.layers else mlp
    return with_gradients(mlp) if kind.gradients else mlp


@jax.custom_vjp
def _saving_two(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    return plain_mlp(x, w_gate, w_up, w_down)


def _saving_two_fwd(x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, Any]:
    w_gate, w_up, w_down = weights
    gate, up = x @ w_gate, x @ w_up
    return (jax.nn.silu(gate) * up) @ w_down, (x, weights, gate, up)


def _saving_two_bwd(saved: Any, dout: jax.Array) -> Arrays:
    x, (w_gate, w_up, w_down), gate, up = saved
    h, activation_grad = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate, up)
    dgate, dup = activation_grad(dout @ w_down.T)
    return dgate @ w_gate.T + dup @ w_up.T, x.T @ dgate, x.T @ dup, h.T @ dout


_saving_two.defvjp(_saving_two_fwd, _saving_two_bwd)


def _tokamax_mlp(x: jax.Array, w_gate_up: jax.Array, w_down: jax.Array) -> jax.Array:
    import tokamax  # pyright: ignore[reportMissingImports]

    return tokamax.gated_linear_unit(x, w_gate_up, activation=jax.nn.swish) @ w_down


@jax.jit
def _packed(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> Arrays:
    """The arguments as tokamax takes them, with gate and up as `[H, 2, I]`."""
    return x, pack(w_gate, w_up, Packing("H 2 I")), w_down


def _has_tokamax() -> bool:
    return importlib.util.find_spec("tokamax") is not None


def _peers(kind: Kind) -> dict[str, Callable[..., Any]]:
    plain = _program(kind, plain_mlp)
    peers = {
        "ours": jax.jit(_program(kind, js.swiglu_mlp)),
        "xla": jax.jit(plain),
        # The same executable once more: how far two measurements of one program are apart.
        "xla_again": jax.jit(plain, compiler_options={}),
        "xla_no_triton": jax.jit(plain, compiler_options=NO_TRITON),
    }
    if kind.gradients and kind.layers:
        saveable = jax.checkpoint_policies.dots_saveable
        peers["xla_dots_saveable"] = jax.jit(
            _program(kind, jax.checkpoint(plain_mlp, policy=saveable))
        )
        peers["pure_jax_vjp"] = jax.jit(_program(kind, _saving_two))
    if not kind.gradients and _has_tokamax():
        peers["tokamax"] = jax.jit(_program(kind, _tokamax_mlp))
    return peers


def _forward_gemms(*args: jax.Array) -> Arrays:
    x, w_gate, w_up, w_down, h = args
    return x @ w_gate, x @ w_up, h @ w_down


def _step_gemms(*args: jax.Array) -> Arrays:
    x, w_gate, w_up, w_down, dout, h, dgate, dup = args
    backward = (dout @ w_down.T, dgate @ w_gate.T, dup @ w_up.T, x.T @ dgate, x.T @ dup, h.T @ dout)
    return (*_forward_gemms(x, w_gate, w_up, w_down, h), *backward)


def _bare_gemms(cell: Cell, args: Arrays) -> functools.partial[Any]:
    """The products of one layer without all that is between them."""
    count = 3 if cell.kind.gradients else 1
    inner = tuple(
        jax.random.normal(key, (cell.m, cell.model.intermediate), args[0].dtype)
        for key in jax.random.split(jax.random.key(1), count)
    )
    return functools.partial(jax.jit(_step_gemms if count > 1 else _forward_gemms), *args, *inner)


def measure(cell: Cell, **timing: Any) -> dict[str, Any]:
    """One entry of the record. `ms`, `temp_bytes` and `first_s` are by peer."""
    kind, model, m = cell
    args = make_data(m, model.hidden, model.intermediate, jnp.bfloat16, layers=kind.layers)
    args = args if kind.gradients else args[:-1]
    jax.block_until_ready(args)

    calls: dict[str, Callable[..., Any]] = {}
    first: dict[str, float] = {}
    temp: dict[str, int] = {}
    failed: dict[str, str] = {}
    ours = None
    difference = math.nan
    for name, peer in _peers(kind).items():
        given = jax.block_until_ready(_packed(*args)) if name == "tokamax" else args
        start = time.perf_counter()
        try:
            compiled = peer.lower(*given).compile()  # pyright: ignore[reportFunctionMemberAccess]
            out = jax.block_until_ready(peer(*given))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or name in COMPARED:
                raise
            failed[name] = str(error)[:200]
            continue
        first[name] = time.perf_counter() - start
        temp[name] = temp_bytes(compiled)
        calls[name] = functools.partial(peer, *given)
        if name == "ours":
            ours = out
        elif name == "xla":
            # What is timed is also right. Each layer amplifies the roundings of those before it.
            difference = float(relative_errors(ours, out).max())
            assert difference < (0.2 if kind.layers else 0.02), difference
            ours = None
    if kind.layers is None:
        calls["bare_gemms"] = _bare_gemms(cell, args)
    if kind == SCAN_STEP:
        recomputing = functools.partial(js.swiglu_mlp, residuals="input")
        compiled = jax.jit(_program(kind, recomputing)).lower(*args).compile()
        temp["ours, input"] = temp_bytes(compiled)
    ms = median_ms(calls, (), **timing)
    return {
        "what": kind.name,
        "model": model.name,
        "hidden": model.hidden,
        "intermediate": model.intermediate,
        "m": m,
        "layers": kind.layers,
        "ms": ms,
        "difference_from_xla": difference,
        "spread": abs(ms["xla_again"] / ms["xla"] - 1),
        "tflop_per_s": cell.flops / ms["ours"] * 1e-9,
        "weight_bytes": 3 * model.hidden * model.intermediate * ITEMSIZE * (kind.layers or 1),
        "first_s": first,
        "temp_bytes": temp,
        "failed": failed,
    }


def read_bandwidth() -> float:
    """Bytes per second of reading 2 GiB."""
    values = jnp.ones((2**14, 2**16), jnp.bfloat16)
    read = functools.partial(jax.jit(lambda a: jnp.max(a, axis=1)), values)
    return values.nbytes / (median_ms({"read": read}, ())["read"] * 1e-3)


def run(cells: list[Cell], end: float, **timing: Any) -> Iterator[tuple[Cell, Any]]:
    """The entry of each cell, or a string that says why there is none."""
    for cell in cells:
        if time.monotonic() >= end:
            yield cell, "no time left"
            continue
        try:
            yield cell, measure(cell, **timing)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            yield cell, str(error)[:200]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--full", action="store_true", help="all models and sizes")
    parser.add_argument("--minutes", type=float, help="begin nothing after this; default 7")
    parser.add_argument("--model", action="append", help="restrict to this model; may be repeated")
    parser.add_argument("--commit", help="what is measured, where the tree is no git checkout")
    args = parser.parse_args()
    cells = full() if args.full else short()
    cells = [c for c in cells if args.model is None or c.model.name in args.model]
    minutes = args.minutes or (math.inf if args.full else 7)
    if jax.default_backend() != "gpu":
        parser.error("needs an NVIDIA GPU")
    end = time.monotonic() + minutes * 60
    entries: list[dict[str, Any]] = []
    not_measured: list[str] = []
    record = {
        "command": " ".join(["python -m benchmarks.matrix", *sys.argv[1:]]),
        "environment": environment(args.commit),
        "tokamax": _has_tokamax(),
        "read_bytes_per_s": read_bandwidth(),
        "first_call": list(first_call.run()),
        "matrix": entries,
        "not_measured": not_measured,
    }
    for cell, entry in run(cells, end, seconds_per_round=0.03):
        if isinstance(entry, str):
            not_measured.append(f"{cell}: {entry}")
            continue
        entries.append(entry)
        ms = {name: round(value, 4) for name, value in entry["ms"].items()}
        print(cell, ms, flush=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    record["plans"] = plans_used()
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
