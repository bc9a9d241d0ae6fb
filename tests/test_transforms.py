"""The operation under JAX's transformations, against float64."""

import functools
import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _programs import with_grads
from _reference64 import (
    NAMES,
    TOLERANCE,
    Inputs,
    check,
    check_value,
    draw,
    mlp,
    mlp_and_grads,
    wide,
)
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_swiglu as js

ALL = (0, 1, 2, 3)
OPERANDS = ("x", "w_gate", "w_up", "w_down")
RESIDUALS = ("gate_up", "full", "input")
SUBSETS = [s for n in (1, 2, 3, 4) for s in itertools.combinations(ALL, n)]
everywhere = pytest.mark.parametrize("implementation", ["host", "xla", None])
ours = pytest.mark.parametrize("implementation", ["host", None])
subsets = pytest.mark.parametrize(
    "subset", SUBSETS, ids=["+".join(OPERANDS[i] for i in s) for s in SUBSETS]
)


def op(**options):
    return functools.partial(js.swiglu_mlp, **options)


def of_subset(function, operands, subset):
    """The function of the operands in the subset; the others are fixed."""

    def restricted(*chosen):
        args = list(operands)
        for i, value in zip(subset, chosen, strict=True):
            args[i] = value
        return function(*args)

    return restricted, [operands[i] for i in subset]


# jit and grad.


@everywhere
def test_without_jit(implementation):
    inputs = draw(13, 24, 40, 16, "bfloat16")
    check(with_grads(op(implementation=implementation), *map(jnp.asarray, inputs)), inputs)


@everywhere
@subsets
def test_grad_of_a_subset(subset, implementation):
    inputs = draw(13, 24, 40, 16, "float32")

    def loss(*args):
        out = js.swiglu_mlp(*args, implementation=implementation)
        return (out * inputs.dout).sum()

    grads = jax.jit(jax.grad(loss, subset))(*inputs.operands)
    want = mlp_and_grads(*inputs)
    for i, grad in zip(subset, grads, strict=True):
        check_value(grad, want[1 + i], TOLERANCE["float32"], NAMES[1 + i])


@pytest.mark.parametrize(("implementation", "platform"), [("host", "cpu"), ("cudnn", "cuda")])
@pytest.mark.parametrize("residuals", RESIDUALS)
@subsets
def test_gradients_nobody_asked_for_are_not_computed(
    subset, residuals, implementation, platform, custom_calls
):
    operands = draw(72, 8, 16, 6, "bfloat16").operands
    function, chosen = of_subset(
        op(implementation=implementation, residuals=residuals), operands, subset
    )
    dout = jnp.ones((72, 6), jnp.bfloat16)
    calls = Counter(
        custom_calls(functools.partial(with_grads, function), *chosen, dout, platform=platform)
    )
    inner = set(subset) & {0, 1, 2}
    recompute = inner and residuals == "input"
    assert calls == Counter(
        glu_fwd=2 if recompute else 1,
        # down; then dx in two steps, and one for each weight
        matmul=1 + 2 * (0 in subset) + len(set(subset) & {1, 2, 3}),
        glu_bwd=1 if inner else 0,
    )


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("residuals", RESIDUALS)
@subsets
def test_frozen_operands_are_not_saved_for(subset, residuals, jit):
    m, h, i, o = 4, 8, 16, 6
    operands = tuple(map(jnp.asarray, draw(m, h, i, o, "bfloat16").operands))
    function = op(residuals=residuals)
    function, chosen = of_subset(jax.jit(function) if jit else function, operands, subset)
    _, pullback = jax.vjp(function, *chosen)
    saved = Counter(leaf.shape for leaf in jax.tree.leaves(pullback) if leaf.ndim)
    inner = bool(set(subset) & {0, 1, 2})
    recompute = inner and residuals == "input"
    want = Counter()
    want[(m, h)] = bool(recompute or set(subset) & {1, 2})
    want[(h, i)] = 2 * bool(recompute or 0 in subset)
    want[(i, o)] = inner
    want[(m, i)] = 2 * (inner and not recompute)
    # h: comes out of the backward pass, unless asked for or w_down alone is trained.
    want[(m, i)] += bool(3 in subset and (residuals == "full" or not inner))
    assert saved == +want


