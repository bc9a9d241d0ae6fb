"""GPU tests. Skipped where there is no GPU; JAX_SWIGLU_REQUIRE_GPU=1 turns that into failures."""

import os
from pathlib import Path

import jax
import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = jax.default_backend() != "gpu" and os.environ.get("JAX_SWIGLU_REQUIRE_GPU") != "1"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if absent:
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))


@pytest.fixture(autouse=True)
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the first plan of each route: tuning every small shape would take minutes."""
    monkeypatch.setenv("JAX_SWIGLU_TUNING", "0")
