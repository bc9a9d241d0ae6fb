"""Small cases on the GPU: faults that other projects had with this job, and the right answers."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _programs import with_grads
from _reference64 import TOLERANCE, Inputs, check, draw, mlp_and_grads, relative_error

import jax_swiglu as js
from jax_swiglu import _ffi, _load, _primitives, _vjp
from jax_swiglu._config import Config
from jax_swiglu._warm import warm
from jax_swiglu.convert import Packing, pack, unpack

HALF = ["bfloat16", "float16"]
GLU_FWD_ROUTES = ("dual", "epilogue", "pointwise")
GLU_BWD_ROUTES = ("epilogue", "pointwise")


def run(args, **config):
    config = Config(dtype=np.dtype(args[0].dtype), implementation="cudnn", **config)
    mlp = functools.partial(_vjp.swiglu_mlp, config)
    return jax.jit(functools.partial(with_grads, mlp))(*args)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("glu_bwd_route", GLU_BWD_ROUTES)
@pytest.mark.parametrize("glu_fwd_route", GLU_FWD_ROUTES)
@pytest.mark.parametrize(
    "sizes", [(5, 64, 3420, 64), (1, 40, 129, 40), (333, 1001, 777, 33), (13, 3, 5, 2)], ids=str
)
def test_odd_sizes(sizes, glu_fwd_route, glu_bwd_route, dtype):
    args = draw(*sizes, dtype)
    got = run(args, glu_fwd_route=glu_fwd_route, glu_bwd_route=glu_bwd_route)
    check(got, args)


@pytest.mark.parametrize("route", GLU_FWD_ROUTES)
def test_h_does_not_depend_on_whether_gate_and_up_are_saved(route):
    """And the pointwise graphs that overwrite an operand in place give the same on every run."""
    x, w_gate, w_up, _, _ = draw(777, 512, 1376, 8, "bfloat16")
    config = Config(dtype=np.dtype("bfloat16"), implementation="cudnn", glu_fwd_route=route)
    h, gate, up = jax.jit(functools.partial(_vjp._glu_fwd, config, save=True))(x, w_gate, w_up)
    alone = jax.jit(functools.partial(_vjp._glu_fwd, config, save=False))
    want = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    # One rounding to 8 bits: gate and up were rounded before the activation.
    np.testing.assert_allclose(h.astype(jnp.float32), want, rtol=2**-8, atol=1e-30)
    for _ in range(5):
        np.testing.assert_array_equal(alone(x, w_gate, w_up)[0], h)


def test_zero_sizes():
    args = draw(0, 64, 128, 64, "bfloat16")
    out, dx, *dweights = run(args)
    assert out.shape == dx.shape == (0, 64)
    assert all(not np.asarray(dw, np.float32).any() for dw in dweights)
    x, w, d = jnp.ones((4, 64)), jnp.ones((64, 0)), jnp.ones((0, 64))
    np.testing.assert_array_equal(jax.jit(js.swiglu_mlp)(x, w, w, d), np.zeros((4, 64)))


@pytest.mark.parametrize("layer", [0, 1])
def test_misaligned_slice_of_a_stack(layer):
    """Layer 1 of a bfloat16 [2, 3, 5] stack starts at byte 30."""
    draws = [draw(4, 3, 5, 3, "bfloat16", seed=seed) for seed in (1, 2)]
    stacks = [jnp.stack(pair) for pair in zip(*(d[1:4] for d in draws), strict=True)]
    x, dout = draws[0][0], draws[0][4]

    @jax.jit
    def step(x, stacks, dout):
        weights = [stack[layer] for stack in stacks]
        mlp = functools.partial(js.swiglu_mlp, implementation="cudnn")
        return with_grads(mlp, x, *weights, dout)

    check(step(x, stacks, dout), Inputs(x, *(s[layer] for s in stacks), dout))


def test_scan_over_a_stack_of_odd_size():
    layers, m, h, i = 4, 5, 33, 77
    rng = np.random.default_rng(0)
    stacks = [
        jnp.asarray(rng.standard_normal((layers, *shape)) * shape[0] ** -0.5, "bfloat16")
        for shape in ((h, i), (h, i), (i, h))
    ]
    x = jnp.asarray(rng.standard_normal((m, h)), "bfloat16")

    def scan(implementation):
        def loss(x, *stacks):
            def layer(x, weights):
                return x + js.swiglu_mlp(x, *weights, implementation=implementation), None

            return jax.lax.scan(layer, x, stacks)[0].astype(jnp.float32).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(x, *stacks)

    got, want = scan("cudnn"), scan("xla")
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        assert np.linalg.norm(g - w) <= 2e-2 * np.linalg.norm(w)
    # The CUDA context is alive.
    np.testing.assert_array_equal(jnp.ones(3) + 1, 2)


def test_failure_is_not_absorbed():
    args = draw(8, 64, 128, 64, "bfloat16")
    message = r"glu_fwd .*m=8 k=64 n=128.*no route nope"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(run(args, glu_fwd_route="nope"))
    check(run(args), args)


@pytest.mark.parametrize("dtype", HALF)
def test_scalar_closed_form(dtype):
    args = [jnp.full((1, 1), value, dtype) for value in (1, 2, 3, 1, 1)]
    want = (5.284782, 11.829488, 3.272353, 1.761594, 5.284782)
    for g, w in zip(run(args), want, strict=True):
        assert float(g[0, 0]) == pytest.approx(w, rel=TOLERANCE[dtype])


def test_weight_gradient_is_accumulated_in_float32():
    rows = 4096
    args = [
        jnp.full(shape, value, "bfloat16")
        for shape, value in (((rows, 1), 1), ((1, 1), 2), ((1, 1), 3), ((1, 1), 1), ((rows, 1), 1))
    ]
    assert float(run(args)[4][0, 0]) == 21632


def proposals(route, op, extra_shape):
    """How many plans cuDNN proposes for the last graph of a route."""
    m, h, i = extra_shape
    args = draw(m, h, i, h, "bfloat16")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"cuDNN proposes \d+ plans") as error:
        jax.block_until_ready(run(args, **{f"{op}_route": f"{route}:9999"}))
    return int(str(error.value).split("cuDNN proposes ")[1].split()[0])


@pytest.mark.parametrize(
    ("op", "route"), [("glu_fwd", "dual"), ("glu_fwd", "epilogue"), ("glu_bwd", "epilogue")]
)
def test_every_candidate_plan_is_right(op, route):
    shape = (512, 1024, 512)
    count = proposals(route, op, shape)
    assert count > 0
    ran = 0
    batches = [draw(*shape, 1024, "bfloat16", scale=scale) for scale in (0.02, 1, 8)]
    wants = [mlp_and_grads(*args) for args in batches]
    for index in range(count):
        for args, want in zip(batches, wants, strict=True):
            try:
                got = jax.block_until_ready(run(args, **{f"{op}_route": f"{route}:{index}"}))
            except jax.errors.JaxRuntimeError as error:
                if "cuDNN: plan" not in str(error):
                    raise
                break  # it cannot be built, so it is never chosen
            ran += 1
            for g, w in zip(got, want, strict=True):
                assert relative_error(g, w) <= 1e-2, f"{op} {route}:{index}"
    assert ran >= 3


def test_mixed_dtypes():
    x, *weights, dout = draw(64, 32, 48, 32, "float32")
    mlp = functools.partial(js.swiglu_mlp, dtype=jnp.bfloat16, implementation="cudnn")
    args = (x.astype(jnp.bfloat16), *weights, dout.astype(jnp.bfloat16))
    out, dx, *dweights = got = jax.jit(functools.partial(with_grads, mlp))(*args)
    assert out.dtype == dx.dtype == jnp.bfloat16
    assert all(dw.dtype == jnp.float32 for dw in dweights)
    # The operation rounds the weights to bfloat16 first.
    rounded = [
        np.asarray(a, np.float64) for a in jax.tree.map(lambda a: a.astype("bfloat16"), args)
    ]
    for g, w in zip(got, mlp_and_grads(*rounded), strict=True):
        assert relative_error(g, w) <= TOLERANCE["bfloat16"]


def test_pullback_twice_and_donation():
    x, *weights, dout = draw(32, 64, 128, 64, "bfloat16")
    y = jnp.exp(x)
    _, pullback = jax.vjp(lambda x: js.swiglu_mlp(jnp.exp(x), *weights), x)
    np.testing.assert_array_equal(pullback(dout)[0], pullback(dout)[0])
    np.testing.assert_array_equal(jnp.exp(x), y)
    want = js.swiglu_mlp(x, *weights)
    donated = jax.jit(js.swiglu_mlp, donate_argnums=0)(x, *weights)
    np.testing.assert_array_equal(donated, want)


@pytest.mark.parametrize("gate", [1e4, -1e4])
def test_extreme_gates(gate):
    args = [jnp.full((1, 1), v, "bfloat16") for v in (1, gate, 1, 1, 1)]
    out, dx, dw_gate, _, _ = run(args)
    slope = 1.0 if gate > 0 else 0.0
    assert float(dw_gate[0, 0]) == slope
    assert float(out[0, 0]) == pytest.approx(max(gate, 0), rel=1e-2)
    assert np.isfinite(float(dx[0, 0]))


@pytest.mark.parametrize(
    "mapped", [(0, None, None, None), (None, 0, 0, None), (0, 0, 0, 0)], ids=str
)
def test_vmap(mapped):
    batch = 3
    per_example = [draw(16, 32, 48, 32, "bfloat16", seed=seed) for seed in range(batch)]
    args = [
        jnp.stack([example[i] for example in per_example]) if axis == 0 else per_example[0][i]
        for i, axis in enumerate(mapped)
    ]
    dout = jnp.stack([example[4] for example in per_example])
    step = functools.partial(with_grads, functools.partial(js.swiglu_mlp, implementation="cudnn"))
    got = jax.jit(jax.vmap(step, in_axes=(*mapped, 0)))(*args, dout)
    for b in range(batch):
        one = [a[b] if axis == 0 else a for a, axis in zip(args, mapped, strict=True)]
        check([g[b] for g in got], Inputs(*one, dout[b]))


def test_threads():
    args = draw(64, 128, 256, 128, "bfloat16")[:-1]
    call = jax.jit(js.swiglu_mlp)
    want = np.asarray(call(*args))
    wrong = []

    def work():
        for _ in range(200):
            if not np.array_equal(np.asarray(call(*args)), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_calls_are_replayed_in_cuda_graphs():
    """Replays do not come back to the handlers.

    Results are dropped at once: where they stay alive, the next call gets other buffers, and XLA
    records the graph anew.
    """
    args = draw(72, 64, 128, 64, "bfloat16")
    step = jax.jit(functools.partial(with_grads, js.swiglu_mlp))
    for _ in range(3):
        jax.block_until_ready(step(*args))
    before = sum(plan["executions"] for plan in _ffi.prepared())
    for _ in range(10):
        jax.block_until_ready(step(*args))
    assert sum(plan["executions"] for plan in _ffi.prepared()) == before
    check(step(*args), args)


@pytest.mark.parametrize(
    ("m", "glu_fwd_route", "glu_bwd_route"),
    [(40, "", ""), (41, "dual", "epilogue"), (42, "epilogue", "pointwise"), (43, "pointwise", "")],
)
def test_tuned(m, glu_fwd_route, glu_bwd_route, monkeypatch):
    """Graphs that share a plan, as the GEMMs of gate and up do, still have their own operands."""
    monkeypatch.delenv("JAX_SWIGLU_TUNING")
    args = draw(m, 256, 512, 256, "bfloat16")
    check(run(args, glu_fwd_route=glu_fwd_route, glu_bwd_route=glu_bwd_route), args)
    plans = [plan for plan in _ffi.prepared() if f" m={m} " in plan["problem"]]
    tuned = [plan for plan in plans if plan["source"] == "tuned"]
    assert {plan["problem"].split()[0] for plan in tuned} == {"glu_fwd", "glu_bwd", "matmul"}


def test_large_gemms_are_those_of_cudnn():
    """Not silently XLA's: what ran has left a plan with an engine, as `explain` says."""
    sizes = ((4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096), (4096, 4096))
    args = [
        jax.random.normal(key, shape, jnp.bfloat16) / 64
        for key, shape in zip(jax.random.split(jax.random.key(0), 5), sizes, strict=True)
    ]
    jax.block_until_ready(jax.jit(functools.partial(with_grads, js.swiglu_mlp))(*args))
    explanation = js.explain(*args[:4])
    assert {stage.implementation for stage in explanation.stages} == {"cudnn", "cudnn+xla"}
    large = [p for p in explanation.plans if "14336" in p["problem"] and "4096" in p["problem"]]
    assert all(plan["engines"] and plan["executions"] for plan in large)
    # down, dh and dx; three weight gradients, of which two are the same problem.
    assert [p["problem"].split()[0] for p in large].count("glu_fwd") >= 1
    assert [p["problem"].split()[0] for p in large].count("matmul") >= 5


