"""Policies of jax.checkpoint that choose gate, up and h by name."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _programs import with_grads
from _reference64 import check, draw

import jax_swiglu as js

GATE, UP, H = js.RESIDUAL_NAMES
M, I = 13, 40
names = jax.checkpoint_policies.save_only_these_names
implementations = pytest.mark.parametrize("implementation", ["host", None, "xla"])


def saved(function, inputs):
    """How many [M, I] arrays the backward pass is handed."""
    _, pullback = jax.vjp(function, *map(jnp.asarray, inputs.operands))
    return sum(leaf.shape == (M, I) for leaf in jax.tree.leaves(pullback))


@implementations
@pytest.mark.parametrize(
    ("policy", "residuals", "count"),
    [
        (names(GATE, UP), "gate_up", 2),
        (names(GATE), "gate_up", 1),
        (names(UP), "gate_up", 1),
        (names(GATE, UP, H), "full", 3),
        (names("another"), "gate_up", 0),
        (jax.checkpoint_policies.save_any_names_but_these(UP, H), "gate_up", 1),
        (jax.checkpoint_policies.nothing_saveable, "gate_up", 0),
        (jax.checkpoint_policies.nothing_saveable, "full", 0),
    ],
    ids=["gate, up", "gate", "up", "gate, up, h", "another", "not up, h", "nothing", "nothing 3"],
)
def test_policies_by_name(policy, residuals, count, implementation):
    inputs = draw(M, 24, I, 16, "bfloat16")
    function = functools.partial(js.swiglu_mlp, residuals=residuals, implementation=implementation)
    checkpointed = jax.checkpoint(function, policy=policy)
    assert saved(checkpointed, inputs) == count
    got = jax.jit(functools.partial(with_grads, checkpointed))(*inputs)
    check(got, inputs)
    if implementation == "host":  # the same calls on the same numbers
        want = jax.jit(functools.partial(with_grads, function))(*inputs)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize(
    ("policy", "calls"), [(names(GATE, UP), 1), (names(GATE), 2), (names("another"), 2)]
)
def test_what_is_saved_is_not_computed_again(policy, calls, custom_calls):
    inputs = draw(72, 24, I, 16, "bfloat16")
    checkpointed = jax.checkpoint(js.swiglu_mlp, policy=policy)
    plain, again = (
        Counter(custom_calls(functools.partial(with_grads, function), *inputs))
        for function in (js.swiglu_mlp, checkpointed)
    )
    # Nor is down, which the backward pass does not read.
    assert again == plain + Counter(glu_fwd=calls - plain["glu_fwd"])


@implementations
def test_in_a_scan_over_layers(implementation):
    inputs = draw(M, 24, I, 24, "bfloat16")
    x, *weights = map(jnp.asarray, inputs.operands)
    stacks = [jnp.stack([w] * 3) for w in weights]

    def loss(policy, x, *stacks):
        mlp = functools.partial(js.swiglu_mlp, implementation=implementation)
        layer = jax.checkpoint(mlp, policy=policy, prevent_cse=False)
        return jax.lax.scan(lambda x, w: (layer(x, *w), None), x, tuple(stacks))[0].sum()

    def stacked(policy):
        _, pullback = jax.vjp(functools.partial(loss, policy), x, *stacks)
        return sum(leaf.shape == (3, M, I) for leaf in jax.tree.leaves(pullback))

    assert stacked(names(GATE, UP)) == 2
    assert stacked(names("another")) == 0


def test_gated_half():
    inputs = draw(M, 24, I, 16, "bfloat16")
    x, w_gate, w_up, _ = map(jnp.asarray, inputs.operands)
    for policy, count in ((names(GATE, UP), 2), (names("another"), 0)):
        _, pullback = jax.vjp(jax.checkpoint(js.swiglu, policy=policy), x, w_gate, w_up)
        assert sum(leaf.shape == (M, I) for leaf in jax.tree.leaves(pullback)) == count


@implementations
def test_names_of_ones_own(implementation):
    """As a model has them whose policies are written already."""
    inputs = draw(M, 24, I, 16, "bfloat16")
    function = functools.partial(
        js.swiglu_mlp,
        residual_names=["mlpwi_0", "mlpwi_1", "mlph"],
        implementation=implementation,
    )
    nothing = jax.checkpoint_policies.nothing_saveable
    for policy, count in (
        (names("mlpwi_0", "mlpwi_1"), 2),
        (names("mlpwi_0", "mlpwi_1", "mlpwo"), 2),
        (names(GATE, UP), 0),
        (nothing, 0),
    ):
        checkpointed = jax.checkpoint(function, policy=policy)
        assert saved(checkpointed, inputs) == count
        check(jax.jit(functools.partial(with_grads, checkpointed))(*inputs), inputs)


@pytest.mark.parametrize("residual_names", ["guh", ("gate", "up"), ("gate", "up", 3)])
def test_names_that_are_none(residual_names):
    inputs = draw(M, 24, I, 16, "bfloat16")
    with pytest.raises(ValueError, match="three names, of gate, up and h"):
        js.swiglu_mlp(*inputs.operands, residual_names=residual_names)
