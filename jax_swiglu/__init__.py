"""SwiGLU-MLP as one JAX operation on NVIDIA GPUs, run by cuDNN.

    out = (silu(x @ w_gate) * (x @ w_up)) @ w_down

See `swiglu_mlp`. The Flax layers are `jax_swiglu.nnx.SwiGLUMLP` and `jax_swiglu.linen.SwiGLUMLP`;
`jax_swiglu.convert` loads and saves weights as checkpoints hold them.
"""

import importlib
from types import ModuleType

from jax_swiglu import _load
from jax_swiglu import convert as convert
from jax_swiglu._api import swiglu, swiglu_mlp, swiglu_mlp_packed
from jax_swiglu._config import RESIDUAL_NAMES
from jax_swiglu._explain import Explanation, Stage, explain, explain_packed
from jax_swiglu._load import CUSTOM_CALLS

__version__ = "0.1.0"

__all__ = [
    "CUSTOM_CALLS",
    "RESIDUAL_NAMES",
    "Explanation",
    "Stage",
    "explain",
    "explain_packed",
    "swiglu",
    "swiglu_mlp",
    "swiglu_mlp_packed",
]


def __getattr__(name: str) -> ModuleType:
    """Imports the Flax layers when they are asked for: Flax is optional."""
    if name in ("linen", "nnx"):
        return importlib.import_module(f"jax_swiglu.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# At import, so that programs that were compiled or exported elsewhere find their targets.
_load.register()
