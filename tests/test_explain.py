"""What `explain` says is what the lowering does: on the CPU, and on a GPU that is made up."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import jax_swiglu as js
from jax_swiglu import _explain, _load
from jax_swiglu.convert import Packing

H, I, O = 8, 16, 6
INFERENCE = ("glu_fwd", "down")
SEPARATE = ("dw_gate", "dw_up", "dw_down")


def specs(m, *, layout="in_out", dtype="bfloat16", weight_dtype=None, packing=None):
    shapes = [(H, I), (H, I), (I, O)]
    if layout == "out_in":
        shapes = [shape[::-1] for shape in shapes]
    if packing is not None:
        sizes = {"H": (H,), "2": (2,), "I": (I,)}
        shapes[:2] = [tuple(n for d in packing.dims for n in sizes.get(d, (2 * I,)))]
    rows = m if isinstance(m, tuple) else (m,)
    weights = [jax.ShapeDtypeStruct(shape, weight_dtype or dtype) for shape in shapes]
    return [jax.ShapeDtypeStruct((*rows, H), dtype), *weights]


def runs(explanation):
    return {stage.name: stage.implementation for stage in explanation.stages}


@pytest.fixture
def gpu(monkeypatch):
    """Makes the default device a GPU that cuDNN runs on, as far as `explain` can see."""
    status = _load.CudnnStatus(True, "cuDNN 9.19.0", 91900)
    monkeypatch.setattr(_load, "cudnn_status", lambda: status)
    monkeypatch.setattr(_explain, "_platform", lambda: "gpu")


@pytest.mark.parametrize(
    ("implementation", "runner", "reason"),
    [
        (None, "xla", "the default device is a cpu, not an NVIDIA GPU"),
        ("xla", "xla", "asked for"),
        ("host", "host", "asked for"),
        ("cudnn", "unavailable", "the default device is a cpu, not an NVIDIA GPU"),
    ],
)
def test_on_the_cpu(implementation, runner, reason, custom_calls):
    explanation = js.explain(*specs(4), implementation=implementation)
    assert (explanation.platform, explanation.dtype) == ("cpu", "bfloat16")
    assert [stage.name for stage in explanation.stages] == [
        *("glu_fwd", "glu_fwd, saving", "down", "glu_bwd", "dx"),
        *SEPARATE,
    ]
    assert {(s.implementation, s.reason) for s in explanation.stages} == {(runner, reason)}
    assert explanation.plans == ()
    words = str(explanation)
    for stage in explanation.stages:
        assert f"{stage.name} " in words and stage.formula in words
    assert words.count(f"{runner}: {reason}") == 8
    assert explanation.summary() == f"bfloat16 on cpu: {runner} ({reason})"
    if implementation != "cudnn":
        function = functools.partial(js.swiglu_mlp, implementation=implementation)
        calls = custom_calls(function, *specs(4), platform="cpu")
        assert bool(calls) == (runner == "host")


def test_zero_sizes():
    (stage, *_) = js.explain(*specs(0), implementation="host").stages
    assert (stage.implementation, stage.reason) == ("xla", "a size is zero")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("m", "others"),
    [
        (64, dict.fromkeys(SEPARATE, "xla")),
        (65, dict.fromkeys(("glu_bwd", "dx"), "cudnn+xla")),
        (1024, dict.fromkeys(("glu_bwd", "dx"), "cudnn+xla")),
        (1025, dict.fromkeys(("glu_fwd", "glu_bwd", "dx"), "cudnn+xla")),
    ],
)
def test_by_rows(m, others):
    explanation = js.explain(*specs(m))
    got = runs(explanation)
    assert got == dict.fromkeys(got, "cudnn") | others
    reasons = {stage.name: stage.reason for stage in explanation.stages}
    assert f"{m} rows, {'at most' if m <= 1024 else 'more than'} 1024" in reasons["glu_fwd"]
    assert f"{m} rows, {'at most' if m <= 64 else 'more than'} 64" in reasons["dw_up"]
    for runner, name in (("cudnn", "down"), *((r, n) for n, r in others.items())):
        assert f"{runner} (" in explanation.summary() and name in explanation.summary()


def test_on_a_gpu_without_cudnn(gpu, monkeypatch):
    monkeypatch.setattr(_load, "cudnn_status", lambda: _load.CudnnStatus(False, "too old"))
    assert {(s.implementation, s.reason) for s in js.explain(*specs(4)).stages} == {
        ("xla", "too old")
    }
    assert set(runs(js.explain(*specs(4), implementation="cudnn")).values()) == {"unavailable"}


def test_on_a_gpu_that_is_not_of_nvidia(gpu, monkeypatch):
    monkeypatch.setattr(_load, "cudnn_status", lambda: _load.CudnnStatus(None, "none"))
    (stage, *_) = js.explain(*specs(4)).stages
    assert stage.reason == "the default device is a gpu, not an NVIDIA GPU"


@pytest.mark.usefixtures("gpu")
def test_host_and_float32_on_a_gpu():
    assert set(runs(js.explain(*specs(4), implementation="host")).values()) == {"unavailable"}
    assert set(runs(js.explain(*specs(4, dtype="float32"))).values()) == {"xla"}


# On a GPU the lowering has the last word.


def calls_for_cuda(function, *args):
    """How often each call of ours runs in the program for CUDA: (op, lhs_transposed, extra)."""
    lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
    functions = {
        op.attributes["sym_name"].value: op for op in lowered.compiler_ir("stablehlo").body
    }

    def visit(parent):
        blocks = [block for region in parent.regions for block in region.blocks]
        for op in (op for block in blocks for op in block.operations):
            if op.operation.name == "func.call":
                yield from visit(functions[op.attributes["callee"].value])
            elif op.operation.name == "stablehlo.custom_call":
                name = op.attributes["call_target_name"].value
                if name.startswith("jax_swiglu_"):
                    config = {e.name: e.attr for e in op.attributes["mhlo.backend_config"]}
                    flags = (bool(config[key].value) for key in ("lhs_transposed", "extra"))
                    yield (name.removeprefix("jax_swiglu_"), *flags)

    return Counter(visit(functions["main"]))


GEMM, WITH_ADDEND = ("matmul", False, False), ("matmul", False, True)


def claimed(explanation, stages, *, packed, residuals="gate_up"):
    """The calls that the program has if the explanation of these stages is right."""
    found = Counter()
    for stage in stages:
        runner = runs(explanation)[stage]
        fused = runner == "cudnn"
        if runner == "xla":
            continue
        if stage.startswith("glu_fwd"):
            found += Counter([("glu_fwd", False, "saving" in stage)] if fused else [GEMM] * 2)
        elif stage == "glu_bwd":
            found += Counter([("glu_bwd", False, residuals == "gate_up") if fused else GEMM])
        elif stage == "dx" and not packed:
            found += Counter([GEMM, WITH_ADDEND if fused else GEMM])
        else:
            found += Counter([("matmul", stage.startswith("dw"), False)])
    return found


def with_grads(function, *args):
    out, pullback = jax.vjp(function, *args)
    return (out, *pullback(jnp.ones_like(out)))


def check_claims(function, explain, args, *, packed=False, **options):
    function, explanation = (functools.partial(f, **options) for f in (function, explain))
    explanation = explanation(*args)
    stages = list(runs(explanation))
    residuals = options.get("residuals", "gate_up")
    training = [s for s in stages if s != "glu_fwd" or residuals == "input"]
    for program, of in (
        (function, INFERENCE),
        (functools.partial(with_grads, function), training),
    ):
        want = claimed(explanation, of, packed=packed, residuals=residuals)
        assert calls_for_cuda(program, *args) == want


ROWS = (1, 64, 65, (5, 13), 1024, 1025)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("m", ROWS, ids=str)
@pytest.mark.parametrize("layout", ["in_out", "out_in"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"residuals": "full"},
        {"residuals": "input"},
        {"implementation": "cudnn"},
        {"implementation": "xla"},
    ],
    ids=str,
)
def test_claims(options, layout, m):
    args = specs(m, layout=layout)
    check_claims(js.swiglu_mlp, js.explain, args, weight_layout=layout, **options)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("m", ROWS, ids=str)
@pytest.mark.parametrize(
    "dtypes",
    [("float16", None, None), ("float32", None, None), ("bfloat16", "float32", "bfloat16")],
    ids=str,
)
def test_claims_of_dtypes(dtypes, m):
    operands, weights, computation = dtypes
    args = specs(m, dtype=operands, weight_dtype=weights)
    check_claims(js.swiglu_mlp, js.explain, args, dtype=computation)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("m", [1, 64, (5, 13), 1025], ids=str)
@pytest.mark.parametrize("weight_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("implementation", [None, "cudnn"])
@pytest.mark.parametrize("axes", ["H 2 I", "2 H I", "2 I H", "H (2 I)", "(2 I) H"])
def test_claims_of_packed_calls(axes, implementation, weight_dtype, m):
    packing = Packing(axes)
    args = specs(m, packing=packing, weight_dtype=weight_dtype)
    check_claims(
        js.swiglu_mlp_packed,
        js.explain_packed,
        args,
        packed=True,
        packing=packing,
        dtype="bfloat16",
        implementation=implementation,
    )


@pytest.mark.usefixtures("gpu")
def test_packed_stages():
    args = specs(2048, packing=Packing("2 I H"))
    explanation = js.explain_packed(*args, packing="2 I H")
    assert list(runs(explanation))[-2:] == ["dw_gate_up", "dw_down"]
    assert str(explanation).startswith("swiglu_mlp_packed on gpu, computing in bfloat16:")
    with pytest.raises(ValueError, match="alternate"):
        js.explain_packed(*args, packing="(I 2) H")
