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

def workspace_bytes(
    op: str,
    batch: int,
    m: int,
    n: int,
    itemsize: int,
    out_itemsize: int,
    lhs_transposed: bool,
    extra: bool,
    packing: str,
) -> int:
    """Size of the workspace result of a call on operands of `itemsize` bytes."""

def routes(op: str, extra: bool, packing: str = "") -> list[str]:
    """Names of the routes of an op."""

def misaligned(op: str, m: int, k: int, n: int, packing: str) -> list[str]:
    """Names of the bfloat16 tensors that plans may not take for aligned even in aligned buffers."""

def pick_fastest(
    candidates: int,
    timer: Callable[[int, int], float],
    budget_seconds: float,
    clock: Callable[[], float],
) -> tuple[int, float]:
    """The tuner: (candidate, seconds) of the fastest; timer(candidate, repeats) gives seconds."""

def tune_op(
    proposals: Sequence[int],
    routes: Sequence[Sequence[int]],
    build: Callable[[list[tuple[int, int]], float], list[bool]],
    time_plan: Callable[[tuple[int, int], int], float],
    time_route: Callable[[int, list[int], int], float],
    budget_seconds: float,
    clock: Callable[[], float],
) -> tuple[int, list[int], float]:
    """(route, plan of each graph, seconds): the choice for an op within a budget."""

PLAN_SCHEMA: int

def set_plan_folders(folder: str, shipped: str) -> None:
    """Where chosen plans are kept, and where tables of them are; "" for none."""

def find_plans(gpu: str, compute_capability: str, cudnn: int, key: str) -> list[dict[str, Any]]:
    """The choices known for a problem, the preferred one first."""

def put_plan(
    gpu: str,
    compute_capability: str,
    cudnn: int,
    key: str,
    route: str,
    engines: Sequence[str],
    seconds: float,
) -> None:
    """Keeps a choice."""

def parse_engine(name: str) -> tuple[int, list[tuple[int, int]]]:
    """(engine, [(knob type, value)]) of cuDNN's name of a plan."""

def prepared() -> list[dict[str, Any]]:
    """Routes and plans chosen so far in this process."""
