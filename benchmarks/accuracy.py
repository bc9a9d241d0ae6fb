"""Errors of every route against float64, beside those of plain XLA in the same dtype."""

import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import MODELS, Arrays, Model, make_data, plain_mlp, with_gradients
from jax_swiglu import _vjp
from jax_swiglu._config import Config

ROWS = (1, 16, 333, 2048, 8192)
DTYPES = (jnp.bfloat16, jnp.float16)
LAYOUTS = ("in_out", "out_in")
# Together these run every route of every op; the last one is what users get, XLA's parts included.
ROUTES: tuple[dict[str, Any], ...] = (
    {"glu_fwd_route": "dual", "glu_bwd_route": "epilogue", "implementation": "cudnn"},
    {"glu_fwd_route": "epilogue", "glu_bwd_route": "pointwise", "implementation": "cudnn"},
    {"glu_fwd_route": "pointwise", "glu_bwd_route": "epilogue", "implementation": "cudnn"},
    {},
)
NAMES = ("out", "dx", "dw_gate", "dw_up", "dw_down")
REQUIRED_RATIO = 1.1


@jax.jit
def _float64(args: Arrays) -> Arrays:
    return with_gradients(plain_mlp)(*(a.astype(jnp.float64) for a in args))


@jax.jit
def _errors(got: Arrays, want: Arrays) -> jax.Array:
    """Relative Frobenius error of each."""
    pairs = zip(got, want, strict=True)
    return jnp.stack(
        [jnp.linalg.norm(g.astype(w.dtype) - w) / jnp.linalg.norm(w) for g, w in pairs]
    )


def _ours(config: Config, args: Arrays) -> Arrays:
    """Runs the op with weights stored in the layout of `config`; results in "in_out"."""
    x, w_gate, w_up, w_down, dout = args
    transpose = config.weight_layout == "out_in"
    weights = [w.T if transpose else w for w in (w_gate, w_up, w_down)]
    step = jax.jit(with_gradients(functools.partial(_vjp.swiglu_mlp, config)))
    out, dx, *grads = step(x, *weights, dout)
    return (out, dx, *(g.T if transpose else g for g in grads))


def run(models: Sequence[Model] = MODELS) -> Iterator[dict[str, Any]]:
    """One entry for each model, number of rows, dtype, layout and set of routes.

    Each route runs the first plan that cuDNN proposes for it.
    """
    os.environ["JAX_SWIGLU_TUNING"] = "0"
    # Tuned baselines are no more accurate, and take their time to compile.
    plain = jax.jit(with_gradients(plain_mlp), compiler_options={"xla_gpu_autotune_level": 0})
    for model, m, dtype in itertools.product(models, ROWS, DTYPES):
        args = make_data(m, model.hidden, model.intermediate, dtype)
        want = _float64(args)
        xla = np.asarray(_errors(plain(*args), want))
        for layout, routes in itertools.product(LAYOUTS, ROUTES):
            config = Config(dtype=np.dtype(dtype), weight_layout=layout, **routes)
            ours = np.asarray(_errors(_ours(config, args), want))
            ratios = ours / xla
            yield {
                "model": model.name,
                "m": m,
                "dtype": str(np.dtype(dtype)),
                "layout": layout,
                "routes": f"{config.glu_fwd_route}/{config.glu_bwd_route}" if routes else "default",
                "ours": dict(zip(NAMES, map(float, ours), strict=True)),
                "xla": dict(zip(NAMES, map(float, xla), strict=True)),
                "worst_ratio": float(ratios.max()),
                "ok": bool((ratios <= REQUIRED_RATIO).all()),
            }
