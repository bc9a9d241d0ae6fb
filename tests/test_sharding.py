"""Several devices: values of one device, and no more communication than plain JAX needs.

A plain-JAX lowering is partitioned by XLA itself and would pass without any rule, so everything
here runs the opaque custom calls (implementation="host") on eight CPU devices.
"""

import contextlib
import functools
import itertools
import math
import re
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _reference64 import (
    NAMES,
    TOLERANCE,
    Inputs,
    check_value,
    draw,
    mlp,
    mlp_and_grads,
    wide,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_swiglu as js
from benchmarks.collectives import collective_bytes
from jax_swiglu import _partitioning, _primitives, _reference
from jax_swiglu._partitioning import DeviceMesh
from jax_swiglu._primitives import matmul_p

BATCH, SEQ, H, I = 8, 8, 16, 48
M = BATCH * SEQ
AXES = ("data", "fsdp", "seq", "tensor")
BATCH_AXES = ("data", "fsdp")

# How x (and the cotangent), w_gate and w_up, and w_down are split, and on which meshes. Axes of one
# device split nothing, so that the first layout is what its mesh says: data parallel, FSDP, split
# sequence, tensor parallel, and their products.
LAYOUTS = {
    "by axis": (P(BATCH_AXES, "seq"), P("fsdp", "tensor"), P("tensor", "fsdp")),
    "batch over three axes": (P(("data", "fsdp", "tensor")), P(), P()),
    "sequence over two axes": (P("data", ("fsdp", "seq")), P(None, "tensor"), P("tensor")),
    "sequence over tensor": (P(BATCH_AXES, "tensor"), P("fsdp", "tensor"), P("tensor", "fsdp")),
    "FSDP over two axes": (
        P(BATCH_AXES, "seq"),
        P(BATCH_AXES, "tensor"),
        P("tensor", BATCH_AXES),
    ),
    "I over two axes": (P("data"), P(None, ("seq", "tensor")), P(("seq", "tensor"))),
}
MESHES = [shape for shape in itertools.product((1, 2, 4, 8), repeat=4) if math.prod(shape) == 8]
CASES = [
    *(("by axis", shape) for shape in MESHES),
    ("batch over three axes", (2, 2, 1, 2)),
    ("sequence over two axes", (1, 4, 2, 1)),
    ("sequence over two axes", (2, 2, 2, 1)),
    ("sequence over tensor", (1, 1, 1, 8)),
    ("sequence over tensor", (4, 1, 1, 2)),
    ("sequence over tensor", (1, 2, 1, 4)),
    ("sequence over tensor", (2, 2, 1, 2)),
    ("FSDP over two axes", (4, 2, 1, 1)),
    ("FSDP over two axes", (2, 2, 1, 2)),
    ("I over two axes", (1, 1, 4, 2)),
    ("I over two axes", (2, 1, 2, 2)),
]
# For what is tried in several ways: each layout, and meshes of one, two and three axes.
SAMPLE = [
    ("by axis", (8, 1, 1, 1)),
    ("by axis", (1, 8, 1, 1)),
    ("by axis", (4, 1, 1, 2)),
    ("by axis", (1, 2, 4, 1)),
    ("by axis", (1, 2, 2, 2)),
    ("by axis", (2, 2, 1, 2)),
    ("sequence over tensor", (2, 1, 1, 4)),
    ("FSDP over two axes", (2, 2, 2, 1)),
]


def case_id(value):
    if isinstance(value, set):
        return "manual " + " ".join(sorted(value))
    if not isinstance(value, tuple):
        return str(value)
    return "x".join(f"{name}{size}" for name, size in zip(AXES, value, strict=True) if size > 1)


def cases(values):
    return pytest.mark.parametrize(("layout", "shape"), values, ids=case_id)


def make_mesh(shape, kind=AxisType.Auto, axes=AXES):
    return jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes))


def put(arrays, mesh, specs):
    return [
        jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)
    ]


