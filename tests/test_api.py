"""The public functions: signatures, checks and their texts, dtypes, explanations, documentation."""

import doctest
import inspect
import tomllib
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _reference64 import TOLERANCE, check_value, draw, mlp

import jax_swiglu as js
from jax_swiglu import _api, _explain, _load

FUNCTIONS = [js.swiglu_mlp, js.swiglu, js.explain]
PUBLIC = [*FUNCTIONS, js.swiglu_mlp_packed, js.explain_packed]
functions = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)


# Signatures and documentation.


def test_public_names():
    assert set(js.__all__) == {
        "CUSTOM_CALLS",
        "RESIDUAL_NAMES",
        "Explanation",
        "Stage",
        "explain",
        "explain_packed",
        "swiglu",
        "swiglu_mlp",
        "swiglu_mlp_packed",
    }
    assert Path(js.__file__).with_name("py.typed").exists()


def test_version():
    project = Path(__file__).parents[1] / "pyproject.toml"
    assert tomllib.loads(project.read_text())["project"]["version"] == js.__version__


@functions
def test_signature(function):
    parameters = inspect.signature(function).parameters
    operands = ["x", "w_gate", "w_up", "w_down"][: 3 if function is js.swiglu else 4]
    options = {
        "weight_layout": "in_out",
        "dtype": None,
        "residuals": "gate_up",
        "residual_names": js.RESIDUAL_NAMES,
        "implementation": None,
    }
    if function is js.explain:  # names change nothing of what runs
        del options["residual_names"]
    assert list(parameters) == [*operands, *options]
    for name, default in options.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default == default


def test_literal_types_list_all_choices():
    hints = typing.get_type_hints(js.swiglu_mlp)
    assert typing.get_args(hints["weight_layout"]) == ("in_out", "out_in")
    assert typing.get_args(hints["residuals"]) == ("gate_up", "full", "input")
    (implementation, none) = typing.get_args(hints["implementation"])
    assert typing.get_args(implementation) == ("cudnn", "xla", "host")
    assert none is type(None)


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.__name__)
def test_documentation(function):
    text = inspect.getdoc(function)
    for section in ("Args:", "Returns:", "Example:"):
        assert section in text
    for parameter in inspect.signature(function).parameters:
        assert f"\n  {parameter}: " in text


@pytest.mark.parametrize("name", js.__all__)
def test_every_public_name_is_documented(name):
    value = getattr(js, name)
    assert inspect.getdoc(value)
    if inspect.isclass(value):
        for member, method in inspect.getmembers(value, inspect.isfunction):
            assert member.startswith("_") or inspect.getdoc(method)


@pytest.mark.parametrize("module", [js, _api, _explain], ids=lambda m: m.__name__)
def test_examples_in_docstrings(module):
    with jax.numpy_dtype_promotion("standard"):
        results = doctest.testmod(module)
    assert results.failed == 0
    assert module is js or results.attempted > 0


# Errors name argument, expected, got and remedy.

SHAPES = {"x": (4, 8), "w_gate": (8, 16), "w_up": (8, 16), "w_down": (16, 6)}


def operands(**shapes):
    return [jnp.ones(shape) for shape in ({**SHAPES, **shapes}).values()]


@pytest.mark.parametrize(
    ("shapes", "layout", "words"),
    [
        ({"w_gate": (9, 16), "w_up": (9, 16)}, "in_out", ["x ", "H=9", "(9, 16)", "(4, 8)"]),
        ({"x": (2, 4, 7)}, "in_out", ["x ", "H=8", "w_gate", "(8, 16)", "(2, 4, 7)"]),
        ({"x": ()}, "in_out", ["x ", "(..., H)", "scalar"]),
        ({"w_up": (8, 15)}, "in_out", ["w_up", "(H, I)=(8, 16)", "w_gate", "(8, 15)"]),
        ({"w_up": (16, 8)}, "in_out", ["w_up", "(H, I)=(8, 16)", "w_gate", "(16, 8)"]),
        ({"w_down": (15, 6)}, "in_out", ["w_down", "(I, O)", "I=16", "(15, 6)"]),
        ({"w_gate": (8,)}, "in_out", ["w_gate", "(H, I)", "in_out", "(8,)"]),
        ({"w_up": (1, 8, 16)}, "in_out", ["w_up", "(H, I)", "in_out", "(1, 8, 16)"]),
        ({"w_down": (16,)}, "in_out", ["w_down", "(I, O)", "in_out", "(16,)"]),
        # Weights in the other layout: the message says which option they need.
        (
            {"w_gate": (16, 8), "w_up": (16, 8), "w_down": (6, 16)},
            "in_out",
            ["x ", "(16, 8)", "(4, 8)", 'weight_layout="out_in"'],
        ),
        ({}, "out_in", ["x ", "(8, 16)", "(4, 8)", 'weight_layout="in_out"']),
        (
            {"w_gate": (16, 8), "w_up": (15, 8), "w_down": (6, 16)},
            "out_in",
            ["w_up", "(I, H)=(16, 8)", "w_gate", "(15, 8)"],
        ),
        (
            {"w_gate": (16, 8), "w_up": (16, 8)},
            "out_in",
            ["w_down", "(O, I)", "I=16", "(16, 6)"],
        ),
        ({"w_gate": (1, 16, 8)}, "out_in", ["w_gate", "(I, H)", "out_in", "(1, 16, 8)"]),
    ],
    ids=str,
)
def test_wrong_shape(shapes, layout, words):
    for function in (js.swiglu_mlp, js.explain):
        with pytest.raises(ValueError) as error:  # noqa: PT011  the words are checked below
            function(*operands(**shapes), weight_layout=layout)
        for word in words:
            assert word in f"{error.value} "


