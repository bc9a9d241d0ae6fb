"""The dimensions of the operands and results of an operation, by name.

Row operands are [batch..., rows..., columns] and weights [batch..., rows, columns]. Dimensions of
one name have one size and are split over devices alike.
"""

from typing import NamedTuple

from jax_swiglu._config import OpParams


class Dims(NamedTuple):
    """Names by dimension, for each operand and each result.

    `summable`: devices may each contract a part, and add up what they get.
    """

    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    contracted: tuple[str, ...]
    summable: bool = False


def dims_of(op: str, params: OpParams, lhs_rank: int) -> Dims:
    batch = tuple(f"b{i}" for i in range(params.batch_dims))
    rows = tuple(f"m{i}" for i in range(lhs_rank - params.batch_dims - 1))
    if params.lhs_transposed:  # a weight gradient
        lhs, contracted, out = (*rows, "m"), rows, ("m", "n")
    else:
        lhs, contracted, out = (*rows, "k"), ("k",), (*rows, "n")
    rhs = ("n", *contracted) if params.rhs_transposed else (*contracted, "n")
    lhs, rhs, out = ((*batch, *names) for names in (lhs, rhs, out))
    if op == "glu_fwd":
        return Dims((lhs, rhs, rhs), (out,) * (3 if params.extra else 1), contracted)
    if op == "glu_bwd":
        return Dims((lhs, rhs, out, out), (out,) * (3 if params.extra else 2), contracted)
    return Dims((lhs, rhs, *((out,) * params.extra)), (out,), contracted, True)
