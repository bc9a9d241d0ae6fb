"""The public functions."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_swiglu import _vjp
from jax_swiglu._config import (
    CUDNN_DTYPES,
    HOST_DTYPES,
    IMPLEMENTATIONS,
    RESIDUAL_NAMES,
    RESIDUALS,
    WEIGHT_LAYOUTS,
    Config,
    Implementation,
    PackedAxes,
    Residuals,
    WeightLayout,
)
from jax_swiglu._packing import Packing, check_packing
from jax_swiglu._partitioning import explicit_sharding
from jax_swiglu._shapes import (
    check_choice,
    check_operands,
    check_packed_operands,
    computation_dtype,
)


def configure(
    operands: dict[str, jax.Array],
    weight_layout: WeightLayout,
    dtype: DTypeLike | None,
    residuals: Residuals,
    implementation: Implementation | None,
    residual_names: Sequence[str] = RESIDUAL_NAMES,
    packing: Packing | None = None,
) -> Config:
    """Checks all arguments of a call and gathers what is static about it."""
    check_choice("weight_layout", weight_layout, WEIGHT_LAYOUTS)
    check_choice("residuals", residuals, RESIDUALS)
    check_choice("implementation", implementation, (None, *IMPLEMENTATIONS))
    if isinstance(residual_names, str) or [type(name) for name in residual_names] != [str] * 3:
        raise ValueError(
            f"residual_names must be three names, of gate, up and h; got {residual_names!r}"
        )
    if packing is None:
        check_operands(weight_layout, operands)
    else:
        check_packed_operands(packing, weight_layout, operands)
    compute = computation_dtype(dtype, list(operands.values()))
    for name, dtypes in (("cudnn", CUDNN_DTYPES), ("host", HOST_DTYPES)):
        if implementation == name and compute not in dtypes:
            raise NotImplementedError(
                f"implementation={name!r} computes in {', '.join(map(str, dtypes))}; "
                f"got {compute}. "
                'Pass dtype="bfloat16", or implementation=None to let XLA run it'
            )
    settings: Any = jax.config  # its attributes are made at run time
    opened: Any = " ".join(packing.letters) if packing else ""
    return Config(
        dtype=compute,
        weight_layout=weight_layout,
        residuals=residuals,
        implementation=None if implementation == "xla" else implementation,
        precision=settings.jax_default_matmul_precision,
        residual_names=(residual_names[0], residual_names[1], residual_names[2]),
        packing=opened,
        up_first=packing is not None and packing.up_first,
    )


def _arrays(**operands: ArrayLike) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value) for name, value in operands.items()}


def _varying_axes(x: jax.Array) -> frozenset[str]:
    """The manual mesh axes that x varies over inside `shard_map`."""
    aval: Any = jax.typeof(x)
    return aval.vma if hasattr(aval, "vma") else aval.mat.varying  # JAX 0.9, 0.10; since 0.11


def _vary_alike(operands: Iterable[jax.Array]) -> list[jax.Array]:
    """Makes all operands vary over the same manual mesh axes.

    The gradient of an operand that did not vary is thereby summed over the axes that it lacked, and
    only once.
    """
    operands = list(operands)
    axes = frozenset[str]().union(*map(_varying_axes, operands))
    missing = [tuple(axes - _varying_axes(a)) for a in operands]
    return [
        jax.lax.pcast(a, names, to="varying") if names else a
        for a, names in zip(operands, missing, strict=True)
    ]


def swiglu_mlp(
    x: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    w_down: ArrayLike,
    *,
    weight_layout: WeightLayout = "in_out",
    dtype: DTypeLike | None = None,
    residuals: Residuals = "gate_up",
    residual_names: Sequence[str] = RESIDUAL_NAMES,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The SwiGLU-MLP of LLaMA-style language models.

        out = (silu(x @ w_gate) * (x @ w_up)) @ w_down,    silu(a) = a / (1 + exp(-a))

    GEMMs accumulate in float32. gate = x @ w_gate and up = x @ w_up are rounded to the computation
    dtype before the activation, which is computed in float32; h and out are rounded once.

    Works under `jax.jit`, `grad`, `vmap`, `scan` and `remat`. Gradients of operands that nobody
    differentiates are neither computed nor saved for. Forward-mode differentiation needs
    `implementation="xla"`.

    Args:
      x: `[..., H]`, any number of leading dimensions, zero-size allowed.
      w_gate: `[H, I]`, or `[I, H]` with `weight_layout="out_in"`.
      w_up: as w_gate.
      w_down: `[I, O]`, or `[O, I]` with `weight_layout="out_in"`. O may differ from H.
      weight_layout: "in_out" for weights stored as Flax kernels are, "out_in" for weights stored as
        PyTorch's `nn.Linear` does. Neither costs a transposed copy.
      dtype: computation dtype, and dtype of the result. None: JAX's promotion of all operands.
        bfloat16 and float16 run on cuDNN, float32 and float64 on XLA with the caller's matmul
        precision. Each gradient has the dtype of its operand: with float32 weights and
        `dtype=bfloat16` the weight gradients come from the float32 accumulators of their GEMMs.
      residuals: what the forward pass keeps for the backward pass beside its inputs. "gate_up":
        gate and up, 2·M·I elements. "full": also h. "input": nothing; gate and up are recomputed.
      residual_names: what gate, up and h are called in policies of `jax.checkpoint`, such as
        `jax.checkpoint_policies.save_only_these_names("swiglu_gate", "swiglu_up")`.
      implementation: None: cuDNN on CUDA where it applies, else XLA. "cudnn": cuDNN or an error.
        "xla": plain JAX, differentiated by JAX, so that all gradients pass through the computation
        dtype. "host": the custom calls of "cudnn", evaluated by plain C++ on the CPU; slow, for
        tests and debugging.

    Returns:
      `[..., O]` in the computation dtype.

    Raises:
      ValueError: a shape or an option does not fit.
      TypeError: an operand or `dtype` is not floating-point.
      NotImplementedError: the implementation asked for cannot run this here.

    Example:
      >>> import jax, jax.numpy as jnp, jax_swiglu as js
      >>> x = jnp.ones((2, 3, 8), jnp.bfloat16)
      >>> w_in, w_out = jnp.ones((8, 16), jnp.bfloat16), jnp.ones((16, 8), jnp.bfloat16)
      >>> js.swiglu_mlp(x, w_in, w_in, w_out).shape
      (2, 3, 8)

    Source: Noam Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202 (SwiGLU).
    """
    operands = _arrays(x=x, w_gate=w_gate, w_up=w_up, w_down=w_down)
    config = configure(operands, weight_layout, dtype, residuals, implementation, residual_names)
    function = _vjp.swiglu_mlp_xla if implementation == "xla" else _vjp.swiglu_mlp
    return function(config, *_vary_alike(operands.values()))


