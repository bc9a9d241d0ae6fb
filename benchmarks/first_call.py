"""How long a first call takes: forward with backward, each time in a fresh process.

"cold" finds no plans and chooses them, "warm" finds them on disk, "shipped" in the package's table;
"xla" is the same program in plain JAX. JAX itself, its device and the data are ready before the
clock starts, and its own compile cache is off.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jax_swiglu as js
from benchmarks.common import LLAMA_8B, Model, make_data, plain_mlp, with_gradients
from jax_swiglu import _ffi

ROWS = 4096
# In no shipped table, so that "cold" is.
UNKNOWN = Model("unknown to the tables", 4608, 12800)
_MEASURE = "import benchmarks.first_call as f; f.measure({hidden}, {intermediate}, {ours})"


def measure(hidden: int, intermediate: int, ours: bool) -> None:
    """Prints the seconds of the first two calls in this process, and where plans came from."""
    args = jax.block_until_ready(make_data(ROWS, hidden, intermediate, jnp.bfloat16))
    step = jax.jit(with_gradients(js.swiglu_mlp if ours else plain_mlp))
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready(step(*args))
        seconds.append(time.perf_counter() - start)
    sources = sorted({plan["source"] for plan in _ffi.prepared()})
    print(json.dumps({"first_s": seconds[0], "second_s": seconds[1], "plans_from": sources}))


def _run(model: Model, ours: bool, folder: str) -> dict[str, Any]:
    sizes = {"hidden": model.hidden, "intermediate": model.intermediate}
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE.format(**sizes, ours=ours)],
        stdout=subprocess.PIPE,
        check=True,
        # The process that calls may hold the GPU's memory.
        env={
            **os.environ,
            "JAX_SWIGLU_CACHE_DIR": folder,
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        },
    )
    return {"m": ROWS, **sizes, **json.loads(done.stdout.splitlines()[-1])}


def run() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        yield {"what": "xla", **_run(UNKNOWN, False, folder)}
        yield {"what": "cold", **_run(UNKNOWN, True, folder)}
        for _ in range(2):
            yield {"what": "warm", **_run(UNKNOWN, True, folder)}
        yield {"what": "xla", **_run(UNKNOWN, False, folder)}
    yield {"what": "shipped", **_run(LLAMA_8B, True, "")}