def sequences(inputs):
    """The inputs with x and dout as [batch, sequence, columns]."""
    x, *weights, dout = inputs
    return [x.reshape(BATCH, SEQ, -1), *weights, dout.reshape(BATCH, SEQ, -1)]


def step(implementation, x, w_gate, w_up, w_down, dout):
    mlp = functools.partial(js.swiglu_mlp, implementation=implementation)
    out, pullback = jax.vjp(mlp, x, w_gate, w_up, w_down)
    return (out, *pullback(dout))


def compiled(implementation, args, out_shardings=None):
    jitted = jax.jit(functools.partial(step, implementation), out_shardings=out_shardings)
    return jitted.lower(*args).compile()


def place(layout, mesh, inputs):
    rows, w_in, w_down = LAYOUTS[layout]
    args = put(sequences(inputs), mesh, (rows, w_in, w_in, w_down, rows))
    return [a.sharding for a in args], args


def check_all(got, inputs):
    for name, g, w in zip(NAMES, got, mlp_and_grads(*inputs), strict=True):
        check_value(np.asarray(g).reshape(w.shape), w, TOLERANCE[str(inputs.x.dtype)], name)


def check_communication(title, ours, plain):
    """No kind of collective moves more than in plain JAX, nor gathers what plain JAX does not."""
    moved, allowed = (collective_bytes(program.as_text()) for program in (ours, plain))
    print(f"{title:52} ours {dict(moved)} plain {dict(allowed)}")
    for kind in moved:
        assert moved[kind] <= allowed[kind], kind
    # Rows are gathered with three dimensions, weights with two.
    ranks, plain_ranks = (gathered_ranks(program.as_text()) for program in (ours, plain))
    assert ranks <= plain_ranks


def gathered_ranks(hlo):
    shapes = re.findall(r"= \(?\w+\[([\d,]*)\]\S* all-gather", hlo)
    return {shape.count(",") + 1 for shape in shapes}


# Under jit, on Auto and Explicit meshes.


@cases(CASES)
def test_values_and_communication(layout, shape):
    """Gradients as their operands."""
    inputs = draw(M, H, I, H, "float32")
    shardings, args = place(layout, make_mesh(shape), inputs)
    where = (shardings[0], *shardings[:4])
    ours, plain = (compiled(which, args, where) for which in ("host", "xla"))
    check_all(ours(*args), inputs)
    check_communication(f"{layout}, {case_id(shape)}", ours, plain)


@pytest.mark.parametrize("out_shardings", [True, False], ids=["", "gradients anywhere"])
@cases(CASES)
def test_communication_where_weights_are_larger_than_rows(layout, shape, out_shardings):
    """The partitioner goes by the sizes of arrays, too; elsewhere here rows are the larger ones."""
    hidden, intermediate = 256, 512
    shapes = ((BATCH, SEQ, hidden), *[(hidden, intermediate)] * 2, (intermediate, hidden))
    rows, w_in, w_down = LAYOUTS[layout]
    mesh = make_mesh(shape)
    args = [
        jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip((*shapes, shapes[0]), (rows, w_in, w_in, w_down, rows), strict=True)
    ]
    where = tuple(a.sharding for a in (args[0], *args[:4])) if out_shardings else None
    ours, plain = (compiled(which, args, where) for which in ("host", "xla"))
    check_communication(f"{layout}, {case_id(shape)}, large weights", ours, plain)


@cases(SAMPLE)
def test_values_and_communication_of_gradients_anywhere(layout, shape):
    inputs = draw(M, H, I, H, "float32")
    _, args = place(layout, make_mesh(shape), inputs)
    ours, plain = (compiled(which, args) for which in ("host", "xla"))
    check_all(ours(*args), inputs)
    check_communication(f"{layout}, {case_id(shape)}, gradients anywhere", ours, plain)


