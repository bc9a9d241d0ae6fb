"""Static parameters: what a user asked for, and what each primitive is bound with."""

import dataclasses
from typing import Literal

import jax
import numpy as np
from jax.typing import DTypeLike

WeightLayout = Literal["in_out", "out_in"]
Residuals = Literal["gate_up", "full", "input"]
Implementation = Literal["cudnn", "xla", "host"]

WEIGHT_LAYOUTS = ("in_out", "out_in")
RESIDUALS = ("gate_up", "full", "input")
# What `jax.checkpoint` policies know gate, up and h by.
RESIDUAL_NAMES = ("swiglu_gate", "swiglu_up", "swiglu_h")
IMPLEMENTATIONS = ("cudnn", "xla", "host")

# What the cuDNN graphs are built for, and what the CPU evaluator can also do.
CUDNN_DTYPES = (np.dtype(jax.dtypes.bfloat16), np.dtype(np.float16))
HOST_DTYPES = (*CUDNN_DTYPES, np.dtype(np.float32))


@dataclasses.dataclass(frozen=True)
class Config:
    """One call of the public API.

    `implementation` None means cuDNN on CUDA where it applies, and XLA everywhere else. The routes
    force one way of computing an op (see `_ffi.routes`); empty means the fastest.
    """

    dtype: np.dtype
    weight_layout: WeightLayout = "in_out"
    residuals: Residuals = "gate_up"
    implementation: Literal["cudnn", "host"] | None = None
    # The caller's default matmul precision where XLA runs; cuDNN has one precision per dtype.
    precision: str | None = None
    residual_names: tuple[str, str, str] = RESIDUAL_NAMES  # of gate, up and h
    glu_fwd_route: str = ""
    glu_bwd_route: str = ""
    matmul_route: str = ""


@dataclasses.dataclass(frozen=True)
class OpParams:
    """One primitive; the first four fields travel to the FFI handlers as attributes.

    `extra`: `glu_fwd` also returns gate and up, `glu_bwd` also returns h, `matmul` has an addend.
    `lhs_transposed`: the product is summed over all rows, as weight gradients are.
    """

    lhs_transposed: bool
    rhs_transposed: bool
    extra: bool
    route: str
    out_dtype: np.dtype
    implementation: Literal["cudnn", "host"] | None
    precision: str | None
    batch_dims: int = 0

    def as_gemm(self) -> "OpParams":
        """The GEMM of this operation alone."""
        return dataclasses.replace(self, extra=False, route="")

    def with_batch_dim(self) -> "OpParams":
        return dataclasses.replace(self, batch_dims=self.batch_dims + 1)

    def attributes(self) -> dict[str, np.bool_ | str]:
        return {
            "lhs_transposed": np.bool_(self.lhs_transposed),
            "rhs_transposed": np.bool_(self.rhs_transposed),
            "extra": np.bool_(self.extra),
            "route": self.route,
        }


def op_params(
    config: Config,
    route: str,
    *,
    rhs_transposed: bool,
    lhs_transposed: bool = False,
    extra: bool = False,
    out_dtype: DTypeLike | None = None,
) -> OpParams:
    return OpParams(
        lhs_transposed=lhs_transposed,
        rhs_transposed=rhs_transposed,
        extra=extra,
        route=route,
        out_dtype=np.dtype(config.dtype if out_dtype is None else out_dtype),
        implementation=config.implementation,
        precision=config.precision,
    )