def test_unused_output_costs_no_backward_pass(custom_calls):
    operands = draw(4, 8, 16, 6, "bfloat16").operands

    def loss(x, *weights):
        return x.sum(), js.swiglu_mlp(x, *weights)

    calls = custom_calls(jax.grad(loss, ALL, has_aux=True), *operands)
    assert calls == ["glu_fwd", "matmul"]

    def pair(x, *weights):
        return js.swiglu_mlp(x, *weights), x * 2

    def grads(*args):
        return jax.grad(lambda *args: pair(*args)[1].sum(), ALL)(*args)

    assert "glu_bwd" not in custom_calls(grads, *operands)
    for grad, operand in zip(grads(*map(jnp.asarray, operands)), operands, strict=True):
        want = np.full(operand.shape, 2.0 if operand is operands[0] else 0.0)
        np.testing.assert_array_equal(np.asarray(grad, np.float32), want)


@everywhere
def test_same_weight_for_gate_and_up(implementation):
    """Both cotangents of a shared weight are added."""
    inputs = draw(13, 24, 40, 16, "float32")
    x, w, _, w_down, dout = inputs

    def shared(x, w, w_down):
        return js.swiglu_mlp(x, w, w, w_down, implementation=implementation)

    _, dx, dw, dw_down = jax.jit(functools.partial(with_grads, shared))(x, w, w_down, dout)
    _, *want = mlp_and_grads(x, w, w, w_down, dout)
    for got, right in ((dx, want[0]), (dw, want[1] + want[2]), (dw_down, want[3])):
        check_value(got, right, TOLERANCE["float32"])


# vmap.

BATCH = 3


def mapped_inputs(subset, dtype="float32", layout="in_out", sizes=(5, 8, 12, 6)):
    """BATCH problems that differ in the operands of the subset and in dout."""
    draws = [draw(*sizes, dtype, layout=layout, seed=seed) for seed in range(BATCH)]
    first = draws[0].operands
    return [Inputs(*(d[i] if i in subset else first[i] for i in ALL), d.dout) for d in draws]


def stack(problems, axes):
    """The arguments of a vmapped function with these in_axes."""
    return [
        jnp.asarray(problems[0][i] if axis is None else np.stack([p[i] for p in problems], axis))
        for i, axis in enumerate(axes)
    ]


def check_mapped(got, problems, out_axes=(0,) * 5, **options):
    for b, problem in enumerate(problems):
        check(
            [jnp.take(g, b, axis=axis) for g, axis in zip(got, out_axes, strict=True)],
            problem,
            **options,
        )


