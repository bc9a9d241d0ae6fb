"""What our operations become in the program that XLA gets, for CUDA too: no GPU is needed for that.

On a GPU, XLA hands a custom call a pointer into a stack of weights instead of copying a layer out
of it, if nothing but a dynamic slice and a reshape stand between the two. And cuDNN takes operands
with strides, so that nothing is ever transposed. Both are pinned here.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.export
import numpy as np
import pytest
from _programs import with_grads
from _reference64 import draw

import jax_swiglu as js
from jax_swiglu import _vjp
from jax_swiglu._config import Config

# More rows than those whose weight gradients go to XLA.
M, H, I, O = 72, 8, 16, 6
ALL = (0, 1, 2, 3)
LAYOUTS = ("in_out", "out_in")
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def specs(dtype="bfloat16", *, layout="in_out", weight_dtype=None, sizes=(M, H, I, O)):
    """x, w_gate, w_up, w_down and dout."""
    m, h, i, o = sizes
    shapes = [(h, i), (h, i), (i, o)]
    if layout == "out_in":
        shapes = [shape[::-1] for shape in shapes]
    weights = [jax.ShapeDtypeStruct(shape, weight_dtype or dtype) for shape in shapes]
    return [jax.ShapeDtypeStruct((m, h), dtype), *weights, jax.ShapeDtypeStruct((m, o), dtype)]


@dataclasses.dataclass
class Program:
    """A lowered program."""

    module: Any

    @property
    def main(self):
        return self.function("main")

    @property
    def functions(self):
        return list(self.module.body.operations)

    def operations(self, root=None):
        """All operations inside `root`, or of the whole program."""
        for op in [root] if root else self.functions:
            for region in op.regions:
                for block in region.blocks:
                    for inner in block.operations:
                        yield inner
                        yield from self.operations(inner)

    def names(self):
        return {op.operation.name.removeprefix("stablehlo.") for op in self.operations()}

    def function(self, name):
        (found,) = (f for f in self.functions if f.attributes["sym_name"].value == name)
        return found

    def calls(self, root=None, bindings=None):
        """The custom calls of ours that run in `root`, or in the program, in order."""
        bindings = bindings or {}
        for op in self.operations(root or self.main):
            name = op.operation.name
            if name == "stablehlo.custom_call":
                if op.attributes["call_target_name"].value.startswith("jax_swiglu_"):
                    yield Call(self, op, bindings)
            elif name == "func.call":
                callee = self.function(op.attributes["callee"].value)
                inner = zip(callee.regions[0].blocks[0].arguments, op.operands, strict=True)
                yield from self.calls(callee, bindings | dict(inner))

    def loops(self):
        return [op for op in self.operations() if op.operation.name == "stablehlo.while"]

    def path(self, value, bindings):
        """The operations that lead from an argument of the surrounding program or loop to the
        value, and that argument."""
        names = []
        while True:
            if value in bindings:
                value = bindings[value]
                continue
            if not hasattr(value.owner, "operands"):
                return [name.removeprefix("stablehlo.") for name in names], value
            op = value.owner
            inner = [op.name]
            if op.name == "func.call":
                body = self.function(op.attributes["callee"].value)
                inner = [i.operation.name for i in self.operations(body)]
            names = [n for n in inner if n not in ("func.return", "stablehlo.constant")] + names
            value = op.operands[0]


@dataclasses.dataclass
class Call:
    """A custom call, and the values of the arguments of the functions it is in."""

    program: Program
    op: Any
    bindings: dict[Any, Any]

    @property
    def name(self):
        return self.op.attributes["call_target_name"].value.removeprefix("jax_swiglu_")

    @property
    def attributes(self):
        config = self.op.attributes["mhlo.backend_config"]
        return {entry.name: getattr(entry.attr, "value", entry.attr) for entry in config}

    @property
    def flags(self):
        a = self.attributes
        return self.name, a["lhs_transposed"], a["rhs_transposed"], a["extra"]

    @property
    def operand_shapes(self):
        return [tuple(v.type.shape) for v in self.op.operands]

    @property
    def result_types(self):
        return [(*v.type.shape, str(v.type.element_type)) for v in self.op.results]

    def is_argument(self, operand, number):
        """Whether the operand is that argument of the program itself."""
        return self.op.operands[operand] == self.program.main.regions[0].blocks[0].arguments[number]


def lower(function, *args, platform="cuda"):
    lowered = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,))
    return Program(lowered.compiler_ir("stablehlo"))


def op(**options):
    return functools.partial(js.swiglu_mlp, **options)


# Operands and attributes.


@layouts
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("implementation", [None, "cudnn"])
def test_forward(implementation, dtype, layout):
    program = lower(
        op(weight_layout=layout, implementation=implementation), *specs(dtype, layout=layout)[:4]
    )
    glu_fwd, down = program.calls()
    transposed = layout == "out_in"
    assert glu_fwd.flags == ("glu_fwd", False, transposed, False)
    assert down.flags == ("matmul", False, transposed, False)
    assert glu_fwd.attributes.keys() == {
        *("lhs_transposed", "rhs_transposed", "extra", "route", "packing", "up_first")
    }
    assert all(glu_fwd.is_argument(i, i) for i in (0, 1, 2)) and down.is_argument(1, 3)
    assert down.op.operands[0] == glu_fwd.op.results[0]
    # Nothing else is in the program.
    assert program.names() == {"custom_call", "func.return"}


@layouts
@pytest.mark.parametrize(("implementation", "platform"), [("cudnn", "cuda"), ("host", "cpu")])
def test_backward(implementation, platform, layout):
    x, w_gate, w_up, w_down, dout = range(5)
    function = functools.partial(
        with_grads, op(weight_layout=layout, implementation=implementation)
    )
    program = lower(function, *specs(layout=layout), platform=platform)
    glu_fwd, down, glu_bwd, dx_gate, dx, *dweights = program.calls()
    t = layout == "out_in"
    assert [c.flags for c in (glu_fwd, down, glu_bwd, dx_gate, dx)] == [
        ("glu_fwd", False, t, True),
        ("matmul", False, t, False),
        ("glu_bwd", False, not t, True),
        ("matmul", False, not t, False),
        ("matmul", False, not t, True),
    ]
    assert [c.flags for c in dweights] == [("matmul", True, False, False)] * 3
    assert program.names() == {"custom_call", "func.return"}
    # Weights reach every call as they are stored.
    for call, operand, argument in (
        (glu_fwd, 1, w_gate),
        (glu_fwd, 2, w_up),
        (down, 1, w_down),
        (glu_bwd, 0, dout),
        (glu_bwd, 1, w_down),
        (dx_gate, 1, w_gate),
        (dx, 1, w_up),
    ):
        assert call.is_argument(operand, argument)
    h, gate, up = list(glu_fwd.op.results)[:3]
    dgate, dup, h_again = list(glu_bwd.op.results)[:3]
    assert h in list(down.op.operands)
    assert list(glu_bwd.op.operands)[2:] == [gate, up]
    assert dx_gate.op.operands[0] == dgate
    assert [dx.op.operands[0], dx.op.operands[2]] == [dup, dx_gate.op.results[0]]
    arguments = program.main.regions[0].blocks[0].arguments
    for call, inputs, doutputs in zip(
        dweights,
        (arguments[x], arguments[x], h_again),
        (dgate, dup, arguments[dout]),
        strict=True,
    ):
        pair = [doutputs, inputs] if t else [inputs, doutputs]
        assert list(call.op.operands) == pair
    stored = [tuple(w.shape) for w in specs(layout=layout)[1:4]]
    assert [call.result_types[0][:2] for call in dweights] == stored


@layouts
def test_compiled_program_transposes_and_copies_nothing(layout):
    function = functools.partial(with_grads, op(weight_layout=layout, implementation="host"))
    compiled = jax.jit(function).lower(*specs(layout=layout)).compile().as_text()
    assert len(re.findall(r"custom-call\(.*jax_swiglu_", compiled)) == 8
    assert not re.findall(r"= \S+ (transpose|copy|convert|fusion)\(", compiled)


@layouts
@pytest.mark.parametrize("leading", [(), (2, 3, 12)], ids=str)
def test_leading_dimensions_reach_the_calls(leading, layout):
    x, *weights, dout = specs("bfloat16", layout=layout)
    x, dout = (jax.ShapeDtypeStruct((*leading, a.shape[1]), a.dtype) for a in (x, dout))
    function = functools.partial(with_grads, op(weight_layout=layout, implementation="cudnn"))
    program = lower(function, x, *weights, dout)
    assert program.names() == {"custom_call", "func.return"}
    glu_fwd, *_, dw_down = program.calls()
    assert glu_fwd.operand_shapes[0] == (*leading, H)
    assert [types[:-1] for types in glu_fwd.result_types[:3]] == [(*leading, I)] * 3
    assert {(*leading, I), (*leading, O)} == set(dw_down.operand_shapes)
    # As much scratch as for the same rows in one dimension.
    rows = int(np.prod(leading))
    flat = [jax.ShapeDtypeStruct((rows, a.shape[-1]), a.dtype) for a in (x, dout)]
    want = lower(function, flat[0], *weights, flat[1])
    sizes = [[c.result_types[-1] for c in p.calls()] for p in (program, want)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("residuals", ["gate_up", "full", "input"])
def test_residuals(residuals):
    function = op(residuals=residuals, implementation="cudnn")
    program = lower(functools.partial(with_grads, function), *specs())
    extra = {(c.name, c.attributes["extra"]) for c in program.calls() if c.name != "matmul"}
    # "input": the forward pass keeps nothing, and the second glu_fwd returns gate, up and h.
    want = {
        "gate_up": {("glu_fwd", True), ("glu_bwd", True)},
        "full": {("glu_fwd", True), ("glu_bwd", False)},
        "input": {("glu_fwd", False), ("glu_fwd", True), ("glu_bwd", False)},
    }
    assert extra == want[residuals]


@layouts
def test_weight_gradients_of_float32_weights_leave_the_gemm_in_float32(layout):
    function = functools.partial(with_grads, op(weight_layout=layout, dtype="bfloat16"))
    program = lower(function, *specs(layout=layout, weight_dtype="float32"))
    dweights = [c for c in program.calls() if c.attributes["lhs_transposed"]]
    assert [c.result_types[0][-1] for c in dweights] == ["f32"] * 3
    assert {str(v.type.element_type) for c in dweights for v in c.op.operands} == {"bf16"}
    (returned,) = (
        o for o in program.main.regions[0].blocks[0].operations if o.operation.name == "func.return"
    )
    assert list(returned.operands)[2:] == [c.op.results[0] for c in dweights]


@pytest.mark.parametrize(
    ("rows", "implementation", "cudnn"),
    [
        ((64,), None, False),
        ((65,), None, True),
        ((2, 32), None, False),
        ((3, 32), None, True),
        ((1,), "cudnn", True),
        ((64,), "cudnn", True),
    ],
)
def test_weight_gradients_over_few_rows_go_to_xla(rows, implementation, cudnn):
    function = functools.partial(with_grads, op(implementation=implementation))
    x, *weights, dout = specs()
    x, dout = (jax.ShapeDtypeStruct((*rows, a.shape[1]), a.dtype) for a in (x, dout))
    program = lower(function, x, *weights, dout)
    flags = [call.flags for call in program.calls()]
    assert [f[0] for f in flags if f[1]] == ["matmul"] * (3 if cudnn else 0)
    assert ("dot_general" in program.names()) == (not cudnn)


@layouts
@pytest.mark.parametrize("rows", [(64,), (65,), (5, 13), (1024,), (1025,)], ids=str)
@pytest.mark.parametrize("implementation", [None, "cudnn"])
def test_elementwise_parts_over_many_rows_go_to_xla(implementation, rows, layout):
    function = op(implementation=implementation, weight_layout=layout)
    x, *weights, dout = specs(layout=layout)
    x, dout = (jax.ShapeDtypeStruct((*rows, a.shape[1]), a.dtype) for a in (x, dout))
    size = int(np.prod(rows))
    t = layout == "out_in"

    inference = lower(function, x, *weights)
    fused = implementation == "cudnn" or size <= 1024
    first = [("glu_fwd", False, t, False)] if fused else [("matmul", False, t, False)] * 2
    assert [c.flags for c in inference.calls()] == [*first, ("matmul", False, t, False)]
    assert ("multiply" in inference.names()) == (not fused)

    training = lower(functools.partial(with_grads, function), x, *weights, dout)
    fused = implementation == "cudnn" or size <= 64
    glu_fwd, _, dh, _, dx = [c for c in training.calls() if not c.attributes["lhs_transposed"]]
    # Saves gate and up itself: XLA then writes them into stacks of residuals without a copy.
    assert glu_fwd.flags == ("glu_fwd", False, t, True)
    assert dh.flags == ("glu_bwd" if fused else "matmul", False, not t, fused)
    assert dx.flags == ("matmul", False, not t, fused)
    assert ("multiply" in training.names()) == (not fused)
    assert "transpose" not in training.names()


# The workspace.


def workspaces(program):
    for call in program.calls():
        size, kind = call.result_types[-1]
        assert kind == "ui8"
        yield (*call.flags, *map(tuple, call.operand_shapes), call.result_types[0]), size


def routes(**names):
    config = Config(dtype=np.dtype("bfloat16"), **{f"{op}_route": r for op, r in names.items()})
    return functools.partial(_vjp.swiglu_mlp, config)


def test_workspace_depends_on_op_and_shapes_alone():
    """Every process of a job must compile the same program, whatever plans it finds."""
    sizes = {}
    functions = [
        *(op(residuals=residuals) for residuals in ("gate_up", "full", "input")),
        *(routes(glu_fwd=f) for f in ("dual", "epilogue", "pointwise")),
        *(routes(glu_bwd=b) for b in ("epilogue", "pointwise")),
        op(implementation="cudnn"),
    ]
    for function in functions:
        for backward in (False, True):
            args = specs() if backward else specs()[:4]
            run = functools.partial(with_grads, function) if backward else function
            for key, size in workspaces(lower(run, *args)):
                assert sizes.setdefault(key, size) == size
    # cuDNN's best engine for plain GEMMs asks for 32 MiB on Hopper.
    assert min(sizes.values()) >= 32 << 20


@pytest.mark.parametrize("m", [80, 333, 4096])
def test_workspace_has_room_for_gate_where_it_is_no_result(m):
    args = specs(sizes=(m, 64, 1376, 64))
    mlp = op(implementation="cudnn")
    plain, _ = (size for _, size in workspaces(lower(mlp, *args[:4])))
    saving, *_ = (size for _, size in workspaces(lower(functools.partial(with_grads, mlp), *args)))
    assert plain - saving >= m * 1376 * 2
    assert plain - saving < m * 1376 * 2 + 256


# Stacked weights in a scan.

LAYERS = 3


def stacks(layout):
    return [
        jax.ShapeDtypeStruct((LAYERS, *w.shape), w.dtype)
        for w in specs(layout=layout, sizes=(M, H, I, H))[1:4]
    ]


def scan_layers(mlp, x, *weights):
    return jax.lax.scan(lambda x, weights: (x + mlp(x, *weights), None), x, weights)[0]


def check_sliced_in_place(program, loop, call, operand, argument):
    """The operand is one layer of that argument of the program: sliced, reshaped, nothing else."""
    names, value = program.path(call.op.operands[operand], call.bindings)
    assert names == ["dynamic_slice", "reshape"], (call.name, operand, names)
    # The stack enters the loop as it is stored, and leaves it unchanged.
    body = loop.regions[1].blocks[0]
    number = list(body.arguments).index(value)
    *_, returned = body.operations
    assert returned.operands[number] == value
    assert loop.operands[number] == program.main.regions[0].blocks[0].arguments[argument]


@layouts
def test_scan_hands_slices_to_the_calls(layout):
    x = jax.ShapeDtypeStruct((M, H), "bfloat16")
    mlp = op(weight_layout=layout)
    program = lower(functools.partial(scan_layers, mlp), x, *stacks(layout))
    (loop,) = program.loops()
    glu_fwd, down = program.calls(loop)
    for call, operand, argument in ((glu_fwd, 1, 1), (glu_fwd, 2, 2), (down, 1, 3)):
        check_sliced_in_place(program, loop, call, operand, argument)
    assert not program.names() & {"transpose", "copy", "convert"}


@layouts
@pytest.mark.parametrize("implementation", [None, "cudnn"])
@pytest.mark.parametrize("remat", [False, True], ids=["saved", "remat"])
def test_scan_hands_slices_to_the_calls_of_the_backward_pass(remat, implementation, layout):
    x = jax.ShapeDtypeStruct((M, H), "bfloat16")
    mlp = op(weight_layout=layout, implementation=implementation)
    if remat:
        mlp = jax.checkpoint(mlp, prevent_cse=False)
    function = functools.partial(scan_layers, mlp)
    program = lower(functools.partial(with_grads, function), x, *stacks(layout), x)
    forward, backward = program.loops()
    glu_fwd, down = program.calls(forward)
    for call, operand, argument in ((glu_fwd, 1, 1), (glu_fwd, 2, 2), (down, 1, 3)):
        check_sliced_in_place(program, forward, call, operand, argument)
    *again, dh, dx_gate, dx, dw_gate, dw_up, dw_down = program.calls(backward)
    assert [c.name for c in again] == (["glu_fwd"] if remat else [])
    for call, operand, argument in (
        *((c, 1, 1) for c in again),
        *((c, 2, 2) for c in again),
        (dh, 1, 3),
        (dx_gate, 1, 1),
        (dx, 1, 2),
    ):
        check_sliced_in_place(program, backward, call, operand, argument)
    assert all(c.attributes["lhs_transposed"] for c in (dw_gate, dw_up, dw_down))
    assert not program.names() & {"transpose", "copy"}


# vmap.


def test_mapped_rows_are_rows_and_weights_not_copied():
    x, *weights, _ = specs()
    x = jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
    program = lower(jax.vmap(js.swiglu_mlp, (0, None, None, None)), x, *weights)
    glu_fwd, down = program.calls()
    assert glu_fwd.operand_shapes == [(3, M, H), (H, I), (H, I)]
    assert glu_fwd.is_argument(1, 1) and glu_fwd.is_argument(2, 2) and down.is_argument(1, 3)
    assert program.names() == {"custom_call", "func.return"}


@pytest.mark.parametrize("batch", [(3,), (2, 3)], ids=str)
def test_mapped_weights_get_batch_dimensions(batch):
    args = [jax.ShapeDtypeStruct((*batch, *a.shape), a.dtype) for a in specs()]
    function = functools.partial(with_grads, op(implementation="cudnn"))
    for _ in batch:
        function = jax.vmap(function)
    program = lower(function, *args)
    glu_fwd, down, *_, dw_down = program.calls()
    assert glu_fwd.operand_shapes == [(*batch, *s) for s in ((M, H), (H, I), (H, I))]
    assert down.operand_shapes == [(*batch, *s) for s in ((M, I), (I, O))]
    assert dw_down.operand_shapes == [(*batch, *s) for s in ((M, I), (M, O))]
    assert program.names() == {"custom_call", "func.return"}


# What goes to XLA.


@pytest.mark.parametrize("platform", ["cuda", "cpu", "tpu"])
def test_float32_runs_on_xla(platform, custom_calls):
    function = functools.partial(with_grads, js.swiglu_mlp)
    assert custom_calls(function, *specs("float32"), platform=platform) == []


@pytest.mark.usefixtures("x64")
def test_float64_runs_on_xla(custom_calls):
    assert custom_calls(functools.partial(with_grads, js.swiglu_mlp), *specs("float64")) == []


@pytest.mark.parametrize("platform", ["cpu", "tpu", "rocm"])
def test_other_platforms_run_on_xla(platform, custom_calls):
    function = functools.partial(with_grads, js.swiglu_mlp)
    assert custom_calls(function, *specs(), platform=platform) == []


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_xla_has_no_custom_call(platform, custom_calls):
    function = functools.partial(with_grads, op(implementation="xla"))
    assert custom_calls(function, *specs(), platform=platform) == []


@pytest.mark.parametrize(
    "sizes", [(0, H, I, O), (M, 0, I, O), (M, H, 0, O), (M, H, I, 0)], ids=["M", "H", "I", "O"]
)
@pytest.mark.parametrize(
    ("implementation", "platform"), [(None, "cuda"), ("cudnn", "cuda"), ("host", "cpu")]
)
def test_zero_sizes_reach_no_call_of_ours(implementation, platform, sizes):
    function = functools.partial(with_grads, op(implementation=implementation))
    program = lower(function, *specs(sizes=sizes), platform=platform)
    assert all(0 not in shape for call in program.calls() for shape in call.operand_shapes)
    if 0 in (sizes[0], sizes[2]):
        assert list(program.calls()) == []


@pytest.mark.parametrize("precision", [None, "highest", "BF16_BF16_F32_X3"])
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_matmul_precision_of_the_caller(precision, implementation):
    with jax.default_matmul_precision(precision):
        lowered = jax.jit(functools.partial(with_grads, op(implementation=implementation))).lower(
            *specs("float32")
        )
    dots = [line for line in lowered.as_text().splitlines() if "stablehlo.dot_general" in line]
    assert len(dots) == 9
    for line in dots:
        assert ("HIGHEST, HIGHEST" in line) == (precision == "highest")
        assert ("num_primitive_operations = 3" in line) == (precision == "BF16_BF16_F32_X3")


# Implementations on platforms where they cannot run.


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cudnn_without_a_gpu(dtype):
    args = draw(M, H, I, O, dtype).operands
    with pytest.raises(
        NotImplementedError,
        match=r'implementation="cudnn" needs an NVIDIA GPU.*implementation=None or "xla"',
    ):
        js.swiglu_mlp(*args, implementation="cudnn")


def test_host_on_a_gpu(custom_calls):
    with pytest.raises(NotImplementedError, match=r'"host" runs on the CPU only; use None or'):
        custom_calls(op(implementation="host"), *specs()[:4])