@pytest.mark.parametrize("ambient", [False, True], ids=["", "set_mesh"])
@cases(SAMPLE)
def test_explicit_mesh(layout, shape, ambient):
    """Results have the sharding of x, and gradients that of their operand, in their type."""
    inputs = draw(M, H, I, H, "float32")
    mesh = make_mesh(shape, AxisType.Explicit)
    with jax.set_mesh(mesh) if ambient else contextlib.nullcontext():
        shardings, args = place(layout, mesh, inputs)
        for implementation in ("host", None, "xla"):
            types = jax.eval_shape(functools.partial(step, implementation), *args)
            assert [t.sharding.spec for t in types[1:]] == [
                jax.typeof(a).sharding.spec for a in args[:4]
            ]
            assert types[0].sharding.spec == types[1].sharding.spec
        ours = compiled("host", args)
        got = ours(*args)
    check_all(got, inputs)
    for g, sharding in zip(got, (shardings[0], *shardings[:4]), strict=True):
        assert g.sharding.is_equivalent_to(sharding, g.ndim)
    if not ambient:
        check_communication(f"{layout}, {case_id(shape)}, Explicit", ours, compiled("xla", args))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_what_one_device_leaves_to_xla(kind, monkeypatch):
    """On a GPU the part of one device may be GEMMs of ours and the rest XLA's, as it is here."""
    lower_ffi = _primitives._lower_ffi

    def lower(op, ctx, *operands, params):
        if op == "matmul":
            return lower_ffi(op, ctx, *operands, params=params)
        reference = functools.partial(getattr(_reference, op), gemm=_primitives._gemm)
        return _partitioning.lower_function(reference, ctx, *operands, params=params)

    monkeypatch.setattr(_primitives, "_lower_ffi", lower)
    inputs = draw(M, H, I, H, "float32")
    mesh = make_mesh((2, 2, 1, 2), kind)
    with jax.set_mesh(mesh):
        _, args = place("by axis", mesh, inputs)
        ours = compiled("host", args)
    check_all(ours(*args), inputs)
    assert "jax_swiglu_glu" not in ours.as_text()


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 2, 1, 2)], ids=["one device", "eight"])
@pytest.mark.parametrize("implementation", ["host", None, "xla"])
def test_every_implementation_on_an_explicit_mesh(implementation, shape):
    """There plain JAX cannot choose the sharding of a product over a split dimension itself."""
    inputs = draw(M, H, I, H, "float32")
    _, args = place("by axis", make_mesh(shape, AxisType.Explicit), inputs)
    check_all(jax.jit(functools.partial(step, implementation))(*args), inputs)


@pytest.mark.parametrize("implementation", ["host", None])
def test_second_derivative_on_an_explicit_mesh(implementation):
    inputs = draw(M, H, I, H, "float32")
    _, args = place("by axis", make_mesh((2, 2, 1, 2), AxisType.Explicit), inputs)

    def slopes(*args):
        return sum(jnp.sum(g**2) for g in step(implementation, *args)[1:])

    got, want = (jax.jit(jax.grad(slopes))(*values) for values in (args, sequences(inputs)))
    check_value(got, np.asarray(want), TOLERANCE["float32"])


# Scan over layers, and shard_map.

LAYERS = 3


def residual_stream(mlp, x, *stacks):
    """x <- x + mlp(x, ...) through all layers, and the gradients for the result as cotangent."""

    def run(x, *stacks):
        def layer(x, weights):
            return x + mlp(x, *weights), None

        return jax.lax.scan(layer, x, stacks)[0]

    out, pullback = jax.vjp(run, x, *stacks)
    return (out, *pullback(out))


def check_residual_stream(got, x, stacks):
    inputs, (x,) = [], wide(x)
    for layer in range(LAYERS):
        inputs.append(x)
        x = x + mlp_and_grads(x, *(s[layer] for s in stacks), x)[0]
    dx, dstacks = x, []
    for layer in reversed(range(LAYERS)):
        _, more, *dweights = mlp_and_grads(inputs[layer], *(s[layer] for s in stacks), dx)
        dx = dx + more
        dstacks.insert(0, dweights)
    for g, w in zip(got, (x, dx, *map(np.stack, zip(*dstacks, strict=True))), strict=True):
        # Each layer adds its roundings.
        check_value(np.asarray(g).reshape(w.shape), w, LAYERS * TOLERANCE["float32"])


