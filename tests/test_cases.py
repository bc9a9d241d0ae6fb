"""Small cases that others got wrong with this kind of operation, and their right answers."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _programs import with_grads
from _reference64 import TOLERANCE, Inputs, check, check_value, draw, mlp, mlp_and_grads, wide

import jax_swiglu as js
from jax_swiglu import _primitives, _vjp
from jax_swiglu._config import Config

ALL = (0, 1, 2, 3)
IMPLEMENTATIONS = ["host", "xla", None]
everywhere = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def mlp_with_grads(inputs, **options):
    run = jax.jit(functools.partial(with_grads, functools.partial(js.swiglu_mlp, **options)))
    return run(*inputs)


# Batching rules that expect every operand to be mapped.


@everywhere
def test_jacobian(implementation):
    inputs = draw(4, 8, 16, 8, "float32")
    jacobians = jax.jacrev(functools.partial(js.swiglu_mlp, implementation=implementation), ALL)(
        *map(jnp.asarray, inputs.operands)
    )
    # Row (m, o) of each Jacobian is the gradient of out[m, o].
    for m, o in np.ndindex(4, 8):
        dout = np.zeros((4, 8))
        dout[m, o] = 1
        _, *want = mlp_and_grads(*inputs.operands, dout)
        for jacobian, right in zip(jacobians, want, strict=True):
            check_value(jacobian[m, o], right, TOLERANCE["float32"])


@everywhere
@pytest.mark.parametrize("mapped", [0, 1], ids=["x", "w_gate"])
def test_vmap_of_grad_with_one_mapped_operand(mapped, implementation):
    batch = 3
    draws = [draw(4, 8, 16, 8, "float32", seed=seed) for seed in range(batch)]
    operands = list(draws[0].operands)
    operands[mapped] = np.stack([d[mapped] for d in draws])

    def loss(*args):
        return js.swiglu_mlp(*args, implementation=implementation).sum()

    in_axes = tuple(0 if i == mapped else None for i in ALL)
    grads = jax.vmap(jax.grad(loss, ALL), in_axes)(*map(jnp.asarray, operands))
    for b in range(batch):
        one = [a[b] if i == mapped else a for i, a in enumerate(operands)]
        _, *want = mlp_and_grads(*one, np.ones((4, 8)))
        for grad, right in zip(grads, want, strict=True):
            check_value(grad[b], right, TOLERANCE["float32"])


# Early returns for no work that leave results unwritten.


def poison():
    """Frees a buffer full of NaN, which memory that nobody writes may show."""
    jax.block_until_ready(jnp.full((64, 128), jnp.nan, jnp.bfloat16))


@everywhere
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_rows(dtype, implementation):
    inputs = draw(0, 64, 128, 64, dtype)
    poison()
    out, dx, *dweights = mlp_with_grads(inputs, implementation=implementation)
    assert out.shape == dx.shape == (0, 64)
    for dw, w in zip(dweights, inputs.operands[1:], strict=True):
        assert dw.dtype == dtype
        np.testing.assert_array_equal(np.asarray(dw, np.float32), np.zeros(w.shape))


@everywhere
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_intermediate(dtype, implementation):
    inputs = draw(4, 64, 1, 64, dtype)
    inputs = Inputs(
        inputs.x, inputs.w_gate[:, :0], inputs.w_up[:, :0], inputs.w_down[:0], inputs.dout
    )
    poison()
    out, dx, *dweights = mlp_with_grads(inputs, implementation=implementation)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.zeros((4, 64)))
    np.testing.assert_array_equal(np.asarray(dx, np.float32), np.zeros((4, 64)))
    assert [dw.shape for dw in dweights] == [(64, 0), (64, 0), (0, 64)]


# Sizes that no vector width divides, and what is called after them.


@everywhere
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_intermediate_of_3420(dtype, implementation):
    for inputs in (draw(5, 64, 3420, 64, dtype), draw(5, 64, 128, 64, dtype)):
        check(mlp_with_grads(inputs, implementation=implementation), inputs)


# Slices of a stack whose layers are not aligned: layer 1 of [2, 3, 5] starts at byte 30.


@everywhere
@pytest.mark.parametrize("layer", [0, 1])
def test_misaligned_layer_of_a_stack(layer, implementation):
    draws = [draw(4, 3, 5, 3, "bfloat16", seed=seed) for seed in (0, 1)]
    stacks = [np.stack(pair) for pair in zip(*(d[1:4] for d in draws), strict=True)]

    @jax.jit
    def step(x, stacks, dout):
        function = functools.partial(js.swiglu_mlp, implementation=implementation)
        return with_grads(function, x, *(stack[layer] for stack in stacks), dout)

    chosen = draws[layer]._replace(x=draws[0].x, dout=draws[0].dout)
    # A dozen elements: single roundings do not average out.
    check(step(chosen.x, stacks, chosen.dout), chosen, tolerance=2 * TOLERANCE["bfloat16"])


# One plan used by many threads.


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_eight_threads_get_the_bits_of_one(dtype):
    inputs = draw(64, 32, 48, 32, dtype)
    step = jax.jit(
        functools.partial(with_grads, functools.partial(js.swiglu_mlp, implementation="host"))
    )
    args = [
        tuple(map(jnp.asarray, inputs._replace(x=inputs.x * np.asarray(s, dtype))))
        for s in (0.5, 1, 2, 4)
    ]

    def bits(results):
        return [np.asarray(r).tobytes() for r in results]

    alone = [bits(step(*a)) for a in args]
    assert len({want[0] for want in alone}) == len(args)

    def work(thread):
        return all(
            bits(step(*args[(thread + n) % len(args)])) == alone[(thread + n) % len(args)]
            for n in range(25)
        )

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [True] * 8


# Falling back where cuDNN cannot run, and only there.


def test_falls_back_where_cudnn_cannot_run(monkeypatch, custom_calls):
    """On a GPU that is too old the same call runs on XLA, and says so once."""
    status = _primitives._load.CudnnStatus(False, "this GPU has compute capability 7.0")
    monkeypatch.setattr(_primitives._load, "cudnn_status", lambda: status)
    _primitives._warn_once.cache_clear()
    args = draw(4, 8, 16, 8, "bfloat16").operands
    with pytest.warns(RuntimeWarning, match=r"runs on XLA: this GPU has compute capability 7\.0"):
        assert custom_calls(js.swiglu_mlp, *args) == []
    assert custom_calls(lambda *a: js.swiglu_mlp(*a) + 1, *args) == []  # no second warning
    with pytest.raises(NotImplementedError, match=r"compute capability 7\.0.*implementation=None"):
        custom_calls(functools.partial(js.swiglu_mlp, implementation="cudnn"), *args)


@pytest.mark.parametrize("op", ["glu_fwd", "glu_bwd", "matmul"])
def test_failure_while_running_is_raised(op):
    """A handler that fails must not be absorbed, not even by falling back."""
    inputs = draw(4, 8, 16, 8, "bfloat16")
    config = Config(
        dtype=np.dtype("bfloat16"), implementation="host", **{f"{op}_route": "no such route"}
    )
    step = jax.jit(functools.partial(with_grads, functools.partial(_vjp.swiglu_mlp, config)))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jax_swiglu {op} .*m=.*k=.*bfloat16"):
        jax.block_until_ready(step(*inputs))
    check(mlp_with_grads(inputs, implementation="host"), inputs, tolerance=0.02)


# Swapped gate and up gradients; sums kept in too few bits.


def ones(rows, dtype):
    return Inputs(
        np.ones((rows, 1), dtype),
        np.full((1, 1), 2, dtype),
        np.full((1, 1), 3, dtype),
        np.ones((1, 1), dtype),
        np.ones((rows, 1), dtype),
    )


@everywhere
@pytest.mark.parametrize("residuals", ["gate_up", "full", "input"])
def test_one_number(residuals, implementation):
    """gate = 2, up = 3: silu(2) = 2 sigmoid(2), its slope is sigmoid(2) (1 + 2 sigmoid(-2))."""
    got = mlp_with_grads(ones(1, "float32"), implementation=implementation, residuals=residuals)
    want = [5.284782, 11.829488, 3.272353, 1.761594, 5.284782]
    np.testing.assert_allclose(np.ravel(got), want, rtol=1e-6)


@everywhere
@pytest.mark.parametrize("weight_dtype", ["bfloat16", "float32"])
def test_weight_gradients_are_summed_in_float32(weight_dtype, implementation):
    inputs = ones(4096, "bfloat16")
    inputs = Inputs(inputs.x, *(w.astype(weight_dtype) for w in inputs.operands[1:]), inputs.dout)
    got = mlp_with_grads(inputs, implementation=implementation, dtype="bfloat16")
    # h = 5.284782 is 5.28125 in bfloat16; 4096 of them are exact in 8 bits.
    assert float(got[4][0, 0]) == 21632
    # dup = 1.761594 is 1.7578125 in bfloat16.
    assert float(got[3][0, 0]) == 4096 * 1.7578125
    # dgate = 3.272353 is 3.265625 or, the product being rounded after its factors, a neighbour.
    assert float(got[2][0, 0]) == pytest.approx(4096 * 3.272353, rel=2**-8)


@pytest.mark.parametrize("implementation", ["host", None])
def test_float32_weight_gradient_has_more_bits_than_bfloat16(implementation):
    rows = 4095
    inputs = ones(rows, "bfloat16")
    inputs = Inputs(inputs.x, *(w.astype("float32") for w in inputs.operands[1:]), inputs.dout)
    got = mlp_with_grads(inputs, implementation=implementation, dtype="bfloat16")
    assert float(got[4][0, 0]) == rows * 5.28125  # 21626.71875: 20 bits


# Cotangents whose dtype is not that of the computation.


@everywhere
@pytest.mark.parametrize("compute", ["bfloat16", "float16", "float32"])
def test_each_gradient_has_the_dtype_of_its_operand(compute, implementation):
    inputs = draw(32, 24, 40, 16, "bfloat16")
    dtypes = ("bfloat16", "float32", "float16", "float32")
    operands = [a.astype(d) for a, d in zip(inputs.operands, dtypes, strict=True)]
    args = (*operands, inputs.dout.astype(compute))
    got = mlp_with_grads(args, implementation=implementation, dtype=compute)
    assert [str(g.dtype) for g in got] == [compute, *dtypes]
    for g, want in zip(got, mlp_and_grads(*args), strict=True):
        check_value(g, want, 2 * TOLERANCE["bfloat16"])  # roundings of inputs come on top


def test_promotion_of_mixed_operands():
    """x bfloat16 and weights float32 compute in float32; no gradient is dropped."""
    inputs = draw(32, 24, 40, 16, "bfloat16")
    args = (inputs.x, *(w.astype("float32") for w in inputs[1:4]), inputs.dout.astype("float32"))
    with jax.numpy_dtype_promotion("standard"):
        got = mlp_with_grads(args)
    assert [str(g.dtype) for g in got] == ["float32", "bfloat16", *["float32"] * 3]
    for g, want in zip(got, mlp_and_grads(*args), strict=True):
        check_value(g, want, TOLERANCE[str(g.dtype)])


# Results written over something that is still needed.


@everywhere
@pytest.mark.parametrize("residuals", ["gate_up", "full", "input"])
def test_pullback_can_be_used_twice(residuals, implementation):
    inputs = draw(16, 24, 40, 24, "bfloat16")
    x, *weights = map(jnp.asarray, inputs.operands)

    def f(x):
        y = jnp.exp(x)
        function = functools.partial(
            js.swiglu_mlp, implementation=implementation, residuals=residuals
        )
        return function(y, *weights), y

    (_, y), pullback = jax.vjp(f, x)
    before = np.asarray(y).tobytes()
    cotangent = (jnp.asarray(inputs.dout), jnp.zeros_like(y))
    first, second = pullback(cotangent), pullback(cotangent)
    assert np.asarray(first[0]).tobytes() == np.asarray(second[0]).tobytes()
    assert np.asarray(y).tobytes() == before == np.asarray(jnp.exp(x)).tobytes()


@everywhere
def test_donated_input(implementation):
    inputs = draw(16, 24, 40, 24, "bfloat16")
    step = jax.jit(
        functools.partial(
            with_grads, functools.partial(js.swiglu_mlp, implementation=implementation)
        ),
        donate_argnums=0,
    )
    for _ in range(2):
        x = jnp.array(inputs.x)
        check(step(x, *inputs[1:]), inputs)
        assert x.is_deleted()


# Activations far out.


@everywhere
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("gate", [-1e4, 1e4])
def test_far_gates(gate, dtype, implementation):
    """silu(-1e4) = silu'(-1e4) = 0, silu(1e4) = 1e4 and silu'(1e4) = 1, with no NaN on the way."""
    args = [np.full((1, 1), a, dtype) for a in (1, gate, 3, 1, 1)]
    rounded = float(args[1][0, 0])
    out, dx, dw_gate, dw_up, dw_down = (
        float(a[0, 0]) for a in mlp_with_grads(args, implementation=implementation)
    )
    far = rounded if gate > 0 else 0
    product = float(np.asarray(far * 3).astype(dtype))
    assert (out, dw_gate, dw_up, dw_down) == (product, 3 if gate > 0 else 0, far, product)
    # dx = dup * up + dgate * gate = 2 * 3 * gate
    assert dx == pytest.approx(2 * 3 * far, rel=TOLERANCE[dtype])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("implementation", ["xla", None])
@pytest.mark.parametrize("gate", [-700.0, -709.0, -740.0, -40.0, 40.0, 709.0])
def test_far_gates_in_float64(gate, implementation):
    """The slope of silu at -709 is -5.8e-306, not 0."""
    args = [np.full((1, 1), a, np.float64) for a in (1, gate, 3, 1, 1)]
    got = mlp_with_grads(args, implementation=implementation)
    e = np.exp(gate)  # sigmoid(gate) for very negative gates, and nearly subnormal
    slope = e * (1 + gate) if gate < -500 else mlp_and_grads(*args)[2][0, 0] / 3
    assert got[2].dtype == np.float64
    if abs(slope) > 1e-300:
        assert float(got[2][0, 0]) == pytest.approx(3 * slope, rel=1e-12)
    else:
        assert float(got[2][0, 0]) == pytest.approx(3 * slope, abs=1e-300)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("implementation", ["xla", None])
def test_float64_is_computed_in_float64(implementation):
    inputs = draw(8, 16, 24, 16, "float64")
    check(mlp_with_grads(inputs, implementation=implementation), inputs)


def test_float64_without_x64_is_not_silent():
    """JAX warns when an explicit float64 is truncated to float32; so must we."""
    inputs = draw(2, 3, 4, 5, "float32")
    with pytest.warns(UserWarning, match="float64"):
        js.swiglu_mlp(*inputs.operands, dtype="float64")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("implementation", ["host", "cudnn"])
def test_float64_is_refused_where_it_cannot_run(implementation):
    inputs = draw(2, 3, 4, 5, "float64")
    with pytest.raises(NotImplementedError, match="float64"):
        js.swiglu_mlp(*inputs.operands, implementation=implementation)


# Custom calls that nobody registered.

CALLS = """
x, w = jnp.ones((2, 8), jnp.bfloat16), jnp.full((8, 8), 0.125, jnp.bfloat16)
for implementation in ("host", None):
    f = jax.jit(lambda *a: jax_swiglu.swiglu_mlp(*a, implementation=implementation))
    print(float(f(x, w, w, w)[0, 0]))
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import jax_swiglu; import jax, jax.numpy as jnp",
        "import jax, jax.numpy as jnp; import jax_swiglu",
        "import jax_swiglu; import jax, jax.numpy as jnp; jax.devices()",
        "import jax, jax.numpy as jnp; jax.devices(); import jax_swiglu",
        "import jax, jax.numpy as jnp; jax.jit(jnp.sin)(1.0); import jax_swiglu",
    ],
    ids=["first", "last", "first, then devices", "devices, then last", "last, after a run"],
)
def test_order_of_imports(imports, run_python):
    done = run_python(["python", "-W", "error", "-c", imports + CALLS])
    assert done.returncode == 0, done.stderr
    # gate = up = 1, and silu(1) = 0.731 is 0.73046875 in bfloat16; out is the mean of eight.
    assert done.stdout.split() == ["0.73046875"] * 2


# Shape errors that only a library deep down reports.


@everywhere
def test_wrong_shapes_are_reported_while_tracing(implementation):
    x, w_gate = jax.ShapeDtypeStruct((4, 8), "float32"), jax.ShapeDtypeStruct((9, 16), "float32")
    w_down = jax.ShapeDtypeStruct((16, 8), "float32")
    function = functools.partial(js.swiglu_mlp, implementation=implementation)
    with pytest.raises(ValueError, match=r"\(9, 16\).*\(4, 8\)|\(4, 8\).*\(9, 16\)"):
        jax.eval_shape(function, x, w_gate, w_gate, w_down)


# Many rows: the value of a row does not depend on the others.


@everywhere
def test_rows_are_independent(implementation):
    inputs = draw(130, 24, 40, 16, "bfloat16")
    function = jax.jit(functools.partial(js.swiglu_mlp, implementation=implementation))
    want = mlp(*inputs.operands)
    check_value(function(*inputs.operands), want, TOLERANCE["bfloat16"])
    tail = function(inputs.x[-2:], *inputs.operands[1:])
    check_value(tail, wide(want)[0][-2:], 2 * TOLERANCE["bfloat16"])
