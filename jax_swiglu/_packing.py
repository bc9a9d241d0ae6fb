"""How one array holds gate and up."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Literal, get_args

from jax_swiglu._config import PACKINGS, PackedAxes, WeightLayout
from jax_swiglu._shapes import check_choice

Axes = Literal["H 2 I", "2 H I", "2 I H", "H (2 I)", "(2 I) H", "H (I 2)", "(I 2) H"]


@dataclasses.dataclass(frozen=True)
class Packing:
    """How one array holds gate and up.

    Attributes:
      axes: the dimensions of the array, outermost first; `2` selects gate or up. Parentheses join
        two into one: `(2 I)` is all of gate, then all of up; `(I 2)` alternates between them.
      block: in `(I 2)`, how many of gate are followed by as many of up.
      up_first: up comes before gate.

    Raises:
      ValueError: axes are not among the choices, or block does not fit them.
    """

    axes: Axes
    block: int = 1
    up_first: bool = False

    def __post_init__(self) -> None:
        check_choice("axes", self.axes, get_args(Axes))
        if self.block < 1 or (self.block > 1 and "(I 2)" not in self.axes):
            raise ValueError(
                f'block must be at least 1, and 1 in axes without "(I 2)"; got {self.block} '
                f"with axes={self.axes!r}"
            )

    @property
    def dims(self) -> tuple[str, ...]:
        """Each dimension of the array, as `axes` spells it."""
        return tuple(re.findall(r"\(.*?\)|\S", self.axes))

    @property
    def letters(self) -> str:
        """The dimensions with the parentheses opened; `JB` is I, in blocks."""
        return re.sub(r"[() ]", "", self.axes.replace("(I 2)", "J2B"))

    @property
    def weight_layout(self) -> WeightLayout:
        """The layout of gate and up within the array."""
        return "out_in" if self.letters[-1] == "H" else "in_out"

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether an array of this shape can be packed so."""
        return len(shape) == len(self.dims) and all(
            n == 2 if dim == "2" else n % (2 * self.block) == 0 if "2" in dim else True
            for dim, n in zip(self.dims, shape, strict=True)
        )

    def split(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The sizes of `letters` in an array of a shape that fits."""
        sizes: list[int] = []
        for dim, n in zip(self.dims, shape, strict=True):
            if dim == "(2 I)":
                sizes += [2, n // 2]
            elif dim == "(I 2)":
                sizes += [n // (2 * self.block), 2, self.block]
            else:
                sizes += [n]
        return tuple(sizes)

    def expected(self) -> str:
        """The shapes that fit, in words."""
        divisor = f", I a multiple of {self.block}" if self.block > 1 else ""
        return f"({', '.join(self.dims)}){divisor}"


def check_packing(packing: PackedAxes | Packing) -> Packing:
    """The packing of a parameter, whose gate and up must not alternate."""
    axes = packing.axes if isinstance(packing, Packing) else packing
    if axes in ("H (I 2)", "(I 2) H"):
        apart = axes.replace("I 2", "2 I")
        given = packing if isinstance(packing, Packing) else f"Packing({axes!r})"
        raise ValueError(
            f"packing must keep gate and up apart, as {apart!r} does; got {axes!r}, in which they "
            "alternate. Convert once, with jax_swiglu.convert: "
            f"pack(*unpack(w_gate_up, {given}), Packing({apart!r}))"
        )
    check_choice("packing", axes, PACKINGS)
    return packing if isinstance(packing, Packing) else Packing(axes)