def place_layers(mesh, layout):
    """x and weights of all layers; the arrays, and how they are split on the mesh."""
    inputs = [draw(M, H, I, H, "float32", seed=seed) for seed in range(LAYERS)]
    stacks = [np.stack([layer[i] for layer in inputs]) for i in (1, 2, 3)]
    rows, w_in, w_down = LAYOUTS[layout]
    specs = (rows, *(P(None, *spec) for spec in (w_in, w_in, w_down)))
    args = put((inputs[0].x.reshape(BATCH, SEQ, H), *stacks), mesh, specs)
    return (inputs[0].x, stacks), args, specs


@pytest.mark.parametrize(
    ("layout", "shape", "kind"),
    [
        ("by axis", (2, 2, 1, 2), AxisType.Auto),
        ("by axis", (2, 2, 1, 2), AxisType.Explicit),
        ("by axis", (1, 2, 2, 2), AxisType.Auto),
        ("sequence over tensor", (2, 1, 1, 4), AxisType.Explicit),
    ],
    ids=case_id,
)
def test_scan_over_layers(layout, shape, kind):
    layers, args, _ = place_layers(make_mesh(shape, kind), layout)
    shardings = tuple(a.sharding for a in args)
    ours, plain = (
        jax.jit(
            functools.partial(
                residual_stream, functools.partial(js.swiglu_mlp, implementation=which)
            ),
            out_shardings=(shardings[0], *shardings),
        )
        .lower(*args)
        .compile()
        for which in ("host", "xla")
    )
    check_residual_stream(ours(*args), *layers)
    check_communication(f"{layout}, {case_id(shape)}, scan, {kind}", ours, plain)


def mlp_of_a_part(implementation, x, w_gate, w_up, w_down):
    """For shard_map: weights are gathered over fsdp, and the parts of I summed over tensor."""
    gather = functools.partial(jax.lax.all_gather, axis_name="fsdp", tiled=True)
    weights = gather(w_gate, axis=0), gather(w_up, axis=0), gather(w_down, axis=1)
    return jax.lax.psum(js.swiglu_mlp(x, *weights, implementation=implementation), "tensor")


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((8, 1, 1, 1), AxisType.Auto),
        ((1, 1, 1, 8), AxisType.Auto),
        ((1, 2, 2, 2), AxisType.Auto),
        ((2, 2, 1, 2), AxisType.Explicit),
    ],
    ids=case_id,
)
def test_scan_inside_shard_map(shape, kind):
    mesh = make_mesh(shape, kind)
    layers, args, specs = place_layers(mesh, "by axis")
    ours, plain = (
        jax.jit(
            jax.shard_map(
                functools.partial(residual_stream, functools.partial(mlp_of_a_part, which)),
                mesh=mesh,
                in_specs=specs,
                out_specs=(specs[0], *specs),
                check_vma=True,
            )
        )
        .lower(*args)
        .compile()
        for which in ("host", "xla")
    )
    check_residual_stream(ours(*args), *layers)
    check_communication(f"{case_id(shape)}, scan in shard_map, {kind}", ours, plain)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize(
    ("shape", "manual"),
    [
        ((2, 2, 1, 2), {"data"}),
        ((2, 2, 1, 2), {"fsdp"}),
        ((2, 2, 1, 2), {"tensor"}),
        ((2, 2, 1, 2), {"data", "tensor"}),
        ((2, 1, 2, 2), {"data"}),
    ],
    ids=case_id,
)
def test_partly_manual_mesh(shape, manual, kind):
    """The partitioner numbers the devices of the other axes anew for each call."""
    inputs = draw(M, H, I, H, "float32")
    mesh = make_mesh(shape, kind)
    # What types say must fit: manual axes come first, and weights are whole on them but for tensor.
    rows = P(tuple(sorted(BATCH_AXES, key=lambda axis: axis not in manual)), "seq")
    w_in, w_down = (
        restrict(spec, {"fsdp", "tensor"} - manual | {"tensor"}) for spec in LAYOUTS["by axis"][1:]
    )
    specs = (rows, w_in, w_in, w_down, rows)
    args = put(sequences(inputs), mesh, specs)
    inside = [restrict(spec, manual) for spec in specs]

    def mlp(implementation, *args):
        out = js.swiglu_mlp(*args, implementation=implementation)
        return jax.lax.psum(out, "tensor") if "tensor" in manual else out

    def part(implementation, *args):
        out, pullback = jax.vjp(functools.partial(mlp, implementation), *args[:4])
        return (out, *pullback(args[4]))

    ours, plain = (
        jax.jit(
            jax.shard_map(
                functools.partial(part, which),
                mesh=mesh,
                in_specs=tuple(inside),
                out_specs=(inside[0], *inside[:4]),
                axis_names=manual,
            )
        )
        .lower(*args)
        .compile()
        for which in ("host", "xla")
    )
    check_all(ours(*args), inputs)
    if kind == AxisType.Explicit and jax.__version_info__[:2] == (0, 10):
        # JAX 0.10 forgets how operands are split there and gathers them, in plain JAX even more.
        moved, allowed = (sum(collective_bytes(p.as_text()).values()) for p in (ours, plain))
        assert moved <= allowed
    else:
        check_communication(f"{case_id(shape)}, manual {sorted(manual)}, {kind}", ours, plain)


