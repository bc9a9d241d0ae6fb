"""Static parameters: what a user asked for, and what each primitive is bound with."""

import dataclasses
from typing import Literal

import jax
import numpy as np
from jax.typing import DTypeLike

WeightLayout = Literal["in_out", "out_in"]
Residuals = Literal["gate_up", "full", "input"]
Implementation = Literal["cudnn", "xla", "host"]

# How one array holds w_gate and w_up, outermost dimension first; "" where there are two arrays.
OpenAxes = Literal["", "H 2 I", "2 H I", "2 I H"]

# The same as users may write it: parentheses join two dimensions.
PackedAxes = Literal["H 2 I", "2 H I", "2 I H", "H (2 I)", "(2 I) H"]

WEIGHT_LAYOUTS = ("in_out", "out_in")
RESIDUALS = ("gate_up", "full", "input")
# What `jax.checkpoint` policies know gate, up and h by.
RESIDUAL_NAMES = ("swiglu_gate", "swiglu_up", "swiglu_h")
PACKINGS = ("H 2 I", "2 H I", "2 I H", "H (2 I)", "(2 I) H")
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
    packing: OpenAxes = ""
    up_first: bool = False

    @property
    def layout_in(self) -> WeightLayout:
        """The layout of w_gate and w_up; with a packing, weight_layout is that of w_down alone."""
        if not self.packing:
            return self.weight_layout
        return "out_in" if self.packing == "2 I H" else "in_out"


@dataclasses.dataclass(frozen=True)
class OpParams:
    """One primitive; its `attributes` travel to the FFI handlers.

    `extra`: `glu_fwd` also returns gate and up, `glu_bwd` also returns h, `matmul` is the sum of
    two products (and its FFI handler adds one product to an addend).
    `lhs_transposed`: the product is summed over all rows, as weight gradients are.
    `packing`: one array holds w_gate and w_up, and one [rows..., 2, I] gate and up, or their
    cotangents; of `matmul` it is the gradient of x or, summed over rows, that of the weight.
    """

    lhs_transposed: bool
    rhs_transposed: bool
    extra: bool
    route: str
    out_dtype: np.dtype
    implementation: Literal["cudnn", "host"] | None
    precision: str | None
    batch_dims: int = 0
    packing: OpenAxes = ""
    up_first: bool = False

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
            "packing": self.packing,
            "up_first": np.bool_(self.up_first),
        }


def op_params(
    config: Config,
    route: str,
    *,
    rhs_transposed: bool,
    lhs_transposed: bool = False,
    extra: bool = False,
    out_dtype: DTypeLike | None = None,
    packed: bool = False,
) -> OpParams:
    return OpParams(
        lhs_transposed=lhs_transposed,
        rhs_transposed=rhs_transposed,
        extra=extra,
        route=route,
        out_dtype=np.dtype(config.dtype if out_dtype is None else out_dtype),
        implementation=config.implementation,
        precision=config.precision,
        packing=config.packing if packed else "",
        up_first=packed and config.up_first,
    )
