"""Values and gradients against float64: all implementations, dtypes, layouts and routes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _reference64 import (
    NAMES,
    TOLERANCE,
    check,
    check_value,
    draw,
    mlp_and_grads,
    relative_error,
    sigmoid,
    wide,
)

import jax_swiglu as js
from jax_swiglu import _ffi, _vjp
from jax_swiglu._config import Config, op_params
from jax_swiglu._primitives import matmul_p

LAYOUTS = ("in_out", "out_in")
RESIDUALS = ("gate_up", "full", "input")
HALF = ("bfloat16", "float16")
# Every implementation that runs on a CPU, with the dtypes it takes.
RUNS = [
    *itertools.product(("host",), (*HALF, "float32")),
    *itertools.product(("xla", None), (*HALF, "float32", "float64")),
]


def with_grads(function, inputs):
    @jax.jit
    def run(*args):
        out, pullback = jax.vjp(function, *args[:-1])
        return (out, *pullback(args[-1]))

    return run(*inputs)


def mlp_with_grads(inputs, **options):
    """(out, dx, dw_gate, dw_up, dw_down) of `swiglu_mlp`."""
    with jax.enable_x64(inputs.x.dtype == np.float64):
        return with_grads(functools.partial(js.swiglu_mlp, **options), inputs)


@pytest.mark.parametrize("residuals", RESIDUALS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("implementation", "dtype"), RUNS)
def test_mlp(implementation, dtype, layout, residuals):
    inputs = draw(13, 40, 77, 24, dtype, layout=layout)
    got = mlp_with_grads(
        inputs, weight_layout=layout, residuals=residuals, implementation=implementation
    )
    check(got, inputs, layout=layout)


# A broken epilogue cannot hide under an absolute tolerance at all of these.
@pytest.mark.parametrize("scale", [0.02, 1, 8])
@pytest.mark.parametrize(("implementation", "dtype"), RUNS)
def test_input_scales(implementation, dtype, scale):
    inputs = draw(24, 40, 32, 40, dtype, scale=scale)
    check(mlp_with_grads(inputs, implementation=implementation), inputs)


# (M, H, I, O): sizes of real models that no vector width divides, single rows, columns and terms.
@pytest.mark.parametrize(
    "sizes",
    [
        (5, 64, 3420, 64),
        (7, 40, 1376, 40),
        (1, 1001, 129, 33),
        (61, 24, 777, 8),
        (3, 1, 1, 1),
        (1, 2, 3, 5),
    ],
    ids=lambda sizes: "x".join(map(str, sizes)),
)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("implementation", ["host", "xla"])
def test_odd_sizes(implementation, dtype, sizes):
    inputs = draw(*sizes, dtype)
    # With so few elements the errors of single roundings do not average out.
    tolerance = TOLERANCE[dtype] * (4 if sizes[2] <= 3 else 1)
    check(mlp_with_grads(inputs, implementation=implementation), inputs, tolerance=tolerance)


# The routes of matmul differ only with two products: dx = dgate @ w_gate^T + dup @ w_up^T.
# Its plain GEMMs know one route, so those of the backward pass cannot be forced through the config.
ROUTES = {
    "glu_fwd": ("dual", "epilogue", "pointwise"),
    "glu_bwd": ("epilogue", "pointwise"),
    "matmul": ("epilogue", "pointwise"),
}


def test_all_routes_are_known():
    for op, routes in ROUTES.items():
        assert tuple(_ffi.routes(op, True)) == routes
    for op in ("glu_fwd", "glu_bwd"):
        assert tuple(_ffi.routes(op, False)) == ROUTES[op]
    assert _ffi.routes("matmul", False) == ["gemm"]


@pytest.mark.parametrize("residuals", RESIDUALS)
@pytest.mark.parametrize("dtype", [*HALF, "float32"])
@pytest.mark.parametrize("glu_bwd_route", ROUTES["glu_bwd"])
@pytest.mark.parametrize("glu_fwd_route", ROUTES["glu_fwd"])
def test_glu_routes(glu_fwd_route, glu_bwd_route, dtype, residuals):
    inputs = draw(11, 36, 53, 20, dtype)
    config = Config(
        dtype=np.dtype(dtype),
        implementation="host",
        residuals=residuals,
        glu_fwd_route=glu_fwd_route,
        glu_bwd_route=glu_bwd_route,
    )
    check(with_grads(functools.partial(_vjp.swiglu_mlp, config), inputs), inputs)


@pytest.mark.parametrize("transposed", [*itertools.product((False, True), repeat=2)], ids=str)
@pytest.mark.parametrize("out_dtype", ["same", "float32"])
@pytest.mark.parametrize("dtype", [*HALF, "float32"])
@pytest.mark.parametrize("route", ["gemm", *ROUTES["matmul"]])
def test_matmul_routes(route, dtype, out_dtype, transposed):
    m, k, n = 9, 31, 14
    out_dtype = np.dtype(dtype if out_dtype == "same" else out_dtype)
    rng = np.random.default_rng(0)
    shapes = ((m, k), (k, n)) * (1 if route == "gemm" else 2)
    matrices = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    params = op_params(
        Config(dtype=np.dtype(dtype), implementation="host"),
        route,
        lhs_transposed=transposed[0],
        rhs_transposed=transposed[1],
        extra=route != "gemm",
        out_dtype=out_dtype,
    )
    stored = [
        np.ascontiguousarray(matrix.T) if t else matrix
        for matrix, t in zip(matrices, itertools.cycle(transposed))
    ]
    (got,) = matmul_p.bind(*map(jnp.asarray, stored), params=params)
    assert got.dtype == out_dtype
    a, b, *second = wide(*matrices)
    want = a @ b + (second[0] @ second[1] if second else 0)
    check_value(got, want, TOLERANCE[str(out_dtype)])


def test_unknown_route_is_an_error():
    inputs = draw(2, 3, 4, 5, "bfloat16")
    config = Config(dtype=np.dtype("bfloat16"), implementation="host", glu_fwd_route="scenic")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"glu_fwd .*no route scenic"):
        _vjp.swiglu_mlp(config, *map(jnp.asarray, inputs.operands))


@pytest.mark.parametrize(
    ("layout", "residuals"), [("in_out", r) for r in RESIDUALS] + [("out_in", "gate_up")]
)
@pytest.mark.parametrize(("implementation", "dtype"), RUNS)
def test_gated_half(implementation, dtype, residuals, layout):
    x, w_gate, w_up, _, _ = draw(13, 40, 77, 1, dtype)
    dh = draw(13, 1, 1, 77, dtype, seed=1).dout
    stored = [w_gate, w_up] if layout == "in_out" else [w_gate.T.copy(), w_up.T.copy()]
    function = functools.partial(
        js.swiglu, implementation=implementation, residuals=residuals, weight_layout=layout
    )
    with jax.enable_x64(dtype == "float64"):
        got = with_grads(function, (x, *stored, dh))
    x, w_gate, w_up, dh = wide(x, w_gate, w_up, dh)
    gate, up = x @ w_gate, x @ w_up
    s = sigmoid(gate)
    dgate, dup = dh * up * (s + gate * s * (1 - s)), dh * gate * s
    want = (gate * s * up, dgate @ w_gate.T + dup @ w_up.T, x.T @ dgate, x.T @ dup)
    if layout == "out_in":
        want = (*want[:2], want[2].T, want[3].T)
    for name, g, w in zip(("h", *NAMES[1:]), got, want, strict=False):
        assert g.dtype == dtype
        check_value(g, w, TOLERANCE[dtype], name)


# Required accuracy: at most 1.1 times the error of the plain XLA computation in the same dtype.


def plain(x, w_gate, w_up, w_down):
    """What people write without us."""
    return (jax.nn.silu(x @ w_gate) * (x @ w_up)) @ w_down


def accuracy_inputs(dtype, scale):
    # Thousands of elements everywhere: the errors that are compared are statistics, not luck.
    return draw(128, 64, 96, 64, dtype, scale=scale)


@functools.cache
def plain_errors(dtype, scale):
    """The right values, and how far the plain computation is from them."""
    inputs = accuracy_inputs(dtype, scale)
    want = mlp_and_grads(*inputs)
    got = with_grads(plain, inputs)
    return want, [relative_error(g, w) for g, w in zip(got, want, strict=True)]


@pytest.mark.parametrize("scale", [0.02, 1, 8])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("implementation", "residuals"),
    [*itertools.product(("host", None), RESIDUALS), ("xla", "gate_up")],
)
def test_no_less_accurate_than_plain_xla(implementation, residuals, dtype, scale):
    ours = mlp_with_grads(
        accuracy_inputs(dtype, scale), implementation=implementation, residuals=residuals
    )
    rights, bars = plain_errors(dtype, scale)
    for name, got, right, bar in zip(NAMES, ours, rights, bars, strict=True):
        error = relative_error(got, right)
        assert error <= 1.1 * bar, f"{name}: {error:.3g} against {bar:.3g} of plain XLA"


# Float32 master weights. "xla" is plain JAX: its gradients pass through the computation dtype.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("implementation", ["host", None])
def test_weight_gradients_of_float32_weights_skip_bfloat16(implementation, layout):
    # Terms of one sign, so that their errors average out and only the last rounding is left.
    rounded = draw(256, 24, 40, 32, "bfloat16", layout=layout, positive=True)
    master = rounded._replace(
        **{w: getattr(rounded, w).astype(np.float32) for w in rounded._fields[1:4]}
    )
    want = mlp_and_grads(*rounded, layout=layout)
    options = {"implementation": implementation, "weight_layout": layout, "dtype": "bfloat16"}
    out, dx, *fine = mlp_with_grads(master, **options)
    _, _, *coarse = mlp_with_grads(rounded, **options)
    assert out.dtype == dx.dtype == jnp.bfloat16
    for name, f, c, right in zip(NAMES[2:], fine, coarse, want[2:], strict=True):
        assert (f.dtype, c.dtype) == (jnp.float32, jnp.bfloat16)
        error, rounded_error = relative_error(f, right), relative_error(c, right)
        assert error < rounded_error / 2, f"{name}: {error:.3g} against {rounded_error:.3g}"


@pytest.mark.parametrize("implementation", ["host", None])
def test_input_gradient_of_float32_input_skips_bfloat16(implementation):
    rounded = draw(32, 48, 256, 24, "bfloat16", positive=True)
    want = mlp_and_grads(*rounded)[1]
    fine, coarse = (
        mlp_with_grads(rounded._replace(x=x), implementation=implementation, dtype="bfloat16")[1]
        for x in (rounded.x.astype(np.float32), rounded.x)
    )
    assert (fine.dtype, coarse.dtype) == (jnp.float32, jnp.bfloat16)
    assert relative_error(fine, want) < relative_error(coarse, want) / 2


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("implementation", ["host", "xla", None])
def test_output_does_not_depend_on_residuals(implementation, dtype):
    """gate and up are rounded before the activation, whether they are kept or not."""
    inputs = draw(64, 96, 160, 32, dtype)
    alone = jax.jit(functools.partial(js.swiglu_mlp, implementation=implementation))
    want = np.asarray(alone(*inputs.operands), np.float32)
    for residuals in RESIDUALS:
        got = mlp_with_grads(inputs, implementation=implementation, residuals=residuals)[0]
        np.testing.assert_array_equal(np.asarray(got, np.float32), want, err_msg=residuals)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("route", ROUTES["glu_fwd"])
def test_gate_and_up_are_rounded_before_the_activation(route, dtype):
    x, w_gate, w_up, _, _ = draw(64, 96, 160, 8, dtype)
    config = Config(dtype=np.dtype(dtype), implementation="host", glu_fwd_route=route)
    gate, up = (
        np.asarray(jnp.dot(x, w, preferred_element_type=jnp.float32)).astype(dtype)
        for w in (w_gate, w_up)
    )
    wide_gate, wide_up = wide(gate, up)
    want = (wide_gate * sigmoid(wide_gate) * wide_up).astype(dtype)
    for save in (False, True):
        h, *saved = _vjp._glu_fwd(config, *map(jnp.asarray, (x, w_gate, w_up)), save=save)
        # Another order of summation moves a few values to the neighbouring 16-bit number. If gate
        # and up were not rounded, a third of h would differ.
        assert np.mean(np.asarray(h) != want) < 0.02
        for got, right in zip(saved, (gate, up), strict=False):
            assert np.mean(np.asarray(got) != right) < 0.02


# 16-bit conversions of the plain C++ evaluator.


def host_gemm(a, b, out_dtype):
    params = op_params(
        Config(dtype=a.dtype, implementation="host"), "", rhs_transposed=False, out_dtype=out_dtype
    )
    return np.asarray(matmul_p.bind(jnp.asarray(a), jnp.asarray(b), params=params)[0])


# All patterns are read, signalling NaNs too, of which NumPy warns.
SIGNALLING_NANS = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")


@SIGNALLING_NANS
@pytest.mark.parametrize("dtype", HALF)
def test_host_reads_and_writes_every_16_bit_number(dtype):
    patterns = np.arange(2**16, dtype=np.uint16)
    values = patterns.view(dtype).reshape(-1, 1)
    got = host_gemm(values, np.ones((1, 1), dtype), np.dtype(dtype))
    nan = np.isnan(values)
    # A NaN may lose its payload. The sum starts from +0, which swallows the sign of -0.
    assert np.isnan(got[nan]).all()
    keep = ~nan & (values != 0)
    np.testing.assert_array_equal(got.view(np.uint16)[keep], patterns.reshape(-1, 1)[keep])
    assert (got[values == 0] == 0).all()
    widened = host_gemm(values, np.ones((1, 1), dtype), np.dtype(np.float32))
    np.testing.assert_array_equal(widened, values.astype(np.float32))


@SIGNALLING_NANS
@pytest.mark.parametrize("dtype", HALF)
def test_host_rounds_to_nearest_even(dtype):
    patterns = np.arange(2**16, dtype=np.uint16).view(dtype)
    numbers = np.unique(patterns[np.isfinite(patterns)].astype(np.float32))
    halfway = (numbers[:-1].astype(np.float64) + numbers[1:]) / 2
    halfway = halfway.astype(np.float32)  # exact: one more bit than a 16-bit number
    largest, step = np.float64(numbers[-1]), np.float64(numbers[-1]) - numbers[-2]
    overflow = np.float32(largest + step / 2)  # the tie between the largest number and infinity
    values = np.concatenate(
        [
            numbers,
            halfway,
            np.nextafter(halfway, np.float32(np.inf)),
            np.nextafter(halfway, np.float32(-np.inf)),
            [overflow, -overflow, np.nextafter(overflow, np.float32(0)), 3e38, -3e38, np.inf],
            np.random.default_rng(0).standard_normal(4096).astype(np.float32),
        ],
        dtype=np.float32,
    ).reshape(-1, 1)
    got = host_gemm(values, np.ones((1, 1), np.float32), np.dtype(dtype))
    with np.errstate(over="ignore"):
        want = values.astype(dtype)
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