def _open(w_gate_up: jax.Array, packing: Packing) -> jax.Array:
    """Gives gate and up a dimension of their own."""
    shape = packing.split(w_gate_up.shape)
    sharding = explicit_sharding(w_gate_up)
    if len(shape) == w_gate_up.ndim or sharding is None:
        return w_gate_up.reshape(shape)
    # JAX would refuse to split 2 over more devices; I can be.
    spec = list(sharding.spec)
    spec.insert(packing.letters.index("2"), None)
    return jax.lax.reshape(w_gate_up, shape, out_sharding=sharding.update(spec=tuple(spec)))


def swiglu_mlp_packed(
    x: ArrayLike,
    w_gate_up: ArrayLike,
    w_down: ArrayLike,
    *,
    packing: PackedAxes | Packing = "H 2 I",
    weight_layout: WeightLayout = "in_out",
    dtype: DTypeLike | None = None,
    residuals: Residuals = "gate_up",
    residual_names: Sequence[str] = RESIDUAL_NAMES,
    implementation: Implementation | None = None,
) -> jax.Array:
    """`swiglu_mlp` with one parameter that holds w_gate and w_up.

        out = (silu(x @ w_gate) * (x @ w_up)) @ w_down

    gate and up are views of the one array, which is neither sliced nor copied, and its gradient is
    one array too. The gradient of x is one GEMM over both, and that of w_gate_up another; in the
    packing "2 H I", which no single stride leads through, each is two.

    Args:
      x: `[..., H]`, any number of leading dimensions, zero-size allowed.
      w_gate_up: w_gate and w_up in the shape that `packing` says.
      w_down: `[I, O]`, or `[O, I]` with `weight_layout="out_in"`. O may differ from H.
      packing: the dimensions of w_gate_up, outermost first; `2` selects gate or up. "H 2 I": gate
        is `w_gate_up[:, 0, :]`. "2 H I", "2 I H": gate is `w_gate_up[0]`. Parentheses join two
        dimensions: "H (2 I)" and "(2 I) H" have all of gate before all of up. Never guessed from
        the shape. A `jax_swiglu.convert.Packing` can also say that up comes first.
      weight_layout: of w_down alone, see `swiglu_mlp`.
      dtype: see `swiglu_mlp`.
      residuals: see `swiglu_mlp`.
      residual_names: see `swiglu_mlp`; gate and up are one array here, which has the first name.
      implementation: see `swiglu_mlp`.

    Returns:
      `[..., O]` in the computation dtype.

    Raises:
      ValueError: a shape or an option does not fit, or gate and up alternate ("(I 2)").
      TypeError: an operand or `dtype` is not floating-point.
      NotImplementedError: the implementation asked for cannot run this here.

    Example:
      >>> import jax.numpy as jnp, jax_swiglu as js
      >>> x, w_gate_up, w_down = jnp.ones((4, 8)), jnp.ones((2 * 16, 8)), jnp.ones((8, 16))
      >>> y = js.swiglu_mlp_packed(  # as Phi-3 stores them
      ...     x, w_gate_up, w_down, packing="(2 I) H", weight_layout="out_in"
      ... )
      >>> y.shape
      (4, 8)
    """
    packing = check_packing(packing)
    operands = _arrays(x=x, w_gate_up=w_gate_up, w_down=w_down)
    config = configure(
        operands, weight_layout, dtype, residuals, implementation, residual_names, packing
    )
    operands["w_gate_up"] = _open(operands["w_gate_up"], packing)
    function = _vjp.swiglu_mlp_xla if implementation == "xla" else _vjp.swiglu_mlp
    return function(config, *_vary_alike(operands.values()))


