"""Settings of all tests, and what several test files share."""

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Eight CPU devices, so that shardings have something to shard over. Must be set before JAX starts.
if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )

# Tests neither read nor leave plans in the user's cache.
os.environ["JAX_SWIGLU_CACHE_DIR"] = ""

# Tests share code with the benchmarks. Last, so that an installed package is what is tested.
sys.path.append(str(Path(__file__).parents[1]))

import jax
import pytest

GPU_TESTS = Path(__file__).parent / "gpu"
# Flax and Optax promote dtypes themselves.
PROMOTING = {
    "test_flax.py",
    "test_flax_packed.py",
    "test_flax_sharding.py",
    "test_train_lm.py",
    "test_train_sharded.py",
}


@pytest.fixture(autouse=True)
def on_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs the tests outside gpu/ on the CPU, also where there is a GPU: "host" needs it."""
    if GPU_TESTS in request.path.parents:
        yield
    else:
        with jax.default_device(jax.devices("cpu")[0]):
            yield


@pytest.fixture(autouse=True)
def strict_promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes an unintended promotion in the package an error."""
    strict = request.path.name not in PROMOTING
    with jax.numpy_dtype_promotion("strict" if strict else "standard"):
        yield


@pytest.fixture
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture
def custom_calls() -> Callable[..., list[str]]:
    """Names of the custom calls of ours in the program of `function(*args)`, sorted."""

    def names(function: Callable, *args: object, platform: str = "cuda") -> list[str]:
        lowered = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,))
        return sorted(re.findall(r"custom_call @jax_swiglu_(\w+)", lowered.as_text()))

    return names


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess]:
    """Runs Python in a fresh process that finds what this one does; warnings are errors there."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "JAX_PLATFORMS": "cpu",
    }
    return functools.partial(
        subprocess.run,
        executable=sys.executable,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
