"""Chosen plans outside of a process: where they are kept, and what is there.

The files are read and written for use in ffi/plan_cache.cc, whose header describes them.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_swiglu import _ffi

# Tables that come with the package.
SHIPPED = Path(__file__).parent / "plans"


def cache_folder() -> Path | None:
    """The folder of plans that were tuned on this machine; None where they are not kept."""
    folder = os.environ.get("JAX_SWIGLU_CACHE_DIR")
    if folder == "":
        return None
    try:
        if folder is None:
            folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jax_swiglu"
        return Path(folder).expanduser().absolute() / f"v{_ffi.PLAN_SCHEMA}"
    except RuntimeError:  # there is no home
        return None


def read(path: Path) -> dict[str, Any] | None:
    """A file of plans; None where it is none, is damaged or has another schema."""
    try:
        table = json.loads(path.read_text())
        names = ("gpu", "compute_capability", "cudnn")
        plans = {
            problem: {name: plan[name] for name in ("route", "engines", "seconds")}
            for problem, plan in table["plans"].items()
        }
        same = table["schema"] == _ffi.PLAN_SCHEMA
        return {**{name: table[name] for name in names}, "plans": plans} if same else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def tables() -> Iterator[tuple[str, dict[str, Any]]]:
    """("disk" or "shipped", contents) of every file that can be read."""
    folder = cache_folder()
    for source, paths in (
        ("disk", sorted(folder.glob("*/*.json")) if folder else []),
        ("shipped", sorted(SHIPPED.glob("*.json"))),
    ):
        for path in paths:
            table = read(path)
            if table is not None:
                yield source, table


def clear() -> int:
    """Removes all files of the cache folder; returns how many there were."""
    folder = cache_folder()
    removed = 0
    for path in folder.glob("*/*.json*") if folder else ():  # with those that were being written
        path.unlink(missing_ok=True)
        removed += 1
    return removed
