"""Finds libcudnn and registers the FFI handlers with JAX."""

import dataclasses
import functools
import importlib.util
import os
from pathlib import Path

import jax

from jax_swiglu import _ffi, _plans

CUSTOM_CALLS = tuple(_ffi.registrations())
"""The names of the custom calls, for `jax.export.DisabledSafetyCheck.custom_call`.

They and their attributes may change with the version of this package: a program that was exported
with one version runs with that version.
"""

# The fused GEMM graphs need tensor cores with bfloat16.
MIN_COMPUTE_CAPABILITY = (8, 0)

_SONAME = "libcudnn.so.9"


def register() -> None:
    """Registers all handlers; needs neither a GPU nor cuDNN."""
    _ffi.set_cudnn_candidates(cudnn_candidates())
    _ffi.set_plan_folders(os.fspath(_plans.cache_folder() or ""), os.fspath(_plans.SHIPPED))
    jax.ffi.register_ffi_type("jax_swiglu_call_site", _ffi.call_site_type(), platform="CUDA")
    for name, platforms in _ffi.registrations().items():
        for platform, handlers in platforms.items():
            jax.ffi.register_ffi_target(name, handlers, platform=platform)


def cudnn_candidates() -> list[str]:
    """Where libcudnn may lie: in NVIDIA's wheels, else wherever the loader finds it."""
    try:
        spec = importlib.util.find_spec("nvidia.cudnn")
    except ModuleNotFoundError:
        spec = None
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [Path(folder) / "lib" / _SONAME for folder in folders]
    return [*(os.fspath(file) for file in files if file.exists()), _SONAME]


@dataclasses.dataclass(frozen=True)
class CudnnStatus:
    """Whether cuDNN can run on the GPUs of this process.

    `usable` is None where the process has no NVIDIA GPU: programs can still be lowered for one.
    """

    usable: bool | None
    reason: str
    version: int = 0


@functools.cache
def cudnn_status() -> CudnnStatus:
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return CudnnStatus(
            None,
            "this process has no NVIDIA GPU; JAX runs on CUDA only with its CUDA plugin "
            '(pip install "jax[cuda13]")',
        )
    for device in devices:
        capability = tuple(int(part) for part in device.compute_capability.split("."))
        if capability < MIN_COMPUTE_CAPABILITY:
            return CudnnStatus(
                False,
                f"{device.device_kind} has compute capability {device.compute_capability}; "
                f"{'.'.join(map(str, MIN_COMPUTE_CAPABILITY))} or newer is needed",
            )
    try:
        version = _ffi.load_cudnn()
    except RuntimeError as error:
        return CudnnStatus(
            False,
            f"libcudnn could not be loaded: {error}. Install it with "
            'pip install "jax[cuda13]" (or "jax[cuda12]")',
        )
    return CudnnStatus(True, f"cuDNN {format_version(version)}", version)


def format_version(version: int) -> str:
    """9.19.0 for 91900."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
