"""Who computes what on a GPU, cuDNN or XLA, by operation, shape and dtype alone.

So all processes of a job compile the same program. Measured on an H200, see docs/performance.md.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from jax_swiglu import _reference
from jax_swiglu._config import OpParams
from jax_swiglu._dims import dims_of

# A weight gradient over fewer rows than one K tile is all writing, and XLA's GEMM writes faster.
MAX_XLA_WEIGHT_GRAD_ROWS = 64
# Up to so many rows the activation, its gradient and the addition to a product are worth a fused
# kernel; beyond, plain GEMMs with XLA's elementwise kernels behind them are faster.
MAX_FUSED_ROWS = {"glu_fwd": 1024, "glu_bwd": 64, "matmul": 64}


class Division(NamedTuple):
    """What is left to XLA: all, the elementwise part behind cuDNN's GEMMs, or nothing; and why."""

    to_xla: Literal["all", "elementwise", "nothing"]
    reason: str


def divide(op: str, params: OpParams, lhs_shape: Sequence[int], dtype: np.dtype) -> Division:
    """Divides an operation on one device whose first operand has this shape and dtype."""
    if params.implementation == "cudnn" or params.route:
        return Division("nothing", "asked for")
    if params.lhs_transposed:
        dims = dims_of(op, params, len(lhs_shape))
        sizes = zip(dims.operands[0], lhs_shape, strict=True)
        rows = math.prod(size for name, size in sizes if name in dims.contracted)
        few = rows <= MAX_XLA_WEIGHT_GRAD_ROWS
        if few and _reference.gives_transposed(dims, params, dtype):
            return Division("nothing", "XLA would transpose the result")
        return Division(
            "all" if few else "nothing", _compare(rows, MAX_XLA_WEIGHT_GRAD_ROWS, "summed over ")
        )
    if params.packing:
        return Division("nothing", "gate and up are one array")
    # A call that returns gate and up can write them into stacks of residuals, in place, if nothing
    # else reads them.
    if op == "glu_fwd" and params.extra:
        return Division("nothing", "one call writes gate, up and h")
    if op == "matmul" and not params.extra:
        return Division("nothing", "a GEMM alone")
    rows = math.prod(lhs_shape[params.batch_dims : -1])
    most = MAX_FUSED_ROWS[op]
    return Division("nothing" if rows <= most else "elementwise", _compare(rows, most))


def _compare(rows: int, most: int, what: str = "") -> str:
    return f"{what}{rows} rows, {'at most' if rows <= most else 'more than'} {most}"
