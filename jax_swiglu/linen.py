"""The SwiGLU-MLP as a Flax Linen module."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_swiglu._api import swiglu_mlp, swiglu_mlp_packed
from jax_swiglu._config import Implementation, Residuals

try:
    from flax import linen as nn
except ModuleNotFoundError as error:
    # A Flax that is there but broken must show its own error.
    if error.name != "flax":
        raise
    raise ImportError(
        "jax_swiglu.linen needs Flax, which is not installed; run: pip install jax_swiglu[flax]"
    ) from error

__all__ = ["SwiGLUMLP"]


class _Kernel(nn.Module):
    """Holds one kernel where ``nn.Dense(use_bias=False)`` of the same name would."""

    features: int
    kernel_init: Callable[..., Any]
    param_dtype: DTypeLike

    @nn.compact
    def __call__(self, n_in: int) -> jax.Array:
        return self.param("kernel", self.kernel_init, (n_in, self.features), self.param_dtype)


class _PackedKernel(nn.Module):
    """Holds one kernel ``[hidden, 2, features]``.

    Each half has the initial values and the metadata that a kernel of its own would have.
    """

    features: int
    kernel_init: Callable[..., Any]
    param_dtype: DTypeLike

    @nn.compact
    def __call__(self, n_in: int) -> jax.Array:
        def init(key: jax.Array) -> Any:
            shape = (n_in, self.features)
            halves = [self.kernel_init(k, shape, self.param_dtype) for k in jax.random.split(key)]
            value = jnp.stack([nn.meta.unbox(half) for half in halves], axis=1)
            box = halves[0]
            if not isinstance(box, nn.meta.AxisMetadata):
                return value
            return box.replace_boxed(value).add_axis(1, {nn.PARTITION_NAME: None})

        return self.param("kernel", init)


class SwiGLUMLP(nn.Module):
    """SwiGLU-MLP layer, a drop-in for three bias-free ``nn.Dense`` layers.

    Computes ``out = (silu(x @ gate) * (x @ up)) @ down`` with
    :func:`jax_swiglu.swiglu_mlp`.

    The parameters are ``gate_proj/kernel`` ``[hidden, intermediate]``,
    ``up_proj/kernel`` ``[hidden, intermediate]`` and ``down_proj/kernel``
    ``[intermediate, out]``, where ``hidden`` is the last dimension of the input.
    Variables, initial values and checkpoints are those of a module that makes
    ``nn.Dense(..., use_bias=False)`` under the same names.

    With ``packed=True`` there are ``gate_up_proj/kernel`` ``[hidden, 2, intermediate]``,
    with gate at index 0, and ``down_proj/kernel``. :mod:`jax_swiglu.convert` turns the
    parameters of one into those of the other, as the formats ``"swiglu_mlp"`` and
    ``"swiglu_mlp_packed"``.

    Attributes:
      intermediate: Size of the gated hidden dimension.
      out: Size of the last dimension of the output; ``None`` means that of the input.
      dtype: Computation and output dtype. ``None`` promotes the input and the kernels
        together, as Flax layers do.
      param_dtype: Dtype of the kernels, and so of their gradients.
      kernel_init: Initializer of the gate and up kernels. Wrap it in
        ``nn.with_partitioning`` or ``nn.with_logical_partitioning`` to attach sharding
        metadata, with the two names of ``[hidden, intermediate]`` also where they are
        packed.
      down_kernel_init: Initializer of the down kernel, whose dimensions are the other
        way round and so are sharded by other names; ``None`` means ``kernel_init``.
      implementation: Passed on to :func:`jax_swiglu.swiglu_mlp`.
      residuals: Passed on to :func:`jax_swiglu.swiglu_mlp`.
      packed: Whether gate and up are one parameter, see above.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax_swiglu.linen import SwiGLUMLP
      >>> mlp = SwiGLUMLP(192, dtype=jnp.bfloat16)
      >>> variables = mlp.init(jax.random.key(0), jnp.ones((1, 64)))
      >>> y = mlp.apply(variables, jnp.ones((2, 5, 64)))
      >>> y.shape, str(y.dtype)
      ((2, 5, 64), 'bfloat16')
      >>> variables["params"]["down_proj"]["kernel"].shape
      (192, 64)
    """

    intermediate: int
    out: int | None = None
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Callable[..., Any] = nn.initializers.lecun_normal()
    down_kernel_init: Callable[..., Any] | None = None
    implementation: Implementation | None = None
    residuals: Residuals = "gate_up"
    packed: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer.

        Args:
          x: Input ``[..., hidden]``, with any number of leading dimensions.

        Returns:
          The output ``[..., out]``, in ``dtype`` or the promotion of the operands.
        """

        def kernel(
            name: str, n_in: int, n_out: int, init: Callable[..., Any], kind: Any = _Kernel
        ) -> jax.Array:
            return kind(n_out, init, self.param_dtype, name=name)(n_in)

        hidden = jnp.shape(x)[-1]
        out = hidden if self.out is None else self.out
        gate_up = (hidden, self.intermediate, self.kernel_init)
        if self.packed:
            w_in = (kernel("gate_up_proj", *gate_up, kind=_PackedKernel),)
        else:
            w_in = (kernel("gate_proj", *gate_up), kernel("up_proj", *gate_up))
        mlp: Callable[..., jax.Array] = swiglu_mlp_packed if self.packed else swiglu_mlp
        return mlp(
            x,
            *w_in,
            kernel("down_proj", self.intermediate, out, self.down_kernel_init or self.kernel_init),
            dtype=self.dtype,
            residuals=self.residuals,
            implementation=self.implementation,
        )
