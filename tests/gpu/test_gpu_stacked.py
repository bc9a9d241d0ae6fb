"""Weights stacked over layers and sliced by lax.scan must reach our calls without a copy."""

import re

import jax
import jax.numpy as jnp
import pytest

import jax_swiglu as js

LAYERS, H, I = 4, 256, 640
WEIGHT = rf"bf16\[(?:1,)?(?:{H},{I}|{I},{H})\]"


def computations(hlo: str) -> dict[str, list[str]]:
    """The instructions of each computation of an HLO module."""
    found: dict[str, list[str]] = {}
    name = None
    for line in hlo.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = head.group(1)
            found[name] = []
        elif name is not None and line.startswith("  "):
            found[name].append(line.strip())
    return found


def compiled(step, rows):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((*rows, H), (LAYERS, H, I), (LAYERS, H, I), (LAYERS, I, H))
    args = [
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    ]
    return jax.jit(step).lower(*args).compile().as_text()


def forward(x, *stacks):
    def layer(x, weights):
        return x + js.swiglu_mlp(x, *weights), None

    return jax.lax.scan(layer, x, stacks)[0]


def backward(x, *stacks):
    def loss(*args):
        return forward(*args).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2, 3))(x, *stacks)


# Calls that read weights: glu_fwd and down; behind them that for dh and the two GEMMs of dx. The
# number of rows differs from all sizes of weights, which tells residuals from them.
@pytest.mark.parametrize(
    ("step", "rows", "calls"),
    [
        (forward, (1,), 2),
        (forward, (320,), 2),
        (backward, (320,), 2 + 3),
        (backward, (2, 160), 2 + 3),
    ],
)
def test_no_copy_of_a_weight(step, rows, calls):
    hlo = compiled(step, rows)
    fused = 0
    for name, instructions in computations(hlo).items():
        text = "\n".join(instructions)
        ours = len(re.findall(r'custom_call_target="jax_swiglu_', text))
        if ours and "dynamic-slice(" in text:
            # A fusion of the slice of a weight into our call.
            assert ours == 1, name
            fused += 1
        elif not ours:
            # Elsewhere, no slice or copy produces a weight.
            made = re.findall(rf"= {WEIGHT}\S* (?:copy|dynamic-slice|transpose)\(", text)
            assert not made, f"{name}: {made}"
    assert fused >= calls
