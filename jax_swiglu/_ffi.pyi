"""XLA FFI handlers of jax_swiglu, and what they report about themselves."""

from collections.abc import Callable, Sequence
from typing import Any

def registrations() -> dict[str, dict[str, Any]]:
    """Handlers by custom call name and platform."""

def call_site_type() -> Any:
    """The state type, for jax.ffi.register_ffi_type."""

def set_cudnn_candidates(candidates: Sequence[str]) -> None:
    """Paths or sonames under which to look for libcudnn."""

def load_cudnn() -> int:
    """Loads libcudnn; returns its version, e.g. 91900."""

def workspace_bytes(op: str, batch: int, m: int, n: int, itemsize: int, extra: bool) -> int:
    """Size of the workspace result of a call on operands of `itemsize` bytes."""

def routes(op: str, extra: bool) -> list[str]:
    """Names of the routes of an op."""

def pick_fastest(
    candidates: int, timer: Callable[[int, int], float], budget_seconds: float
) -> tuple[int, float]:
    """The tuner: (candidate, seconds) of the fastest; timer(candidate, repeats) gives seconds."""

def prepared() -> list[dict[str, Any]]:
    """Routes and plans chosen so far in this process."""