def test_shard_map_inside_another():
    """Each over one axis, with one left to the partitioner."""
    inputs = draw(M, H, I, H, "float32")
    mesh = make_mesh((2, 2, 1, 2))
    rows, w_in, w_down = LAYOUTS["by axis"]
    args = put(sequences(inputs), mesh, (rows, w_in, w_in, w_down, rows))

    def over(axis, function):
        def mapped(*args):
            inner = jax.sharding.get_abstract_mesh()
            return jax.shard_map(
                function,
                mesh=mesh if inner.empty else inner,
                in_specs=(P(axis), P(), P(), P(), P(axis)),
                out_specs=(P(axis), P(axis), P(), P(), P()),
                axis_names={axis},
            )(*args)

        return mapped

    ours, plain = (
        jax.jit(over("data", over("fsdp", functools.partial(step, which)))).lower(*args).compile()
        for which in ("host", "xla")
    )
    check_all(ours(*args), inputs)
    check_communication("shard_map in shard_map", ours, plain)


def restrict(spec, axes):
    """The spec without other axes."""
    parts = (part if isinstance(part, tuple) else (part,) for part in spec)
    return P(*(tuple(axis for axis in part if axis in axes) or None for part in parts))


# vmap over stages of a pipeline, which lie on different devices.

STAGE_AXES = ("stage", "data", "fsdp", "tensor")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize("shape", [(8, 1, 1, 1), (2, 4, 1, 1), (2, 1, 2, 2)], ids=str)
def test_vmap_over_stages(shape, kind):
    stages = [draw(M, H, I, H, "float32", seed=seed) for seed in range(8)]
    stacked = [np.stack(arrays) for arrays in zip(*map(sequences, stages), strict=True)]
    rows, w_in, w_down = P(("data", "fsdp")), P("fsdp", "tensor"), P("tensor", "fsdp")
    specs = [P("stage", *spec) for spec in (rows, w_in, w_in, w_down, rows)]
    args = put(stacked, make_mesh(shape, kind, STAGE_AXES), specs)
    # On explicit axes the type of the arguments says the same.
    name = "stage" if kind == AxisType.Auto else None
    shardings = tuple(a.sharding for a in args)
    ours, plain = (
        jax.jit(
            jax.vmap(functools.partial(step, which), spmd_axis_name=name),
            out_shardings=(shardings[0], *shardings[:4]),
        )
        .lower(*args)
        .compile()
        for which in ("host", "xla")
    )
    for stage, got in zip(stages, zip(*map(np.asarray, ours(*args)), strict=True), strict=True):
        check_all(got, stage)
    check_communication(f"{len(stages)} stages on {shape}, {kind}", ours, plain)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize("mapped", [(0, 4), (1, 2, 3), (0, 1, 4), (1, 3, 4)], ids=str)
