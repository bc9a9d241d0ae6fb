"""Says which implementation runs each stage of a call, and why."""

import dataclasses
from typing import Any

import jax
from jax.typing import DTypeLike

from jax_swiglu import _ffi
from jax_swiglu._api import configure
from jax_swiglu._config import Implementation, Residuals, WeightLayout
from jax_swiglu._primitives import cudnn_obstacle


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of the computation, and what runs it."""

    name: str
    formula: str
    implementation: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` returns: `str()` gives words, the fields give data.

    `plans` lists the routes and cuDNN engines chosen so far in this process, for all calls, and
    where each choice came from: "tuned" here and now, "memory" (tuned for another GPU of this
    process), "disk", "shipped", or the "heuristics" of cuDNN.
    """

    platform: str
    dtype: str
    stages: tuple[Stage, ...]
    plans: tuple[dict[str, Any], ...]

    def summary(self) -> str:
        """One line."""
        stage = self.stages[0]
        return f"{self.dtype} on {self.platform}: {stage.implementation} ({stage.reason})"

    def __str__(self) -> str:
        lines = [f"swiglu_mlp on {self.platform}, computing in {self.dtype}:"]
        for stage in self.stages:
            lines.append(
                f"  {stage.name:8}  {stage.formula:44}  {stage.implementation}: {stage.reason}"
            )
        lines += [f"  plan: {format_plan(plan)}" for plan in self.plans]
        return "\n".join(lines)


def format_plan(plan: dict[str, Any]) -> str:
    """One line for one entry of `_ffi.prepared()`."""
    source = plan["source"]
    tuned = f"{plan['seconds'] * 1e6:.1f} us ({source})"
    kernels = len(plan["engines"])
    return (
        f"{plan['problem']}: route {plan['route']}, {kernels} "
        f"launch{'es' if kernels > 1 else ''} [{', '.join(plan['engines'])}], "
        f"{'not tuned' if source == 'heuristics' else tuned}"
    )


_STAGES = (
    ("glu_fwd", "silu(x @ w_gate) * (x @ w_up)"),
    ("down", "h @ w_down"),
    ("glu_bwd", "dgate, dup from dout @ w_down^T, gate, up"),
    ("grads", "dx, dw_gate, dw_up, dw_down"),
)


def explain(
    x: Any,
    w_gate: Any,
    w_up: Any,
    w_down: Any,
    *,
    weight_layout: WeightLayout = "in_out",
    dtype: DTypeLike | None = None,
    residuals: Residuals = "gate_up",
    implementation: Implementation | None = None,
) -> Explanation:
    """Explains what `swiglu_mlp` with these arguments would run on the default device.

    Args:
      x: an array or a `jax.ShapeDtypeStruct`, as for `swiglu_mlp`; so are w_gate, w_up and w_down.
      w_gate: see `swiglu_mlp`.
      w_up: see `swiglu_mlp`.
      w_down: see `swiglu_mlp`.
      weight_layout: see `swiglu_mlp`.
      dtype: see `swiglu_mlp`.
      residuals: see `swiglu_mlp`.
      implementation: see `swiglu_mlp`.

    Returns:
      An `Explanation`.

    Raises:
      The errors of `swiglu_mlp` for the same arguments.

    Example:
      >>> import jax.numpy as jnp, jax_swiglu as js
      >>> w = jnp.ones((8, 8))
      >>> js.explain(w, w, w, w).stages[0].implementation
      'xla'
    """
    operands = {"x": x, "w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    config = configure(operands, weight_layout, dtype, residuals, implementation)
    platform = jax.default_backend()
    runs, reason = _decide(platform, config.dtype, implementation)
    if any(0 in value.shape for value in operands.values()):
        runs, reason = "xla", "a size is zero"
    return Explanation(
        platform=platform,
        dtype=str(config.dtype),
        stages=tuple(Stage(name, formula, runs, reason) for name, formula in _STAGES),
        plans=tuple(_ffi.prepared()),
    )


def _decide(platform: str, dtype: Any, implementation: Implementation | None) -> tuple[str, str]:
    if implementation in ("xla", "host"):
        return implementation, "asked for"
    if platform != "gpu":
        reason = f"the default device is a {platform}, not an NVIDIA GPU"
        return ("unavailable" if implementation == "cudnn" else "xla"), reason
    obstacle = cudnn_obstacle(dtype)
    if obstacle is None:
        return "cudnn", "an NVIDIA GPU, cuDNN and a 16-bit dtype"
    return ("unavailable" if implementation == "cudnn" else "xla"), obstacle