def swiglu(
    x: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    *,
    weight_layout: WeightLayout = "in_out",
    dtype: DTypeLike | None = None,
    residuals: Residuals = "gate_up",
    residual_names: Sequence[str] = RESIDUAL_NAMES,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The gated half of the SwiGLU-MLP.

        h = silu(x @ w_gate) * (x @ w_up)

    Arguments, errors and numerics are those of `swiglu_mlp`; "full" residuals are the same as
    "gate_up" here.

    Args:
      x: `[..., H]`.
      w_gate: `[H, I]`, or `[I, H]` with `weight_layout="out_in"`.
      w_up: as w_gate.
      weight_layout: see `swiglu_mlp`.
      dtype: see `swiglu_mlp`.
      residuals: see `swiglu_mlp`.
      residual_names: see `swiglu_mlp`.
      implementation: see `swiglu_mlp`.

    Returns:
      `[..., I]` in the computation dtype.

    Example:
      >>> import jax.numpy as jnp, jax_swiglu as js
      >>> js.swiglu(jnp.ones((4, 8)), jnp.ones((8, 16)), jnp.ones((8, 16))).shape
      (4, 16)
    """
    operands = _arrays(x=x, w_gate=w_gate, w_up=w_up)
    config = configure(operands, weight_layout, dtype, residuals, implementation, residual_names)
    function = _vjp.swiglu_xla if implementation == "xla" else _vjp.swiglu
    return function(config, *_vary_alike(operands.values()))