def test_what_falls_back_is_reported(monkeypatch):
    status = _load.CudnnStatus(False, "made up for this test")
    monkeypatch.setattr(_load, "cudnn_status", lambda: status)
    _primitives._warn_once.cache_clear()
    args = draw(24, 40, 56, 40, "bfloat16")
    seen = len(_ffi.prepared())
    with pytest.warns(RuntimeWarning, match="runs on XLA: made up for this test"):
        got = jax.jit(lambda *a: with_grads(js.swiglu_mlp, *a))(*args)
    check(got, args)
    assert len(_ffi.prepared()) == seen
    assert {(s.implementation, s.reason) for s in js.explain(*args.operands).stages} == {
        ("xla", "made up for this test")
    }


def test_warm_chooses_plans_for_gradients_too(monkeypatch):
    monkeypatch.delenv("JAX_SWIGLU_TUNING")
    plans = warm(64, 256, 256, backward=True)
    problems = {plan["problem"] for plan in plans}
    assert any(p.startswith("glu_fwd ") and p.endswith("with gate, up") for p in problems)
    args = draw(256, 64, 256, 64, "bfloat16")
    seen = len(_ffi.prepared())
    check(jax.jit(functools.partial(with_grads, js.swiglu_mlp))(*args), args)
    assert _ffi.prepared()[seen:] == []
    # More plans than those of a forward pass: glu_fwd and down.
    assert sum(p.startswith("matmul ") for p in problems) >= 4