def test_vmap_of_some_operands_over_stages(mapped, kind):
    """What is not mapped is whole on the axis of the stages."""
    stages = [draw(M, H, I, H, "float32", seed=seed) for seed in range(2)]
    stages = [Inputs(*(s[i] if i in mapped else stages[0][i] for i in range(5))) for s in stages]
    each = [sequences(s) for s in stages]
    arrays = [np.stack([s[i] for s in each]) if i in mapped else each[0][i] for i in range(5)]
    rows, w_in, w_down = P(("data", "fsdp")), P("fsdp", "tensor"), P("tensor", "fsdp")
    specs = [
        P("stage", *spec) if i in mapped else spec
        for i, spec in enumerate((rows, w_in, w_in, w_down, rows))
    ]
    args = put(arrays, make_mesh((2, 2, 1, 2), kind, STAGE_AXES), specs)
    name = "stage" if kind == AxisType.Auto else None
    axes = [0 if i in mapped else None for i in range(5)]
    got = jax.jit(jax.vmap(functools.partial(step, "host"), axes, spmd_axis_name=name))(*args)
    for stage, values in zip(stages, zip(*map(np.asarray, got), strict=True), strict=True):
        check_all(values, stage)


# Single faults.


def test_result_keeps_the_rows_of_x_without_a_gather():
    """A custom call without a rule has its operands gathered, and a result that is not split."""
    inputs = draw(M, H, I, H, "bfloat16")
    x, *weights = put(inputs.operands, make_mesh((2, 1, 1, 1)), (P("data", None), P(), P(), P()))
    program = jax.jit(functools.partial(js.swiglu_mlp, implementation="host"))
    program = program.lower(x, *weights).compile()
    assert not collective_bytes(program.as_text())
    assert program(x, *weights).sharding.spec[0] == "data"


@pytest.mark.parametrize("axis", ["data", "seq"])
def test_weight_gradients_are_reduced_not_gathered(axis):
    """Rows that are contracted must keep their axis, whichever of their dimensions it splits."""
    inputs = draw(M, H, I, H, "float32")
    shape = tuple(2 if name == axis else 1 for name in AXES)
    _, args = place("by axis", make_mesh(shape), inputs)
    moved = collective_bytes(compiled("host", args).as_text())
    assert moved == {"all-reduce": 3 * H * I * 4}


def test_results_inside_shard_map_vary_as_their_operands():
    """Else the carry of a scan would have another type behind the layer than before it."""
    inputs = draw(M, H, I, H, "float32")
    mesh = make_mesh((2, 1, 1, 1))

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("data"), P(), P(), P()),
        out_specs=P("data"),
        check_vma=True,
    )
    def twice(x, *weights):
        mlp = functools.partial(js.swiglu_mlp, implementation="host")
        return jax.lax.scan(lambda x, _: (mlp(x, *weights), None), x, length=2)[0]

    want = mlp(mlp(*inputs.operands), *inputs[1:4])
    check_value(jax.jit(twice)(*inputs.operands), want, 2 * TOLERANCE["float32"])


