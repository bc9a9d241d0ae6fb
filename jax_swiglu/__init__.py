"""SwiGLU-MLP as one JAX operation on NVIDIA GPUs, run by cuDNN.

    out = (silu(x @ w_gate) * (x @ w_up)) @ w_down

See `swiglu_mlp`. The Flax layers are `jax_swiglu.nnx.SwiGLUMLP` and `jax_swiglu.linen.SwiGLUMLP`.
"""

from jax_swiglu import _load
from jax_swiglu._api import swiglu, swiglu_mlp
from jax_swiglu._explain import Explanation, Stage, explain

__version__ = "0.1.0"

__all__ = ["Explanation", "Stage", "explain", "swiglu", "swiglu_mlp"]

# At import, so that programs that were compiled or exported elsewhere find their targets.
_load.register()