def test_wrong_shape_of_the_gated_half():
    with pytest.raises(ValueError, match=r"w_up must have shape \(H, I\)=\(8, 16\).*\(8, 17\)"):
        js.swiglu(*operands(w_up=(8, 17))[:3])


@functions
@pytest.mark.parametrize(
    ("option", "choices"),
    [
        ("weight_layout", ["in_out", "out_in"]),
        ("residuals", ["gate_up", "full", "input"]),
        ("implementation", ["None", "cudnn", "xla", "host"]),
    ],
)
def test_unknown_option(option, choices, function):
    args = operands()[: 3 if function is js.swiglu else 4]
    with pytest.raises(ValueError, match=f"{option} must be one of .*got 'best'") as error:
        function(*args, **{option: "best"})
    assert all(choice in str(error.value) for choice in choices)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_operand_that_is_not_floating_point(dtype, number):
    args = operands()
    args[number] = args[number].astype(dtype)
    name = list(SHAPES)[number]
    with pytest.raises(TypeError, match=f"{name} must have a floating-point dtype; got {dtype}"):
        js.swiglu_mlp(*args)


@pytest.mark.parametrize("dtype", ["int32", "complex64", "float8_e4m3fn", "float9"])
def test_unknown_computation_dtype(dtype):
    with pytest.raises(TypeError, match=f"dtype must be bfloat16, .*float64; got .*{dtype}"):
        js.swiglu_mlp(*operands(), dtype=dtype)


@functions
def test_cudnn_has_no_float32(function):
    args = operands()[: 3 if function is js.swiglu else 4]
    with pytest.raises(
        NotImplementedError,
        match=r"'cudnn' computes in bfloat16, float16; got float32. Pass dtype=\"bfloat16\", or",
    ):
        function(*args, implementation="cudnn")


def test_error_while_running_names_op_and_shapes():
    """From C++: op, sizes and dtype."""
    from jax_swiglu._config import Config, op_params
    from jax_swiglu._primitives import matmul_p

    params = op_params(
        Config(dtype=np.dtype("float16"), implementation="host"), "none", rhs_transposed=True
    )
    a, b = jnp.ones((3, 5), jnp.float16), jnp.ones((7, 5), jnp.float16)
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match=r"jax_swiglu matmul batch=1 m=3 k=5 n=7 dtype=float16 .*rhs=nk.*: no route none",
    ):
        jax.block_until_ready(matmul_p.bind(a, b, params=params))


# Dtypes and kinds of operands.


@pytest.mark.parametrize(
    ("x", "weights", "dtype", "result"),
    [
        ("bfloat16", "bfloat16", None, "bfloat16"),
        ("float16", "float16", None, "float16"),
        ("float32", "float32", None, "float32"),
        ("bfloat16", "float32", None, "float32"),
        ("float32", "bfloat16", None, "float32"),
        ("bfloat16", "float16", None, "float32"),
        ("bfloat16", "float32", "bfloat16", "bfloat16"),
        ("float32", "float32", "float16", "float16"),
        ("bfloat16", "bfloat16", "float32", "float32"),
    ],
)
@pytest.mark.parametrize("implementation", ["host", "xla", None])
def test_dtype_of_the_result(x, weights, dtype, result, implementation):
    inputs = draw(13, 24, 40, 16, "bfloat16")
    args = [inputs.x.astype(x), *(w.astype(weights) for w in inputs.operands[1:])]
    with jax.numpy_dtype_promotion("standard"):
        got = js.swiglu_mlp(*args, dtype=dtype, implementation=implementation)
    assert got.dtype == result
    check_value(got, mlp(*args), TOLERANCE[result])