@pytest.mark.parametrize("inside", [False, True], ids=["grad of shard_map", "grad in shard_map"])
def test_gradients_of_replicated_weights_are_summed_once(inside):
    inputs = draw(4, H, I, H, "float32")
    mesh = make_mesh((2, 1, 1, 1))
    specs = (P("data"), P(), P(), P())
    map_over_rows = functools.partial(jax.shard_map, mesh=mesh, check_vma=True)
    if inside:
        function = functools.partial(step, "host")
        function = map_over_rows(
            function, in_specs=(*specs, P("data")), out_specs=(P("data"), *specs)
        )
    else:
        mlp = functools.partial(js.swiglu_mlp, implementation="host")
        mapped = map_over_rows(mlp, in_specs=specs, out_specs=P("data"))

        def function(*args):
            out, pullback = jax.vjp(mapped, *args[:4])
            return (out, *pullback(args[4]))

    check_all(jax.jit(function)(*inputs), inputs)


@pytest.mark.parametrize(
    "split", [(None, None, "tensor"), ("tensor",), (None, "data"), ()], ids=str
)
@pytest.mark.parametrize("shape", [(2, 1, 1, 2), (4, 1, 1, 2), (2, 2, 1, 2)], ids=case_id)
@pytest.mark.parametrize("layout", ["whole weights", "by axis", "FSDP over two axes"])
def test_cotangent_with_another_sharding(layout, shape, split):
    """Plain JAX and we exchange it in different ways: only the sum of all kinds compares."""
    inputs = draw(M, H, I, H, "float32")
    rows, w_in, w_down = LAYOUTS.get(layout, (P("data"), P(), P()))
    args = put(sequences(inputs), make_mesh(shape), (rows, w_in, w_in, w_down, P(*split)))
    where = tuple(a.sharding for a in (args[0], *args[:4]))
    ours, plain = (compiled(which, args, where) for which in ("host", "xla"))
    check_all(ours(*args), inputs)
    moved, allowed = (collective_bytes(program.as_text()) for program in (ours, plain))
    assert sum(moved.values()) <= sum(allowed.values())


# Dimensions that the mesh does not divide cannot be placed so; a constraint can split them.


@pytest.mark.parametrize(
    ("rows", "split"),
    [((30,), ("data",)), ((6, 8), ("data",)), ((4, 7), (None, "data")), ((3, 5), ("fsdp", "data"))],
    ids=str,
)
def test_rows_that_the_mesh_does_not_divide(rows, split):
    inputs = draw(math.prod(rows), H, I, H, "float32")
    x, *weights, dout = inputs
    sharding = NamedSharding(make_mesh((4, 2, 1, 1)), P(*split))

    @jax.jit
    def constrained(x, *rest):
        return step("host", jax.lax.with_sharding_constraint(x, sharding), *rest)

    check_all(constrained(x.reshape(*rows, H), *weights, dout.reshape(*rows, H)), inputs)


@pytest.mark.parametrize("intermediate", [10, 12])
def test_tensor_parallel_over_four(intermediate):
    inputs = draw(M, H, intermediate, H, "float32")
    mesh = make_mesh((1, 1, 1, 4))

    @jax.jit
    def constrained(x, w_gate, w_up, w_down, dout):
        columns, rows = (NamedSharding(mesh, s) for s in (P(None, "tensor"), P("tensor", None)))
        w_gate, w_up = (jax.lax.with_sharding_constraint(w, columns) for w in (w_gate, w_up))
        w_down = jax.lax.with_sharding_constraint(w_down, rows)
        return step("host", x, w_gate, w_up, w_down, dout)

    check_all(constrained(*inputs), inputs)


def test_sequence_gathered_by_hand_is_scattered_again():
    """Megatron's sequence parallelism: x is gathered in front, the sum over I scattered behind."""
    inputs = draw(M, H, I, H, "float32")
    _, args = place("sequence over tensor", make_mesh((2, 1, 1, 4)), inputs)
    split = args[0].sharding
    whole = NamedSharding(split.mesh, P("data"))

    def run(implementation, x, *weights):
        x = jax.lax.with_sharding_constraint(x, whole)
        out = js.swiglu_mlp(x, *weights, implementation=implementation)
        return jax.lax.with_sharding_constraint(out, split)

    ours, plain = (
        jax.jit(functools.partial(run, which)).lower(*args[:4]).compile()
        for which in ("host", "xla")
    )
    check_value(
        np.asarray(ours(*args[:4])).reshape(M, H), mlp_and_grads(*inputs)[0], TOLERANCE["float32"]
    )
    assert "all-reduce(" not in ours.as_text()
    check_communication("sequence parallel, by hand", ours, plain)