@ours
@pytest.mark.parametrize("layout", ["in_out", "out_in"])
@subsets
def test_vmap(subset, layout, implementation):
    problems = mapped_inputs(subset, layout=layout)
    axes = tuple(axis if i in subset else None for i, axis in enumerate((1, 2, -1, 0)))
    function = functools.partial(
        with_grads, op(implementation=implementation, weight_layout=layout)
    )
    out_axes = (1, 0, 2, -1, 1)
    got = jax.jit(jax.vmap(function, (*axes, 0), out_axes))(*stack(problems, (*axes, 0)))
    check_mapped(got, problems, out_axes, layout=layout)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_vmap_over_any_axis(axis):
    problems = mapped_inputs(ALL)
    got = jax.vmap(op(implementation="host"), (axis,) * 4, axis)(*stack(problems, (axis,) * 4))
    for b, problem in enumerate(problems):
        check_value(jnp.take(got, b, axis=axis), mlp(*problem.operands), TOLERANCE["float32"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("residuals", RESIDUALS)
@pytest.mark.parametrize("subset", [(0,), (1, 2, 3), ALL], ids=["x", "weights", "all"])
def test_vmap_in_16_bits(subset, residuals, dtype):
    problems = mapped_inputs(subset, dtype, sizes=(13, 24, 40, 16))
    axes = (*(0 if i in subset else None for i in ALL), 0)
    function = functools.partial(with_grads, op(implementation="host", residuals=residuals))
    check_mapped(jax.jit(jax.vmap(function, axes))(*stack(problems, axes)), problems)


@ours
@pytest.mark.parametrize("outer", [(0,), (1, 2), (0, 3), ALL], ids=str)
@pytest.mark.parametrize("inner", [(0,), (1, 2), (2, 3), ALL], ids=str)
def test_nested_vmap(inner, outer, implementation):
    rng = np.random.default_rng(0)
    shapes = [(5, 8), (8, 12), (8, 12), (12, 6), (5, 6)]
    inner_axes = (*(1 if i in inner else None for i in ALL), 0)
    outer_axes = (*(0 if i in outer else None for i in ALL), 0)
    args, problems = [], {}
    for i, (shape, a, b) in enumerate(zip(shapes, inner_axes, outer_axes, strict=True)):
        full = rng.standard_normal(((4 if b == 0 else 1), (3 if a is not None else 1), *shape))
        full = (full * 0.5).astype(np.float32)
        for j, k in np.ndindex(4, 3):
            one = full[j % full.shape[0], k % full.shape[1]]
            problems.setdefault((j, k), [None] * 5)[i] = one
        value = full if a is not None else full[:, 0]
        value = value if b == 0 else value[0]
        if a == 1:  # the inner batch goes behind the rows
            value = np.moveaxis(value, -3, -2)
        args.append(jnp.asarray(value))
    function = functools.partial(with_grads, op(implementation=implementation))
    got = jax.jit(jax.vmap(jax.vmap(function, inner_axes), outer_axes))(*args)
    for key, problem in problems.items():
        check([g[key] for g in got], Inputs(*problem))


@everywhere
def test_vmap_of_grad(implementation):
    """Gradients per example, as for their norms."""
    problems = mapped_inputs((0,))

    def loss(x, *weights):
        return js.swiglu_mlp(x, *weights, implementation=implementation).sum()

    axes = (0, None, None, None)
    got = jax.vmap(jax.grad(loss, ALL), axes)(*stack(problems, (*axes, 0))[:4])
    for b, problem in enumerate(problems):
        _, *want = mlp_and_grads(*problem.operands, np.ones((5, 6)))
        for grad, right in zip(got, want, strict=True):
            check_value(grad[b], right, TOLERANCE["float32"])


@everywhere
def test_grad_of_vmap(implementation):
    problems = mapped_inputs((0,))

    def loss(x, *weights):
        rows = jax.vmap(lambda x: js.swiglu_mlp(x, *weights, implementation=implementation))
        return rows(x).sum()

    got = jax.grad(loss, ALL)(*stack(problems, (0, None, None, None, 0))[:4])
    each = [mlp_and_grads(*p.operands, np.ones((5, 6)))[1:] for p in problems]
    check_value(got[0], np.stack([e[0] for e in each]), TOLERANCE["float32"])
    for n in (1, 2, 3):
        check_value(got[n], sum(e[n] for e in each), TOLERANCE["float32"])


@everywhere
@pytest.mark.parametrize("batch", [0, 1])
def test_vmap_of_few(batch, implementation):
    args = [jnp.ones((batch, 5, 8)), jnp.ones((8, 12)), jnp.ones((8, 12)), jnp.ones((12, 6))]
    function = jax.grad(lambda *a: op(implementation=implementation)(*a).sum(), ALL)
    got = jax.vmap(function, (0, None, None, None))(*args)
    assert [g.shape for g in got] == [(batch, 5, 8), (batch, 8, 12), (batch, 8, 12), (batch, 12, 6)]


@everywhere
def test_nested_vmap_of_nothing(implementation):
    shapes = [(2, 3, 0, 8), (2, 3, 8, 12), (3, 8, 12), (2, 3, 12, 6)]
    args = [jnp.ones(shape) for shape in shapes]
    function = jax.grad(lambda *a: op(implementation=implementation)(*a).sum(), ALL)
    got = jax.vmap(jax.vmap(function), (0, 0, None, 0))(*args)
    shapes[2] = (2, *shapes[2])
    for g, shape in zip(got, shapes, strict=True):
        np.testing.assert_array_equal(g, np.zeros(shape))


# scan over stacked weights.

LAYERS = 3


def stacked(h, i, dtype, m=5):
    draws = [draw(m, h, i, h, dtype, scale=0.5, seed=seed) for seed in range(LAYERS)]
    stacks = [np.stack(layers) for layers in zip(*(d[1:4] for d in draws), strict=True)]
    return draws[0].x, stacks, draws[0].dout


def residual_stream(x, stacks, dout):
    """x <- x + mlp(x) through all layers, and the gradients, in float64."""
    inputs, (x, dout) = [], wide(x, dout)
    for layer in range(LAYERS):
        inputs.append(x)
        x = x + mlp(x, *(s[layer] for s in stacks))
    grads = []
    for layer in reversed(range(LAYERS)):
        _, dx, *dweights = mlp_and_grads(inputs[layer], *(s[layer] for s in stacks), dout)
        dout = dout + dx
        grads.insert(0, dweights)
    return (x, dout, *(np.stack(g) for g in zip(*grads, strict=True)))


def scan_layers(function, x, *stacks, **options):
    def layer(x, weights):
        return x + function(x, *weights), None

    return jax.lax.scan(layer, x, stacks, **options)[0]


@everywhere
@pytest.mark.parametrize("residuals", RESIDUALS)
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((24, 40), "float32"), ((24, 40), "bfloat16"), ((3, 5), "bfloat16")],
    ids=["float32", "bfloat16", "odd stack"],
)
def test_scan_over_stacked_weights(sizes, dtype, residuals, implementation):
    x, stacks, dout = stacked(*sizes, dtype)
    function = op(implementation=implementation, residuals=residuals)
    step = jax.jit(functools.partial(with_grads, functools.partial(scan_layers, function)))
    got = step(x, *stacks, dout)
    for name, g, want in zip(NAMES, got, residual_stream(x, stacks, dout), strict=True):
        # Each layer adds its roundings, and rounds the sum.
        check_value(g, want, LAYERS * TOLERANCE[dtype], name)