@pytest.mark.parametrize("packing", ["H 2 I", "(2 I) H"])
def test_warm_chooses_plans_for_packed_float32_weights(packing, monkeypatch):
    monkeypatch.delenv("JAX_SWIGLU_TUNING")
    assert warm(
        64, 384, 256, param_dtype="float32", weight_layout="out_in", packing=packing, backward=True
    )
    inputs = draw(256, 64, 384, 64, "bfloat16", layout="out_in")
    w_gate_up = pack(inputs.w_gate, inputs.w_up, Packing(packing), weight_layout="out_in")
    mlp = functools.partial(
        js.swiglu_mlp_packed, packing=packing, weight_layout="out_in", dtype="bfloat16"
    )
    args = inputs.x, jnp.float32(w_gate_up), jnp.float32(inputs.w_down), inputs.dout
    seen = len(_ffi.prepared())
    out, dx, dw_gate_up, dw_down = jax.jit(functools.partial(with_grads, mlp))(*args)
    assert _ffi.prepared()[seen:] == []
    dweights = [*unpack(dw_gate_up, Packing(packing), weight_layout="out_in"), dw_down]
    assert {dw.dtype for dw in dweights} == {np.dtype("float32")}
    check((out, dx, *map(jnp.bfloat16, dweights)), inputs, layout="out_in")


