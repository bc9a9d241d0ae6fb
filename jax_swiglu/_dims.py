"""The dimensions of the operands and results of an operation, by name.

Row operands are [batch..., rows..., columns] and weights [batch..., rows, columns]. Dimensions of
one name have one size and are split over devices alike. Packed weights have one more dimension, and
so have the row operands that belong to them: [batch..., rows..., 2, columns].
"""

from typing import NamedTuple

from jax_swiglu._config import OpParams

# The dimension of size 2 that selects gate or up. It is never split: each device has its part of
# both.
PAIR = "g"


class Dims(NamedTuple):
    """Names by dimension, for each operand and each result.

    `summable`: devices may each contract a part, and add up what they get.
    """

    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    contracted: tuple[str, ...]
    summable: bool = False

    @property
    def summed(self) -> tuple[str, ...]:
        """The contracted dimensions of which devices may each have a part."""
        return tuple(name for name in self.contracted if name != PAIR) if self.summable else ()

    @property
    def whole(self) -> tuple[str, ...]:
        """The dimensions of which every device has all, in the order in which they appear."""
        whole = {PAIR, *(() if self.summable else self.contracted)}
        names = (name for operand in self.operands for name in operand)
        return tuple(dict.fromkeys(name for name in names if name in whole))


def dims_of(op: str, params: OpParams, lhs_rank: int) -> Dims:
    batch = tuple(f"b{i}" for i in range(params.batch_dims))
    lhs_is_packed = (
        bool(params.packing)
        and op == "matmul"
        and (params.packing == "2 I H" or not params.lhs_transposed)
    )
    rows = tuple(f"m{i}" for i in range(lhs_rank - params.batch_dims - 1 - lhs_is_packed))
    if params.packing and op != "glu_bwd":
        dims = _with_packed_weight(op, params, rows)
    else:
        dims = _with_weight(op, params, rows)
    operands, results = (
        tuple((*batch, *names) for names in group) for group in (dims.operands, dims.results)
    )
    return dims._replace(operands=operands, results=results)


def _with_weight(op: str, params: OpParams, rows: tuple[str, ...]) -> Dims:
    if params.lhs_transposed:  # a weight gradient
        lhs, contracted, out = (*rows, "m"), rows, ("m", "n")
    else:
        lhs, contracted, out = (*rows, "k"), ("k",), (*rows, "n")
    rhs = ("n", *contracted) if params.rhs_transposed else (*contracted, "n")
    if op == "glu_fwd":
        return Dims((lhs, rhs, rhs), (out,) * (3 if params.extra else 1), contracted)
    if op == "glu_bwd":
        gate_up = ((*rows, PAIR, "n"),) if params.packing else (out, out)
        return Dims((lhs, rhs, *gate_up), (*gate_up, *((out,) * params.extra)), contracted)
    return Dims((lhs, rhs) * (2 if params.extra else 1), (out,), contracted, True)


def _with_packed_weight(op: str, params: OpParams, rows: tuple[str, ...]) -> Dims:
    if op == "glu_fwd":
        hidden, inner = "k", "n"
    elif not params.lhs_transposed:
        hidden, inner = "n", "k"
    else:
        hidden, inner = ("n", "m") if params.packing == "2 I H" else ("m", "n")
    by_letter = {"H": hidden, "2": PAIR, "I": inner}
    weight = tuple(by_letter[letter] for letter in params.packing.split())
    x, h, gate_up = (*rows, hidden), (*rows, inner), (*rows, PAIR, inner)
    if op == "glu_fwd":
        return Dims((x, weight), (h, *((gate_up,) * params.extra)), (hidden,))
    if not params.lhs_transposed:
        return Dims((gate_up, weight), (x,), (PAIR, inner), True)
    operands = (gate_up, x) if params.packing == "2 I H" else (x, gate_up)
    return Dims(operands, (weight,), rows, True)