def test_mixed_operands_under_strict_promotion():
    """`dtype` says what to compute in: nothing is promoted implicitly."""
    inputs = draw(13, 24, 40, 16, "bfloat16")
    args = [inputs.x, *(w.astype("float32") for w in inputs.operands[1:])]
    with pytest.raises(ValueError, match="strict"):
        js.swiglu_mlp(*args)
    assert js.swiglu_mlp(*args, dtype="bfloat16").dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, lambda a: np.asarray(a).tolist()])
def test_kinds_of_operands(kind):
    inputs = draw(3, 4, 5, 6, "float32")
    got = js.swiglu_mlp(*map(kind, inputs.operands))
    check_value(got, mlp(*inputs.operands), TOLERANCE["float32"])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.dtype("bfloat16"), "bfloat16"])
def test_spellings_of_dtype(dtype):
    assert js.swiglu_mlp(*operands(), dtype=dtype).dtype == jnp.bfloat16


# Explanations.


def specs(dtype="bfloat16", **shapes):
    return [jax.ShapeDtypeStruct(s, dtype) for s in ({**SHAPES, **shapes}).values()]


def test_explain_takes_arrays_and_the_computation_dtype():
    assert js.explain(*operands()).dtype == "float32"
    assert js.explain(*operands(), dtype="float16").dtype == "float16"


def test_explanation_is_immutable():
    explanation = js.explain(*specs())
    with pytest.raises(AttributeError):
        explanation.dtype = "float32"


@pytest.mark.parametrize(
    ("source", "seconds", "engines", "words"),
    [
        ("disk", 1.234e-4, ["eng4_k24=46"], "route dual, 1 launch [eng4_k24=46], 123.4 us (disk)"),
        ("heuristics", 0.0, ["eng0", "eng1"], "route dual, 2 launches [eng0, eng1], not tuned"),
    ],
)
def test_words_for_a_plan(source, seconds, engines, words):
    plan = {
        "problem": "glu_fwd batch=1 m=4",
        "route": "dual",
        "source": source,
        "seconds": seconds,
        "engines": engines,
    }
    assert _explain.format_plan(plan) == f"glu_fwd batch=1 m=4: {words}"


# The module and the package as programs see them.


def test_module_prints_versions_devices_and_what_would_run(run_python):
    done = run_python(["python", "-W", "error", "-m", "jax_swiglu"])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"jax_swiglu {js.__version__}, Python 3.")
    assert lines[1].startswith(f"jax {jax.__version__}, jaxlib ")
    assert any(line.startswith("device 0: ") for line in lines)
    assert any(line.startswith("cuDNN: not usable: ") and "pip install" in line for line in lines)
    for dtype in ("bfloat16", "float16", "float32"):
        assert any(line.startswith(f"{dtype} on cpu: xla (") for line in lines)


WITHOUT_FLAX = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "flax":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import jax.numpy as jnp, jax_swiglu
w = jnp.ones((4, 4))
print(jax_swiglu.swiglu_mlp(w, w, w, w).shape)
try:
    import jax_swiglu.nnx
except ImportError as error:
    print(error)
"""


def test_needs_no_flax(run_python):
    done = run_python(["python", "-W", "error", "-c", WITHOUT_FLAX])
    assert done.returncode == 0, done.stderr
    shape, error = done.stdout.splitlines()
    assert shape == "(4, 4)"
    assert "pip install jax_swiglu[flax]" in error


def test_import_starts_nothing(run_python):
    """No device, no cuDNN, no Flax: importing is for free."""
    program = """
import os, sys
os.environ.pop("XLA_FLAGS")
import jax, jax_swiglu
print("flax" in sys.modules)
with open("/proc/self/maps") as maps:
    print("libcudnn" in maps.read())
jax.config.update("jax_num_cpu_devices", 3)  # refused once devices exist
print(len(jax.devices()))
"""
    done = run_python(["python", "-W", "error", "-c", program])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False", "3"]


def test_cudnn_candidates_end_with_the_loaders_own_search():
    *wheels, soname = _load.cudnn_candidates()
    assert soname == "libcudnn.so.9"
    assert all(Path(path).exists() for path in wheels)


@pytest.mark.parametrize(
    ("version", "words"), [(91900, "9.19.0"), (90000, "9.0.0"), (91002, "9.10.2")]
)
def test_format_version(version, words):
    assert _load.format_version(version) == words