@pytest.mark.parametrize("scanned", [False, True], ids=["", "in a scan"])
@pytest.mark.parametrize("axes", ["", "H 2 I", "2 H I", "2 I H"])
def test_remat(axes, scanned):
    inputs = draw(64, 128, 256, 128, "bfloat16")
    x, *weights, dout = map(jnp.asarray, inputs)
    mlp = functools.partial(js.swiglu_mlp, implementation="cudnn")
    if axes:
        packed = pack(inputs.w_gate, inputs.w_up, Packing(axes))
        weights = [jnp.asarray(packed), weights[2]]
        mlp = functools.partial(js.swiglu_mlp_packed, packing=axes, implementation="cudnn")
    function = jax.checkpoint(mlp, prevent_cse=not scanned)

    def scan(x, *weights):
        stacks = [w[None] for w in weights]
        return jax.lax.scan(lambda x, w: (function(x, *w), None), x, stacks)[0]

    step = functools.partial(with_grads, scan if scanned else function)
    out, dx, *dweights = jax.jit(step)(x, *weights, dout)
    if axes:
        dweights = [*unpack(dweights[0], Packing(axes)), dweights[1]]
    check((out, dx, *dweights), inputs)


@pytest.mark.parametrize(
    "prologue",
    [
        "import jax_swiglu as js; import jax",
        "import jax; import jax_swiglu as js",
        "import jax; jax.devices(); import jax_swiglu as js",
        "import jax_swiglu as js; import jax; jax.devices()",
    ],
)
def test_order_of_imports(prologue, run_python):
    """The custom calls are found on the platform CUDA whether JAX started it before or after."""
    program = f"""{prologue}
import jax.numpy as jnp
x, w = jnp.ones((16, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
print(jax.jit(lambda *a: js.swiglu_mlp(*a, implementation="cudnn"))(x, w, w, w)[0, 0])
"""
    env = {**run_python.keywords["env"], "JAX_PLATFORMS": "cuda"}
    result = run_python(["python", "-c", program], env=env)
    assert result.returncode == 0, result.stderr
    # gate and up are 64, so h is 64 * 64 in each of 64 columns.
    assert float(result.stdout) == 64 * 4096
