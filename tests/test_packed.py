"""`swiglu_mlp_packed`: gate and up as views of one parameter, in each packing."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _programs import with_grads
from _reference64 import (
    TOLERANCE,
    Inputs,
    check_value,
    draw,
    mlp_and_grads,
    relative_error,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_lowering import lower

import jax_swiglu as js
from benchmarks.collectives import collective_bytes
from jax_swiglu import _ffi, _vjp
from jax_swiglu._config import Config
from jax_swiglu.convert import Packing, pack, unpack

AXES = ("H 2 I", "2 H I", "2 I H", "H (2 I)", "(2 I) H")
OPEN = AXES[:3]
PACKINGS = [
    *(pytest.param(Packing(axes), id=axes) for axes in AXES),
    *(pytest.param(Packing(axes, up_first=True), id=f"{axes} up first") for axes in OPEN),
]
packings = pytest.mark.parametrize("packing", PACKINGS)
open_axes = pytest.mark.parametrize("axes", OPEN)
NAMES = ("out", "dx", "dw_gate_up", "dw_down")


def stored(inputs, packing, layout="in_out"):
    """x, w_gate_up, w_down and dout."""
    w_down = inputs.w_down if layout == "in_out" else np.ascontiguousarray(inputs.w_down.T)
    w_gate_up = np.ascontiguousarray(pack(inputs.w_gate, inputs.w_up, packing))
    return inputs.x, w_gate_up, w_down, inputs.dout


def reference(inputs, packing, layout="in_out"):
    """out, dx, dw_gate_up and dw_down in float64."""
    out, dx, dw_gate, dw_up, dw_down = mlp_and_grads(*inputs)
    dw_gate_up = pack(dw_gate, dw_up, packing)
    return out, dx, dw_gate_up, dw_down if layout == "in_out" else dw_down.T


def op(packing, **options):
    return functools.partial(js.swiglu_mlp_packed, packing=packing, **options)


def run(args, packing, **options):
    return jax.jit(functools.partial(with_grads, op(packing, **options)))(*args)


def check(got, want, dtype, tolerance=None):
    for name, g, w in zip(NAMES, got, want, strict=True):
        assert g.dtype == dtype, f"{name} has dtype {g.dtype}"
        check_value(g, w, tolerance or TOLERANCE[dtype], name)


# Values.


@packings
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("implementation", ["host", "xla", None])
def test_values(implementation, dtype, packing):
    inputs = draw(13, 40, 77, 24, dtype)
    got = run(stored(inputs, packing), packing, implementation=implementation)
    check(got, reference(inputs, packing), dtype)


@open_axes
@pytest.mark.parametrize("residuals", ["gate_up", "full", "input"])
@pytest.mark.parametrize("implementation", ["host", None])
def test_residuals_and_the_layout_of_w_down(implementation, residuals, axes):
    packing = Packing(axes)
    inputs = draw(13, 40, 77, 24, "float16")
    got = run(
        stored(inputs, packing, "out_in"),
        packing,
        implementation=implementation,
        residuals=residuals,
        weight_layout="out_in",
    )
    check(got, reference(inputs, packing, "out_in"), "float16")


@packings
@pytest.mark.parametrize("implementation", ["host", "xla", None])
def test_a_shape_that_fits_every_packing(implementation, packing):
    inputs = draw(5, 2, 2, 2, "float32")
    got = run(stored(inputs, packing), packing, implementation=implementation)
    check(got, reference(inputs, packing), "float32")


@pytest.mark.parametrize("sizes", [(5, 64, 3420, 64), (1, 33, 129, 7), (3, 1, 1, 1)], ids=str)
@open_axes
def test_odd_sizes(axes, sizes):
    packing = Packing(axes)
    inputs = draw(*sizes, "bfloat16")
    got = run(stored(inputs, packing), packing, implementation="host")
    # With so few elements the errors of single roundings do not average out.
    tolerance = TOLERANCE["bfloat16"] * (4 if sizes[2] <= 3 else 1)
    check(got, reference(inputs, packing), "bfloat16", tolerance)


def test_all_routes_are_known():
    for axes in OPEN:
        joint = ("joint",) * (axes != "2 H I")
        for extra in (False, True):
            routes = ["dual", "epilogue", "pointwise", *joint]
            assert _ffi.routes("glu_fwd", extra, axes) == routes
            assert _ffi.routes("glu_bwd", extra, axes) == ["epilogue", "pointwise"]
    assert _ffi.routes("matmul", False, "2 H I") == ["epilogue", "pointwise"]


ROUTES = [
    *itertools.product(("H 2 I", "2 I H"), ("dual", "epilogue", "pointwise", "joint")),
    *itertools.product(("2 H I",), ("dual", "epilogue", "pointwise")),
]


@pytest.mark.parametrize("up_first", [False, True], ids=["", "up first"])
@pytest.mark.parametrize("residuals", ["gate_up", "input"])
@pytest.mark.parametrize("glu_bwd_route", ["epilogue", "pointwise"])
@pytest.mark.parametrize(("axes", "glu_fwd_route"), ROUTES)
def test_glu_routes(axes, glu_fwd_route, glu_bwd_route, residuals, up_first):
    packing = Packing(axes, up_first=up_first)
    inputs = draw(11, 36, 53, 20, "bfloat16")
    config = Config(
        dtype=np.dtype("bfloat16"),
        implementation="host",
        residuals=residuals,
        packing=axes,
        up_first=up_first,
        glu_fwd_route=glu_fwd_route,
        glu_bwd_route=glu_bwd_route,
    )
    function = functools.partial(_vjp.swiglu_mlp, config)
    got = jax.jit(functools.partial(with_grads, function))(*stored(inputs, packing))
    check(got, reference(inputs, packing), "bfloat16")


@pytest.mark.parametrize("route", ["epilogue", "pointwise"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_routes_of_the_input_gradient_that_is_two_gemms(out_dtype, route):
    rng = np.random.default_rng(0)
    d = rng.standard_normal((9, 2, 14)).astype("bfloat16")
    w = rng.standard_normal((2, 31, 14)).astype("bfloat16")
    config = Config(
        dtype=np.dtype("bfloat16"), implementation="host", packing="2 H I", matmul_route=route
    )
    wanted = _vjp._Type(np.dtype(out_dtype), None)
    got = _vjp._matmul(config, d, w, rhs_transposed=True, packed=True, out_type=wanted)
    want = np.einsum("mgi,ghi->mh", d.astype(float), w.astype(float))
    assert got.dtype == out_dtype
    check_value(got, want, TOLERANCE[out_dtype])


@open_axes
@pytest.mark.parametrize("implementation", ["host", None])
def test_weight_gradients_of_float32_weights_skip_bfloat16(implementation, axes):
    packing = Packing(axes)
    # Terms of one sign, so that their errors average out and only the last rounding is left.
    rounded = draw(256, 24, 40, 32, "bfloat16", positive=True)
    x, *weights, dout = stored(rounded, packing)
    master = (x, *(w.astype(np.float32) for w in weights), dout)
    want = reference(rounded, packing)
    options = {"implementation": implementation, "dtype": "bfloat16"}
    out, dx, *fine = run(master, packing, **options)
    _, _, *coarse = run((x, *weights, dout), packing, **options)
    assert out.dtype == dx.dtype == jnp.bfloat16
    for name, f, c, right in zip(NAMES[2:], fine, coarse, want[2:], strict=True):
        assert (f.dtype, c.dtype) == (jnp.float32, jnp.bfloat16)
        error, rounded_error = relative_error(f, right), relative_error(c, right)
        assert error < rounded_error / 2, f"{name}: {error:.3g} against {rounded_error:.3g}"


# Transformations.


@pytest.mark.parametrize("argnums", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("residuals", ["gate_up", "full", "input"])
def test_frozen_operands(residuals, argnums):
    packing = Packing("H 2 I")
    inputs = draw(5, 6, 10, 4, "float32")
    *args, dout = map(jnp.asarray, stored(inputs, packing))
    function = op(packing, implementation="host", residuals=residuals)

    def loss(*args):
        return jnp.vdot(function(*args), dout)

    got = jax.jit(jax.grad(loss, argnums))(*args)
    want = reference(inputs, packing)[1:]
    for number, g in zip(argnums, got, strict=True):
        check_value(g, want[number], TOLERANCE["float32"], NAMES[number + 1])


@open_axes
@pytest.mark.parametrize(
    "mapped",
    [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, None), (0, 0, 0)],
    ids=str,
)
@pytest.mark.parametrize("implementation", ["host", None])
def test_vmap(implementation, mapped, axes):
    packing = Packing(axes)
    examples = [draw(6, 8, 10, 4, "float32", seed=seed) for seed in range(3)]
    each = [stored(inputs, packing) for inputs in examples]
    # Cotangents are mapped, and on their second axis.
    args = [
        np.stack([e[i] for e in each]) if axis == 0 else each[0][i] for i, axis in enumerate(mapped)
    ]
    dout = np.stack([e[3] for e in each], axis=1)
    step = functools.partial(with_grads, op(packing, implementation=implementation))
    got = jax.jit(jax.vmap(step, in_axes=(*mapped, 1)))(*args, dout)
    for b in range(3):
        one = [a[b] if axis == 0 else a for a, axis in zip(args, mapped, strict=True)]
        w_gate, w_up = unpack(one[1], packing)
        inputs = Inputs(one[0], w_gate, w_up, one[2], dout[:, b])
        check([g[b] for g in got], reference(inputs, packing), "float32")


@open_axes
@pytest.mark.parametrize("implementation", ["host", None])
def test_vmap_twice_over_everything(implementation, axes):
    packing = Packing(axes)
    each = [stored(draw(6, 8, 10, 4, "float32", seed=seed), packing) for seed in range(4)]
    args = [np.stack(a).reshape(2, 2, *a[0].shape) for a in zip(*each, strict=True)]
    step = functools.partial(with_grads, op(packing, implementation=implementation))
    got = jax.jit(jax.vmap(jax.vmap(step)))(*args)
    for b, seed in np.ndindex(2, 2):
        inputs = draw(6, 8, 10, 4, "float32", seed=2 * b + seed)
        check([g[b, seed] for g in got], reference(inputs, packing), "float32")


@open_axes
@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
def test_scan_over_a_stack(remat, axes):
    packing = Packing(axes)
    layers = [stored(draw(6, 8, 10, 8, "float32", seed=seed), packing) for seed in range(3)]
    x, dout = layers[0][0], layers[0][3]
    stacks = [np.stack([layer[i] for layer in layers]) for i in (1, 2)]

    def scanned(implementation):
        def layer(x, weights):
            return x + op(packing, implementation=implementation)(x, *weights), None

        def function(x, *stacks):
            return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, stacks)[0]

        return jax.jit(functools.partial(with_grads, function))(x, *stacks, dout)

    for got, want in zip(scanned("host"), scanned("xla"), strict=True):
        check_value(got, np.asarray(want), 1e-5)


@open_axes
@pytest.mark.parametrize("rows", [64, 512, 4096])
@pytest.mark.parametrize("implementation", ["host", "xla", None])
def test_weight_gradients_are_summed_in_float32(implementation, rows, axes):
    """Of one sign, so that sums outgrow what a bfloat16 can be incremented by."""
    packing = Packing(axes)
    inputs = draw(rows, 16, 32, 16, "bfloat16", positive=True)
    got = run(stored(inputs, packing), packing, implementation=implementation)
    check(got, reference(inputs, packing), "bfloat16")


@open_axes
@pytest.mark.parametrize("implementation", ["host", None])
@pytest.mark.parametrize("scanned", [False, True], ids=["", "in a scan"])
def test_remat(scanned, implementation, axes):
    packing = Packing(axes)
    inputs = draw(64, 128, 256, 128, "bfloat16")
    function = jax.checkpoint(op(packing, implementation=implementation), prevent_cse=not scanned)

    def scan(x, *weights):
        stacks = [w[None] for w in weights]
        return jax.lax.scan(lambda x, w: (function(x, *w), None), x, stacks)[0]

    step = functools.partial(with_grads, scan if scanned else function)
    got = jax.jit(step)(*stored(inputs, packing))
    check(got, reference(inputs, packing), "bfloat16")


@pytest.mark.parametrize("implementation", ["host", "xla"])
@pytest.mark.parametrize(("names", "kept"), [(("swiglu_gate",), 1), (("swiglu_up",), 0)], ids=str)
def test_name_of_gate_and_up_in_policies(names, kept, implementation):
    """They are one array, and have the name of gate."""
    packing = Packing("H 2 I")
    args = [jnp.asarray(a) for a in stored(draw(5, 6, 10, 4, "float32"), packing)]
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    function = jax.checkpoint(op(packing, implementation=implementation), policy=policy)
    _, pullback = jax.vjp(function, *args[:3])
    saved = [leaf.shape for leaf in jax.tree.leaves(pullback)]
    assert saved.count((5, 2, 10)) == kept


@open_axes
@pytest.mark.parametrize("implementation", ["host", None])
def test_second_derivatives(implementation, axes):
    args = [jnp.asarray(a) for a in stored(draw(4, 3, 5, 2, "float32"), Packing(axes))]

    def penalty(implementation):
        def loss(*args):
            grads = with_grads(op(axes, implementation=implementation), *args)[1:]
            return sum(jnp.sum(g**2) for g in grads)

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*args)

    for got, want in zip(penalty(implementation), penalty("xla"), strict=True):
        check_value(got, np.asarray(want), 1e-5)


@open_axes
@pytest.mark.parametrize("leading", [(), (2, 3, 2)], ids=str)
def test_leading_dimensions(leading, axes):
    packing = Packing(axes)
    rows = int(np.prod(leading))
    inputs = draw(rows, 8, 10, 4, "float32")
    x, *weights, dout = stored(inputs, packing)
    args = (x.reshape(*leading, 8), *weights, dout.reshape(*leading, 4))
    out, dx, *dweights = run(args, packing, implementation="host")
    assert (out.shape, dx.shape) == ((*leading, 4), (*leading, 8))
    got = (out.reshape(rows, 4), dx.reshape(rows, 8), *dweights)
    check(got, reference(inputs, packing), "float32")


@packings
@pytest.mark.parametrize("sizes", [(0, 8, 6, 4), (3, 8, 0, 4)], ids=str)
@pytest.mark.parametrize("implementation", ["host", "xla", None])
def test_zero_sizes(implementation, sizes, packing):
    inputs = draw(*sizes[:2], 6, sizes[3], "float32")
    inputs = inputs._replace(
        w_gate=inputs.w_gate[:, : sizes[2]],
        w_up=inputs.w_up[:, : sizes[2]],
        w_down=inputs.w_down[: sizes[2]],
    )
    args = stored(inputs, packing)
    for got, want in zip(
        run(args, packing, implementation=implementation),
        (inputs.dout, *args[:3]),
        strict=True,
    ):
        np.testing.assert_array_equal(got, np.zeros_like(want))


# What becomes of it in the program.


def specs(packing, dtype="bfloat16", *, sizes=(72, 8, 16, 6)):
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in stored(draw(*sizes, dtype), packing)]


def gemm_sizes(call):
    """(M, N, K) of the one GEMM of a matmul, where it is one."""
    a, b = (int(np.prod(shape)) for shape in call.operand_shapes[:2])
    out = int(np.prod(call.result_types[0][:-1]))
    # a = MK, b = KN, out = MN
    m, n, k = (round((x * y / z) ** 0.5) for x, y, z in ((a, out, b), (b, out, a), (a, b, out)))
    assert (m * k, k * n, m * n) == (a, b, out)
    return m, n, k


@packings
@pytest.mark.parametrize(("implementation", "platform"), [("cudnn", "cuda"), ("host", "cpu")])
def test_program(implementation, platform, packing):
    """One call forward, one backward, and one for each gradient; nothing else but reshapes."""
    function = functools.partial(with_grads, op(packing, implementation=implementation))
    program = lower(function, *specs(packing), platform=platform)
    glu_fwd, down, glu_bwd, dx, dw_gate_up, dw_down = program.calls()
    opened = " ".join(packing.letters)
    transposed = opened == "2 I H"
    assert [c.flags for c in (glu_fwd, down, glu_bwd, dx, dw_gate_up, dw_down)] == [
        ("glu_fwd", False, transposed, True),
        ("matmul", False, False, False),
        ("glu_bwd", False, True, True),
        ("matmul", False, not transposed, False),
        ("matmul", True, False, False),
        ("matmul", True, False, False),
    ]
    for call in (glu_fwd, glu_bwd, dx, dw_gate_up):
        assert call.attributes["packing"] == opened
    for call in (glu_fwd, glu_bwd):
        assert call.attributes["up_first"] == packing.up_first
    for call in (down, dw_down):
        assert call.attributes["packing"] == ""
    joined = {"reshape"} if "(" in packing.axes else set()
    assert program.names() == {"custom_call", "func.return"} | joined
    m, h, i, _ = 72, 8, 16, 6
    gate_up = (m, 2, i)
    assert glu_fwd.result_types[1][:-1] == glu_bwd.result_types[0][:-1] == gate_up
    assert glu_bwd.operand_shapes[2] == gate_up and dx.operand_shapes[0] == gate_up
    assert gemm_sizes(dx) == (m, h, 2 * i)
    assert gemm_sizes(dw_gate_up) == ((2 * i, h, m) if transposed else (h, 2 * i, m))


@packings
def test_compiled_program_transposes_and_copies_nothing(packing):
    function = functools.partial(with_grads, op(packing, implementation="host"))
    compiled = jax.jit(function).lower(*specs(packing)).compile().as_text()
    for instruction in ("transpose", "copy", "convert", "fusion", "slice"):
        assert f" {instruction}(" not in compiled
    assert compiled.count('custom_call_target="jax_swiglu_') == 6


@open_axes
def test_float32_weights_are_cast_once_and_their_gradients_not_at_all(axes):
    packing = Packing(axes)
    x, *weights, dout = specs(packing)
    weights = [jax.ShapeDtypeStruct(w.shape, "float32") for w in weights]
    function = op(packing, dtype="bfloat16", implementation="cudnn")
    program = lower(functools.partial(with_grads, function), x, *weights, dout)
    *_, dw_gate_up, dw_down = program.calls()
    assert [c.result_types[0][-1] for c in (dw_gate_up, dw_down)] == ["f32"] * 2
    (returned,) = (
        o for o in program.main.regions[0].blocks[0].operations if o.operation.name == "func.return"
    )
    assert list(returned.operands)[2:] == [c.op.results[0] for c in (dw_gate_up, dw_down)]


@open_axes
def test_weight_gradients_over_few_rows_go_to_xla(axes):
    """But for the packings whose gradient XLA would have to transpose."""
    packing = Packing(axes)
    for m in (64, 65):
        program = lower(
            functools.partial(with_grads, op(packing)), *specs(packing, sizes=(m, 8, 16, 6))
        )
        calls = [c for c in program.calls() if c.attributes["lhs_transposed"]]
        assert len(calls) == (2 if m > 64 else int(axes != "2 I H"))
        assert "transpose" not in program.names()


# Half of a row, or of the array, is aligned as its size is.
@pytest.mark.parametrize(
    ("axes", "op_name", "sizes", "names"),
    [
        # x[m,k] @ w[k,n]: with n=3420 the up half of a row begins at byte 6840 = 8 mod 16.
        ("H 2 I", "glu_fwd", (5, 64, 3420), ("w_up", "up", "rhs")),
        ("H 2 I", "glu_fwd", (5, 64, 3424), ()),
        ("2 H I", "glu_fwd", (5, 3, 5), ("w_up", "up", "rhs")),
        ("2 I H", "glu_fwd", (5, 64, 1), ("up",)),
        ("2 I H", "glu_bwd", (5, 64, 77), ("up", "dup", "dh", "out")),
        ("2 I H", "glu_bwd", (5, 64, 80), ()),
        ("2 H I", "matmul", (5, 77, 64), ("a", "b")),
        ("2 H I", "matmul", (5, 80, 1), ()),
    ],
    ids=str,
)
def test_alignment_of_halves(axes, op_name, sizes, names):
    found = _ffi.misaligned(op_name, *sizes, axes)
    assert set(found) <= set(names)
    assert bool(found) == bool(names)


# Several devices.

M, H, I = 32, 16, 48
ROWS = ("data", "fsdp")
LAYOUTS = {
    "data parallel": ((2, 2, 2), P(("data", "fsdp", "tensor")), {}, P()),
    "FSDP": ((1, 8, 1), P(ROWS), {"H": "fsdp"}, P(None, "fsdp")),
    "tensor parallel": ((2, 1, 2), P(), {"I": "tensor"}, P("tensor", None)),
    "data and tensor": ((2, 1, 4), P("data"), {"I": "tensor"}, P("tensor", None)),
    "FSDP and tensor": (
        (2, 2, 2),
        P(ROWS),
        {"H": "fsdp", "I": "tensor"},
        P("tensor", "fsdp"),
    ),
}


def make_mesh(shape, kind=AxisType.Auto):
    return jax.make_mesh(shape, ("data", "fsdp", "tensor"), axis_types=(kind,) * 3)


def place(layout, axes, inputs, kind=AxisType.Auto):
    shape, rows, split, w_down = LAYOUTS[layout]
    mesh = make_mesh(shape, kind)
    w_in = P(*(split.get(letter) for letter in axes.split()))
    shardings = [NamedSharding(mesh, spec) for spec in (rows, w_in, w_down, rows)]
    args = stored(inputs, Packing(axes))
    return shardings, [jax.device_put(a, s) for a, s in zip(args, shardings, strict=True)]


def einsum_mlp(axes, x, w_gate_up, w_down):
    """What people write for a packed parameter without us."""
    weight = axes.replace(" ", "").replace("2", "g").lower()
    gate_up = jnp.einsum(f"mh,{weight}->mgi", x, w_gate_up)
    return (jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1]) @ w_down


@pytest.mark.parametrize(
    ("axes", "gradients"),
    [("H 2 I", "anywhere"), *((axes, "as the operands") for axes in OPEN)],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_communication(axes, layout, gradients):
    inputs = draw(M, H, I, H, "float32")
    shardings, args = place(layout, axes, inputs)
    where = (shardings[0], *shardings[:3]) if gradients == "as the operands" else None

    def compiled(function):
        jitted = jax.jit(functools.partial(with_grads, function), out_shardings=where)
        return jitted.lower(*args).compile()

    ours = compiled(op(axes, implementation="host"))
    plain = compiled(functools.partial(einsum_mlp, axes))
    check(ours(*args), reference(inputs, Packing(axes)), "float32")
    moved, allowed = (collective_bytes(program.as_text()) for program in (ours, plain))
    print(f"{axes} {layout:16} {gradients:16} ours {dict(moved)} plain {dict(allowed)}")
    assert moved["all-reduce"] <= allowed["all-reduce"]
    assert moved["all-gather"] <= allowed["all-gather"]
    assert moved["all-to-all"] + moved["collective-permute"] == 0


@open_axes
def test_each_device_has_its_half_of_gate_and_its_half_of_up(axes):
    inputs = draw(M, H, I, H, "float32")
    _, (x, w_gate_up, w_down, _) = place("tensor parallel", axes, inputs)
    half = [slice(None)] * 3
    half[axes.split().index("I")] = slice(0, I // 2)
    for shard in w_gate_up.addressable_shards[:1]:
        gate, up = unpack(np.asarray(shard.data), Packing(axes))
        np.testing.assert_array_equal(gate, inputs.w_gate[:, : I // 2])
        np.testing.assert_array_equal(up, inputs.w_up[:, : I // 2])
    program = jax.jit(op(axes, implementation="host")).lower(x, w_gate_up, w_down).compile()
    moved = collective_bytes(program.as_text())
    assert moved == {"all-reduce": M * H * 4}


@pytest.mark.parametrize("intermediate", [10, 12])
@pytest.mark.parametrize("axes", AXES)
def test_tensor_parallel_over_four(axes, intermediate):
    """With I=10, which four does not divide, the weights cannot be placed so; a constraint can.

    Of joined dimensions the first half of the devices gets gate, and XLA has to exchange parts.
    """
    inputs = draw(M, H, intermediate, H, "float32")
    mesh = make_mesh((1, 1, 4))
    spec = ["tensor" if "I" in dim else None for dim in Packing(axes).dims]

    @jax.jit
    def constrained(x, w_gate_up, w_down, dout):
        columns, rows = (NamedSharding(mesh, s) for s in (P(*spec), P("tensor", None)))
        w_gate_up = jax.lax.with_sharding_constraint(w_gate_up, columns)
        w_down = jax.lax.with_sharding_constraint(w_down, rows)
        return with_grads(op(axes, implementation="host"), x, w_gate_up, w_down, dout)

    got = constrained(*stored(inputs, Packing(axes)))
    check(got, reference(inputs, Packing(axes)), "float32")


@pytest.mark.parametrize("split_pairs", [False, True], ids=["", "pairs split"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@open_axes
def test_pairs_are_never_split(axes, kind, split_pairs):
    """Even where the parameter is, at the cost of a gather; its gradient is split as it is."""
    inputs = draw(M, H, I, H, "float32")
    mesh = make_mesh((2, 1, 1), kind)
    spec = (
        P(*("data" if letter == "2" else None for letter in axes.split())) if split_pairs else P()
    )
    specs = (P(), spec, P(), P())
    shardings = [NamedSharding(mesh, s) for s in specs]
    args = [
        jax.device_put(a, s) for a, s in zip(stored(inputs, Packing(axes)), shardings, strict=True)
    ]
    got = jax.jit(
        functools.partial(with_grads, op(axes, implementation="host")),
        out_shardings=None if kind == AxisType.Explicit else (shardings[0], *shardings[:3]),
    )(*args)
    check(got, reference(inputs, Packing(axes)), "float32")
    assert got[2].sharding.is_equivalent_to(shardings[1], got[2].ndim)


@pytest.mark.parametrize(
    ("implementation", "layout"),
    [*(("host", layout) for layout in LAYOUTS), ("xla", "FSDP and tensor"), (None, "FSDP")],
)
@open_axes
def test_explicit_mesh(axes, implementation, layout):
    inputs = draw(M, H, I, H, "float32")
    shardings, args = place(layout, axes, inputs, AxisType.Explicit)
    got = jax.jit(functools.partial(with_grads, op(axes, implementation=implementation)))(*args)
    check(got, reference(inputs, Packing(axes)), "float32")
    for g, sharding in zip(got[1:], shardings, strict=False):
        assert g.sharding.is_equivalent_to(sharding, g.ndim)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("axes", AXES[3:])
def test_split_joined_dimension(axes, kind):
    packing = Packing(axes)
    inputs = draw(M, H, I, H, "float32")
    mesh = make_mesh((1, 1, 4), kind)
    spec = P(*("tensor" if "I" in dim else None for dim in packing.dims))
    specs = (P(), spec, P("tensor", None), P())
    args = [
        jax.device_put(a, NamedSharding(mesh, s))
        for a, s in zip(stored(inputs, packing), specs, strict=True)
    ]
    got = run(args, packing, implementation="host")
    check(got, reference(inputs, packing), "float32")


@open_axes
def test_shard_map_over_tensor_parallel_parts(axes):
    inputs = draw(M, H, I, H, "float32")
    packing = Packing(axes)
    mesh = make_mesh((2, 1, 4))
    w_in = P(*("tensor" if letter == "I" else None for letter in axes.split()))
    specs = (P("data"), w_in, P("tensor"))

    def part(*args):
        return jax.lax.psum(op(packing, implementation="host")(*args), "tensor")

    mapped = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P("data"))
    got = jax.jit(functools.partial(with_grads, mapped))(*stored(inputs, packing))
    check(got, reference(inputs, packing), "float32")


# Errors.

SHAPES = {"x": (4, 8), "w_gate_up": (8, 2, 16), "w_down": (16, 6)}


@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        ({"x": ()}, {}, ["x ", "(..., H)", "scalar"]),
        ({"x": (4, 7)}, {}, ["x ", "H=8", "w_gate_up", "(8, 2, 16)", "(4, 7)", "packing"]),
        ({"w_gate_up": (2, 8, 16)}, {}, ["w_gate_up", "(H, 2, I)", "(2, 8, 16)", "packing"]),
        ({"w_gate_up": (8, 32)}, {}, ["w_gate_up", "(H, 2, I)", "(8, 32)"]),
        (
            {"w_gate_up": (8, 33)},
            {"packing": "H (2 I)"},
            ["w_gate_up", "(H, (2 I))", "(8, 33)"],
        ),
        ({"w_gate_up": (3, 8, 16)}, {"packing": "2 H I"}, ["w_gate_up", "(2, H, I)"]),
        ({"w_down": (16,)}, {}, ["w_down", "(I, O)", "(16,)"]),
        ({"w_down": (6, 16)}, {}, ["w_down", "I=16", "(6, 16)", 'weight_layout="out_in"']),
        ({"w_down": (15, 6)}, {}, ["w_down", "(I, O)", "I=16", "(15, 6)"]),
        ({}, {"packing": "I 2 H"}, ["packing must be one of", "'H 2 I'", "'I 2 H'"]),
        ({}, {"weight_layout": "best"}, ["weight_layout must be one of"]),
        (
            {"w_gate_up": (8, 32)},
            {"packing": "H (I 2)"},
            [
                "packing",
                "'H (2 I)'",
                "alternate",
                "pack(*unpack(w_gate_up, Packing('H (I 2)')), Packing('H (2 I)'))",
            ],
        ),
        (
            {"w_gate_up": (64, 8)},
            {"packing": Packing("(I 2) H", block=32)},
            ["unpack(w_gate_up, Packing(axes='(I 2) H', block=32", "Packing('(2 I) H')"],
        ),
    ],
    ids=str,
)
def test_errors(shapes, options, words):
    args = [jnp.ones(shape) for shape in ({**SHAPES, **shapes}).values()]
    with pytest.raises(ValueError) as error:  # noqa: PT011  the words are checked below
        js.swiglu_mlp_packed(*args, **options)
    for word in words:
        assert word in f"{error.value} "


def test_the_conversion_that_the_error_names():
    inputs = draw(5, 6, 32, 4, "float32")
    x, alternating, w_down, _ = stored(inputs, Packing("(I 2) H", block=8))
    w_gate_up = pack(*unpack(alternating, Packing("(I 2) H", block=8)), Packing("(2 I) H"))
    got = js.swiglu_mlp_packed(x, w_gate_up, w_down, packing="(2 I) H")
    check_value(got, mlp_and_grads(*inputs)[0], TOLERANCE["float32"])


def test_dtype_of_operands():
    args = [jnp.ones(shape) for shape in SHAPES.values()]
    with pytest.raises(TypeError, match="w_gate_up must have a floating-point dtype; got int32"):
        js.swiglu_mlp_packed(args[0], args[1].astype(int), args[2])
    with pytest.raises(NotImplementedError, match="'cudnn' computes in bfloat16, float16"):
        js.swiglu_mlp_packed(*args, implementation="cudnn")
