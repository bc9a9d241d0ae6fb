"""The SwiGLU-MLP as a Flax NNX module."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_swiglu._api import swiglu_mlp, swiglu_mlp_packed
from jax_swiglu._config import Implementation, Residuals

try:
    from flax import nnx
except ModuleNotFoundError as error:
    # A Flax that is there but broken must show its own error.
    if error.name != "flax":
        raise
    raise ImportError(
        "jax_swiglu.nnx needs Flax, which is not installed; run: pip install jax_swiglu[flax]"
    ) from error

__all__ = ["SwiGLUMLP"]

_default_init = nnx.initializers.lecun_normal()


class _PackedKernel(nnx.Module):
    """Holds a kernel ``[hidden, 2, intermediate]`` where ``nnx.Linear`` would hold its own.

    Each half has the initial values and the metadata that a kernel of its own would have.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        param_dtype: DTypeLike,
        kernel_init: Callable[..., Any],
        rngs: nnx.Rngs,
    ):
        shape = (hidden, intermediate)
        gate, up = (kernel_init(rngs.params(), shape, param_dtype) for _ in range(2))
        if isinstance(gate, nnx.VariableMetadata):
            metadata = dict(gate.metadata)
            for name in ("out_sharding", "sharding"):  # the latter before Flax 0.12
                if metadata.get(name):
                    first, second = metadata[name]
                    metadata[name] = (first, None, second)
            value = jnp.stack([gate.raw_value, up.raw_value], axis=1)
            gate_up = dataclasses.replace(gate, raw_value=value, metadata=metadata)
        else:
            gate_up = jnp.stack([gate, up], axis=1)
        self.kernel = nnx.Param(gate_up)


class SwiGLUMLP(nnx.Module):
    """SwiGLU-MLP layer, a drop-in for three bias-free ``nnx.Linear`` layers.

    Computes ``out = (silu(x @ gate) * (x @ up)) @ down`` with
    :func:`jax_swiglu.swiglu_mlp`.

    The parameters are ``gate_proj.kernel`` ``[hidden, intermediate]``,
    ``up_proj.kernel`` ``[hidden, intermediate]`` and ``down_proj.kernel``
    ``[intermediate, out]``, and they are initialised in this order, so the state
    tree, the random streams and the checkpoints are those of a module that holds
    ``nnx.Linear(..., use_bias=False)`` under the same names. The three submodules only
    hold the kernels: the layer never calls them, so replacing one by a module that
    computes something else (an adapter, say) has no effect on the result.

    With ``packed=True`` there are ``gate_up_proj.kernel`` ``[hidden, 2, intermediate]``,
    with gate at index 0, and ``down_proj.kernel``, with the same initial values.
    :mod:`jax_swiglu.convert` turns the parameters of one into those of the other, as the
    formats ``"swiglu_mlp"`` and ``"swiglu_mlp_packed"``.

    Args:
      hidden: Size of the last dimension of the input.
      intermediate: Size of the gated hidden dimension.
      out: Size of the last dimension of the output; ``None`` means ``hidden``.
      dtype: Computation and output dtype. ``None`` promotes the input and the kernels
        together, as Flax layers do.
      param_dtype: Dtype of the kernels, and so of their gradients.
      kernel_init: Initializer of the gate and up kernels. Wrap it in
        ``nnx.with_partitioning`` to attach sharding metadata, with the two names of
        ``[hidden, intermediate]`` also where they are packed. Flax then splits each
        kernel over the mesh of the context (``jax.set_mesh``), which must be there;
        docs/training.md says how to never make a whole kernel.
      down_kernel_init: Initializer of the down kernel, whose dimensions are the other
        way round and so are sharded by other names; ``None`` means ``kernel_init``.
      implementation: Passed on to :func:`jax_swiglu.swiglu_mlp`.
      residuals: Passed on to :func:`jax_swiglu.swiglu_mlp`.
      packed: Whether gate and up are one parameter, see above.
      rngs: Random streams; ``params`` is drawn from once per kernel.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_swiglu.nnx import SwiGLUMLP
      >>> mlp = SwiGLUMLP(64, 192, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
      >>> y = mlp(jnp.ones((2, 5, 64)))
      >>> y.shape, str(y.dtype)
      ((2, 5, 64), 'bfloat16')
      >>> mlp.down_proj.kernel.shape
      (192, 64)
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        out: int | None = None,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable[..., Any] = _default_init,
        down_kernel_init: Callable[..., Any] | None = None,
        implementation: Implementation | None = None,
        residuals: Residuals = "gate_up",
        packed: bool = False,
        rngs: nnx.Rngs,
    ):
        def linear(n_in: int, n_out: int, init: Callable[..., Any]) -> nnx.Linear:
            return nnx.Linear(
                n_in,
                n_out,
                use_bias=False,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=init,
                rngs=rngs,
            )

        self.hidden = hidden
        self.intermediate = intermediate
        self.out = hidden if out is None else out
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.implementation: Implementation | None = implementation
        self.residuals: Residuals = residuals
        self.packed = packed
        if packed:
            self.gate_up_proj = _PackedKernel(hidden, intermediate, param_dtype, kernel_init, rngs)
        else:
            self.gate_proj = linear(hidden, intermediate, kernel_init)
            self.up_proj = linear(hidden, intermediate, kernel_init)
        self.down_proj = linear(intermediate, self.out, down_kernel_init or kernel_init)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer.

        Args:
          x: Input ``[..., hidden]``, with any number of leading dimensions.

        Returns:
          The output ``[..., out]``, in ``dtype`` or the promotion of the operands.

        Raises:
          ValueError: The last dimension of ``x`` is not ``hidden``.
        """
        held = (self.gate_up_proj,) if self.packed else (self.gate_proj, self.up_proj)
        mlp: Callable[..., jax.Array] = swiglu_mlp_packed if self.packed else swiglu_mlp
        return mlp(
            x,
            *(linear.kernel[...] for linear in (*held, self.down_proj)),
            dtype=self.dtype,
            residuals=self.residuals,
            implementation=self.implementation,
        )
