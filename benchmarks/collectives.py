"""How much a compiled program communicates."""

import collections
import math
import re

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def collective_bytes(hlo: str) -> collections.Counter[str]:
    """Bytes of the results of the collectives of each kind.

    A reduce-scatter is the first half of an all-reduce of its operand, and counted as such.
    """
    results: dict[str, int] = {}
    collectives: list[tuple[str, str, list[str]]] = []
    for line in hlo.splitlines():
        if not (made := re.match(r"\s*(?:ROOT )?%?(\S+) = (\(.*?\)|\S+) (\S+)\(([^)]*)", line)):
            continue
        name, types, kind, operands = made.groups()
        shapes = [
            (int(bits) // 8, [int(d) for d in dims.split(",") if d])
            for bits, dims in re.findall(r"[a-z]+(\d+)\[([\d,]*)\]", types)
        ]
        found = re.fullmatch(rf"({_KINDS})(-start)?", kind)
        if found and found[2] and found[1] != "all-reduce":
            # GPUs start a collective and wait for it later: (operands, results, scalars of state).
            shapes = [shape for shape in shapes if shape[1]]
            shapes = shapes[len(shapes) // 2 :]
        results[name] = sum(size * math.prod(dims) for size, dims in shapes)
        if found:
            collectives.append((found[1], name, re.findall(r"%([^\s,]+)", operands)))
    moved: collections.Counter[str] = collections.Counter()
    for kind, name, operands in collectives:
        if kind == "reduce-scatter":
            moved["all-reduce"] += sum(results[operand] for operand in operands) // 2
        else:
            moved[kind] += results[name]
    return moved
