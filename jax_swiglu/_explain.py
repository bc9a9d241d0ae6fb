"""Says which implementation runs each stage of a call, and why."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from jax_swiglu import _ffi, _load, _vjp
from jax_swiglu._api import configure
from jax_swiglu._config import Config, Implementation, PackedAxes, Residuals, WeightLayout
from jax_swiglu._division import divide
from jax_swiglu._packing import Packing, check_packing
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
    function: str = "swiglu_mlp"

    def summary(self) -> str:
        """One line."""
        by_runner: dict[str, list[Stage]] = {}
        for stage in self.stages:
            by_runner.setdefault(stage.implementation, []).append(stage)
        if len(by_runner) == 1:
            stage = self.stages[0]
            what = f"{stage.implementation} ({stage.reason})"
        else:
            what = "; ".join(
                f"{runner} ({', '.join(stage.name for stage in stages)})"
                for runner, stages in by_runner.items()
            )
        return f"{self.dtype} on {self.platform}: {what}"

    def __str__(self) -> str:
        lines = [f"{self.function} on {self.platform}, computing in {self.dtype}:"]
        for stage in self.stages:
            lines.append(
                f"  {stage.name:15}  {stage.formula:44}  {stage.implementation}: {stage.reason}"
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


# Formulas of the stages, in the order of a training step. "saving" happens in the forward pass, or
# in the backward pass with residuals="input".
_FORMULAS = {
    "glu_fwd": "h = silu(x @ w_gate) * (x @ w_up)",
    "glu_fwd, saving": "the same, with gate and up for the gradients",
    "down": "h @ w_down",
    "glu_bwd": "dgate, dup from dout @ w_down^T, gate, up",
    "dx": "dgate @ w_gate^T + dup @ w_up^T",
    "dw_gate": "x^T @ dgate",
    "dw_up": "x^T @ dup",
    "dw_gate_up": "x^T @ (dgate, dup)",
    "dw_down": "h^T @ dout",
}


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
    """Explains what `swiglu_mlp` with these arguments, and its gradients, would run.

    That is on the default device alone; on a mesh the part of each device decides.

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
      An `Explanation`. The implementation of a stage is "cudnn", "xla", "cudnn+xla" (cuDNN's GEMMs
      and XLA's elementwise kernels), "host", or "unavailable", where a call would be an error.

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
    shapes = [value.shape for value in operands.values()]
    return _explain("swiglu_mlp", config, implementation, operands, shapes)


def explain_packed(
    x: Any,
    w_gate_up: Any,
    w_down: Any,
    *,
    packing: PackedAxes | Packing = "H 2 I",
    weight_layout: WeightLayout = "in_out",
    dtype: DTypeLike | None = None,
    residuals: Residuals = "gate_up",
    implementation: Implementation | None = None,
) -> Explanation:
    """Explains what `swiglu_mlp_packed` with these arguments, and its gradients, would run.

    Args:
      x: an array or a `jax.ShapeDtypeStruct`, as for `swiglu_mlp_packed`; so are the weights.
      w_gate_up: see `swiglu_mlp_packed`.
      w_down: see `swiglu_mlp_packed`.
      packing: see `swiglu_mlp_packed`.
      weight_layout: see `swiglu_mlp_packed`.
      dtype: see `swiglu_mlp`.
      residuals: see `swiglu_mlp`.
      implementation: see `swiglu_mlp`.

    Returns:
      An `Explanation`, see `explain`.

    Raises:
      The errors of `swiglu_mlp_packed` for the same arguments.

    Example:
      >>> import jax.numpy as jnp, jax_swiglu as js
      >>> x, w_gate_up, w_down = jnp.ones((4, 8)), jnp.ones((8, 2, 16)), jnp.ones((16, 8))
      >>> js.explain_packed(x, w_gate_up, w_down).stages[-2].name
      'dw_gate_up'
    """
    packing = check_packing(packing)
    operands = {"x": x, "w_gate_up": w_gate_up, "w_down": w_down}
    config = configure(operands, weight_layout, dtype, residuals, implementation, packing=packing)
    shapes = [x.shape, packing.split(w_gate_up.shape), w_down.shape]
    return _explain("swiglu_mlp_packed", config, implementation, operands, shapes)


def _explain(
    function: str,
    config: Config,
    implementation: Implementation | None,
    operands: dict[str, Any],
    shapes: Sequence[tuple[int, ...]],
) -> Explanation:
    platform = _platform()
    avals = [
        jax.ShapeDtypeStruct(shape, value.dtype)
        for shape, value in zip(shapes, operands.values(), strict=True)
    ]
    weights = [f"d{name}" for name in operands if name != "x"]
    found = {
        stage: _decide(platform, implementation, op, call)
        for stage, op, call in _calls(config, avals, weights)
    }
    return Explanation(
        platform=platform,
        dtype=str(config.dtype),
        stages=tuple(
            Stage(name, formula, *found[name])
            for name, formula in _FORMULAS.items()
            if name in found
        ),
        plans=tuple(_ffi.prepared()),
        function=function,
    )


def _platform() -> str:
    settings: Any = jax.config  # its attributes are made at run time
    device = settings.jax_default_device
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def _calls(
    config: Config, avals: Sequence[Any], weight_grads: Sequence[str]
) -> Iterator[tuple[str, str, Any]]:
    """(stage, op, equation) of an inference, then of a training step, as programs have them."""

    def training(*operands: jax.Array) -> Any:
        out, pullback = jax.vjp(functools.partial(_vjp.swiglu_mlp, config), *operands)
        return pullback(out)

    wrapped: Any = _vjp.swiglu_mlp
    for function in (functools.partial(wrapped.__wrapped__, config), training):
        product, grads = "down", iter(weight_grads)
        for call in jax.make_jaxpr(function)(*avals).eqns:
            op = call.primitive.name.removeprefix("jax_swiglu_")
            if op == "glu_fwd":
                stage = "glu_fwd, saving" if call.params["params"].extra else "glu_fwd"
            elif op == "glu_bwd":
                stage, product = "glu_bwd", "dx"
            elif op == "matmul":
                stage = next(grads) if call.params["params"].lhs_transposed else product
            else:
                continue
            yield stage, op, call


_DIVIDED = {"all": "xla", "elementwise": "cudnn+xla", "nothing": "cudnn"}


def _decide(
    platform: str, implementation: Implementation | None, op: str, call: Any
) -> tuple[str, str]:
    """What runs an equation, and why: in step with the lowering rules of `_primitives`."""
    if implementation == "xla":
        return "xla", "asked for"
    lhs, params = call.invars[0].aval, call.params["params"]
    zero = any(0 in v.aval.shape for v in (*call.invars, *call.outvars))
    if implementation == "host":
        if platform != "cpu":
            return "unavailable", f"the default device is a {platform}, not a CPU"
        return ("xla", "a size is zero") if zero else ("host", "asked for")
    # JAX calls GPUs of AMD "gpu" too.
    if platform not in ("gpu", "cuda") or _load.cudnn_status().usable is None:
        obstacle = f"the default device is a {platform}, not an NVIDIA GPU"
    else:
        obstacle = cudnn_obstacle(lhs.dtype)
    if obstacle is not None:
        return ("unavailable" if implementation == "cudnn" else "xla"), obstacle
    if zero:
        return "xla", "a size is zero"
    to_xla, reason = divide(op, params, lhs.shape, lhs.dtype)
    return _DIVIDED[to_xla], reason