# The mesh as the rules see it.


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        (P("a", "b"), [("a.0",), ("b.0",), ()]),
        (P(("b", "a"), None, "c"), [("b.0", "a.0"), (), ("c.0", "c.1")]),
        (P(None, ("a", "c", "b")), [(), ("a.0", "c.0", "c.1", "b.0"), ()]),
        (P("b", ("c", "a")), [(), ("c.0", "c.1", "a.0"), ()]),
        (P(), [(), (), ()]),
    ],
    ids=str,
)
def test_axes_of_a_sharding(spec, want):
    """Each axis of 4 is two of 2; three do not divide the first dimension."""
    mesh = jax.sharding.AbstractMesh((2, 3, 4), ("a", "b", "c"))
    shape = (8 if want[0] == () else 6, 24, 8)
    info = jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
    assert DeviceMesh.of(mesh.shape, ()).axes(info) == want


def test_six_devices():
    inputs = draw(36, H, I, H, "float32")
    mesh = jax.make_mesh((3, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = (P("data"), P(None, "tensor"), P(None, "tensor"), P("tensor"), P("data"))
    args = put(inputs, mesh, specs)
    ours, plain = (compiled(which, args) for which in ("host", "xla"))
    check_all(ours(*args), inputs)
    check_communication("six devices", ours, plain)


def test_two_products_are_summed_once():
    """Where the contracted dimension is split over devices: one sum of both."""
    from jax_swiglu._config import OpParams

    rng = np.random.default_rng(0)
    shapes = ((8, 16), (16, 4)) * 2
    a, b, c, d = matrices = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    params = OpParams(False, False, True, "", np.dtype(np.float32), "host", None)
    mesh = make_mesh((8, 1, 1, 1))
    args = put(matrices, mesh, (P(None, "data"), P("data", None)) * 2)
    program = jax.jit(lambda *args: matmul_p.bind(*args, params=params)).lower(*args).compile()
    assert collective_bytes(program.as_text()) == {"all-reduce": 8 * 4 * 4}
    (got,) = program(*args)
    check_value(got, a.astype(float) @ b + c.astype(float) @ d, TOLERANCE["float32"])


def test_one_device_needs_no_rule():
    """So that a program can be exported and found in the compile cache."""
    inputs = draw(M, H, I, H, "float32")
    text = jax.jit(functools.partial(step, "host")).lower(*inputs).as_text()
    assert "CustomSPMDPartitioning" not in text
    _, args = place("by axis", make_mesh((2, 1, 1, 1)), inputs)
    text = jax.jit(functools.partial(step, "host")).lower(*args).as_text()
    assert "CustomSPMDPartitioning" in text


def test_compile_cache_hits_in_the_next_process(tmp_path, run_python):
    program = textwrap.dedent(f"""
        import jax, jax.numpy as jnp, jax_swiglu as js
        jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        events = []
        jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
        x, w = jnp.ones((8, 4)), jnp.ones((4, 4))
        loss = lambda *a: js.swiglu_mlp(*a, implementation="host").sum()
        jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1, 2, 3)))(x, w, w, w))
        print(sum("cache_hits" in e for e in events), sum("cache_misses" in e for e in events))
    """)
    first, second = (run_python([sys.executable, "-c", program]) for _ in range(2))
    for result in (first, second):
        assert result.returncode == 0, result.stderr
    assert int(first.stdout.split()[0]) == 0
    hits, misses = map(int, second.stdout.split())
    assert hits > 0
    assert misses == 0