@ours
def test_scan_over_frozen_weights(implementation):
    x, stacks, dout = stacked(24, 40, "float32")
    function = op(implementation=implementation)

    @jax.jit
    def step(x, dout):
        return with_grads(lambda x: scan_layers(function, x, *stacks), x, dout)

    for got, want in zip(step(x, dout), residual_stream(x, stacks, dout)[:2], strict=True):
        check_value(got, want, LAYERS * TOLERANCE["float32"])


def test_scan_over_frozen_weights_computes_no_weight_gradient(custom_calls):
    x, stacks, dout = stacked(24, 40, "bfloat16")

    def step(x, *stacks):
        return with_grads(lambda x: scan_layers(js.swiglu_mlp, x, *stacks), x, dout)

    calls = Counter(custom_calls(step, x, *stacks))
    assert calls == Counter(glu_fwd=1, glu_bwd=1, matmul=3)  # down, dx in two steps


# remat.

POLICIES = {
    "none": None,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots without batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@ours
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("residuals", RESIDUALS)
def test_remat(residuals, policy, implementation):
    inputs = draw(13, 24, 40, 16, "bfloat16")
    function = jax.checkpoint(op(implementation=implementation, residuals=residuals), policy=policy)
    check(jax.jit(functools.partial(with_grads, function))(*inputs), inputs)


@everywhere
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_remat_inside_scan(policy, implementation):
    x, stacks, dout = stacked(24, 40, "float32")
    function = jax.checkpoint(op(implementation=implementation), policy=policy, prevent_cse=False)
    step = jax.jit(functools.partial(with_grads, functools.partial(scan_layers, function)))
    got = step(x, *stacks, dout)
    for name, g, want in zip(NAMES, got, residual_stream(x, stacks, dout), strict=True):
        check_value(g, want, LAYERS * TOLERANCE["float32"], name)


def test_remat_saves_only_inputs_and_recomputes_only_what_is_read(custom_calls):
    inputs = draw(72, 8, 16, 6, "bfloat16")
    function = jax.checkpoint(op())
    _, pullback = jax.vjp(function, *map(jnp.asarray, inputs.operands))
    assert (72, 16) not in {leaf.shape for leaf in jax.tree.leaves(pullback)}
    plain, calls = (
        Counter(custom_calls(functools.partial(with_grads, f), *inputs)) for f in (op(), function)
    )
    # Once forward, once again: but down, which the backward pass does not read, is not.
    assert plain["glu_fwd"] == 1
    assert calls == plain + Counter(glu_fwd=1)


# Second derivatives.


def second(inputs, directions):
    """d/de of the gradients at operands + e * directions, by central differences in float64."""
    operands, (dout,) = wide(*inputs.operands), wide(inputs.dout)
    step = 1e-5
    ahead, behind = (
        mlp_and_grads(*(a + s * d for a, d in zip(operands, directions, strict=True)), dout)[1:]
        for s in (step, -step)
    )
    return [(a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True)]


@pytest.mark.parametrize("mode", ["reverse", "forward"])
@pytest.mark.parametrize(
    ("implementation", "dtype", "residuals"),
    [
        ("xla", "float64", "gate_up"),
        *((None, "float64", residuals) for residuals in RESIDUALS),
        *(("host", "float32", residuals) for residuals in RESIDUALS),
    ],
)
def test_hessian_vector_product(implementation, dtype, residuals, mode):
    """Of the gradient, by reverse or by forward mode."""
    inputs = draw(5, 8, 12, 6, dtype)
    directions = draw(5, 8, 12, 6, dtype, seed=1).operands
    function = op(implementation=implementation, residuals=residuals)

    def loss(*args):
        return (function(*args) * inputs.dout).sum()

    def slope(*args):
        grads = jax.grad(loss, ALL)(*args)
        return sum((g * d).sum() for g, d in zip(grads, directions, strict=True))

    with jax.enable_x64(dtype == "float64"):
        if mode == "reverse":
            got = jax.jit(jax.grad(slope, ALL))(*inputs.operands)
        else:
            got = jax.jvp(jax.grad(loss, ALL), inputs.operands, directions)[1]
    # Central differences in float64 are good to about 1e-9.
    for g, want in zip(got, second(inputs, directions), strict=True):
        assert g.dtype == dtype
        check_value(g, want, 1e-7 if dtype == "float64" else TOLERANCE["float32"])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("implementation", ["xla", None])
def test_third_derivative(implementation):
    """Of a scalar chain, by central differences of the closed second derivative."""

    def f(x):
        one = jnp.ones((1, 1))
        return js.swiglu_mlp(x.reshape(1, 1), one, one, one, implementation=implementation)[0, 0]

    # f(x) = x^2 s(x): f' = 2 x s + x^2 s (1 - s), and numerically twice more.
    def first(x):
        s = 1 / (1 + np.exp(-x))
        return 2 * x * s + x**2 * s * (1 - s)

    x, step = 0.7, 1e-4
    want = (first(x + step) - 2 * first(x) + first(x - step)) / step**2
    got = jax.grad(jax.grad(jax.grad(f)))(jnp.float64(x))
    assert float(got) == pytest.approx(want, rel=1e-6)


# Forward mode.


@ours
def test_forward_mode_is_refused(implementation):
    inputs = draw(5, 8, 12, 6, "float32")
    operands = tuple(map(jnp.asarray, inputs.operands))
    with pytest.raises(TypeError, match=r"forward-mode.*custom_vjp"):
        jax.jvp(op(implementation=implementation), operands, operands)


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
def test_forward_mode_of_xla(layout):
    inputs = draw(5, 8, 12, 6, "float32", layout=layout)
    directions = draw(5, 8, 12, 6, "float32", layout=layout, seed=1).operands
    function = op(implementation="xla", weight_layout=layout)
    out, tangent = jax.jvp(function, inputs.operands, directions)
    check_value(out, mlp(*inputs.operands, layout=layout), TOLERANCE["float32"])
    # <dout, tangent> = <grads, directions>
    _, *grads = mlp_and_grads(*inputs, layout=layout)
    want = sum((g * d).sum() for g, d in zip(grads, wide(*directions), strict=True))
    assert float((inputs.dout * tangent).sum()) == pytest.approx(want, rel=1e-5)
    operands = wide(*inputs.operands)
    ahead, behind = (
        mlp(*(a + s * d for a, d in zip(operands, wide(*directions), strict=True)), layout=layout)
        for s in (1e-5, -1e-5)
    )
    check_value(tangent, (ahead - behind) / 2e-5, TOLERANCE["float32"])


def test_forward_jacobian_of_xla():
    x, *weights = map(jnp.asarray, draw(2, 3, 4, 5, "float32").operands)
    function = op(implementation="xla")
    forward, backward = (
        jacobian(lambda x: function(x, *weights))(x) for jacobian in (jax.jacfwd, jax.jacrev)
    )
    np.testing.assert_allclose(forward, backward, rtol=1e-5, atol=1e-6)


# Shapes of x.


@everywhere
@pytest.mark.parametrize("leading", [(), (1,), (7,), (2, 3), (2, 1, 3, 2), (1,) * 6], ids=str)
def test_leading_dimensions(leading, implementation):
    rows = int(np.prod(leading))
    inputs = draw(rows, 24, 40, 16, "bfloat16")
    shaped = inputs._replace(
        x=inputs.x.reshape(*leading, 24), dout=inputs.dout.reshape(*leading, 16)
    )
    got = jax.jit(functools.partial(with_grads, op(implementation=implementation)))(*shaped)
    assert got[0].shape == (*leading, 16)
    assert got[1].shape == (*leading, 24)
    # A single row has few elements: single roundings do not average out.
    tolerance = TOLERANCE["bfloat16"] * (2 if rows == 1 else 1)
    flat = (got[0].reshape(rows, 16), got[1].reshape(rows, 24), *got[2:])
    check(flat, inputs, tolerance=tolerance)


@everywhere
@pytest.mark.parametrize(
    ("leading", "h", "i", "o"),
    [
        ((0,), 8, 12, 6),
        ((2, 0, 3), 8, 12, 6),
        ((0, 0), 8, 12, 6),
        ((4,), 8, 0, 6),
        ((), 8, 0, 6),
        ((4,), 0, 12, 6),
        ((2, 4), 0, 12, 6),
        ((), 0, 12, 6),
        ((4,), 8, 12, 0),
        ((2, 3), 8, 12, 0),
        ((0,), 0, 0, 0),
    ],
    ids=str,
)
def test_zero_sizes(leading, h, i, o, implementation):
    shapes = [(*leading, h), (h, i), (h, i), (i, o), (*leading, o)]
    args = [jnp.ones(shape, jnp.bfloat16) for shape in shapes]
    got = with_grads(op(implementation=implementation), *args)
    for g, shape in zip(got, [shapes[-1], *shapes[:-1]], strict=True):
        # Every sum is empty.
        np.testing.assert_array_equal(np.asarray(g, np.float32), np.zeros(shape))


# shard_map: each device has some rows and all weights.


def rows_mesh(devices):
    return jax.make_mesh(
        (devices,),
        ("dp",),
        axis_types=(AxisType.Auto,),
        devices=jax.devices("cpu")[:devices],
    )


@everywhere
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained weights", "frozen weights"])
def test_shard_map_over_rows(frozen, devices, implementation):
    inputs = draw(8, 24, 40, 16, "float32")
    mesh = rows_mesh(devices)
    function = jax.shard_map(
        op(implementation=implementation),
        mesh=mesh,
        in_specs=(P("dp"), P(), P(), P()),
        out_specs=P("dp"),
        check_vma=True,
    )
    want = mlp_and_grads(*inputs)
    if frozen:
        x, *weights, dout = inputs
        got = jax.jit(lambda x, dout: with_grads(lambda x: function(x, *weights), x, dout))(x, dout)
        want = want[:2]
    else:
        got = jax.jit(functools.partial(with_grads, function))(*inputs)
    for name, g, right in zip(NAMES, got, want, strict=False):
        check_value(g, right, TOLERANCE["float32"], name)


@everywhere
@pytest.mark.parametrize("devices", [1, 2])
def test_scan_inside_shard_map(devices, implementation):
    x, stacks, dout = stacked(24, 40, "float32", m=8)
    mesh = rows_mesh(devices)

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("dp"), P(), P(), P(), P("dp")),
        out_specs=(P("dp"), P("dp"), P(), P(), P()),
        check_vma=True,
    )
    def step(x, *args):
        return with_grads(
            functools.partial(scan_layers, op(implementation=implementation)), x, *args
        )

    got = jax.jit(step)(x, *stacks, dout)
    for name, g, want in zip(NAMES, got, residual_stream(x, stacks, dout), strict=True):
        check_value(g, want, LAYERS * TOLERANCE["float32"], name)
