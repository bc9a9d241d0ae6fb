"""Programs that many tests run."""

from collections.abc import Callable
from typing import Any

import jax


def with_grads(function: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    """(out, *grads) of function(*args[:-1]) for the cotangent args[-1]."""
    out, pullback = jax.vjp(function, *args[:-1])
    return (out, *pullback(args[-1]))
