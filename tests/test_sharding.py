"""Several devices: values of one device, and no more communication than plain JAX needs.

A plain-JAX lowering is partitioned by XLA itself and would pass without any rule, so everything
here runs the opaque custom calls (implementation="host") on eight CPU devices.
"""

import collections
import contextlib
import functools
import math
import re
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _reference64 import NAMES, TOLERANCE, check_value, draw, mlp_and_grads
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_swiglu as js
from jax_swiglu._primitives import matmul_p

M, H, I = 32, 16, 48
MESHES = [(8, 1, 1), (4, 1, 2), (2, 1, 4), (1, 8, 1), (4, 2, 1), (2, 2, 2)]
AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")

# x (and the cotangent), w_gate and w_up, w_down
LAYOUTS = {
    "data parallel": (P(AXES), P(), P()),
    "FSDP": (P(ROWS), P("fsdp", None), P(None, "fsdp")),
    "tensor parallel": (P(), P(None, "tensor"), P("tensor", None)),
    "data and tensor": (P("data"), P(None, "tensor"), P("tensor", None)),
    "FSDP and tensor": (P(ROWS), P("fsdp", "tensor"), P("tensor", "fsdp")),
}


def make_mesh(shape, kind=AxisType.Auto):
    return jax.make_mesh(shape, AXES, axis_types=(kind,) * 3)


def step(implementation, x, w_gate, w_up, w_down, dout):
    mlp = functools.partial(js.swiglu_mlp, implementation=implementation)
    out, pullback = jax.vjp(mlp, x, w_gate, w_up, w_down)
    return (out, *pullback(dout))


def collective_bytes(hlo):
    """Bytes of the results of the collectives of each kind.

    A reduce-scatter is the first half of an all-reduce of its operand, and counted as such.
    """
    results, collectives = {}, []
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    for line in hlo.splitlines():
        if not (made := re.match(r"\s*(?:ROOT )?%?(\S+) = (\(.*?\)|\S+) (\S+)\(", line)):
            continue
        name, types, kind = made.groups()
        shapes = re.findall(r"[a-z]+(\d+)\[([\d,]*)\]", types)
        results[name] = sum(
            int(bits) // 8 * math.prod(int(d) for d in dims.split(",") if d)
            for bits, dims in shapes
        )
        if found := re.fullmatch(rf"({kinds})(?:-start)?", kind):
            operand = re.search(rf"{kind}\((?:\w+\[\S+ )?%?([^\s,)]+)", line)[1]
            collectives.append((found[1], name, operand))
    moved = collections.Counter()
    for kind, name, operand in collectives:
        if kind == "reduce-scatter":
            moved["all-reduce"] += results[operand] // 2
        else:
            moved[kind] += results[name]
    return moved


def compiled(implementation, args, out_shardings=None):
    jitted = jax.jit(functools.partial(step, implementation), out_shardings=out_shardings)
    return jitted.lower(*args).compile()


def place(mesh, layout, inputs):
    rows, w_in, w_down = LAYOUTS[layout]
    shardings = [NamedSharding(mesh, spec) for spec in (rows, w_in, w_in, w_down, rows)]
    return shardings, [jax.device_put(a, s) for a, s in zip(inputs, shardings, strict=True)]


def check_all(got, inputs):
    for name, g, w in zip(NAMES, got, mlp_and_grads(*inputs), strict=True):
        check_value(g, w, TOLERANCE[str(inputs.x.dtype)], name)


@pytest.mark.parametrize("gradients", ["anywhere", "as the operands"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_values_and_communication(shape, layout, gradients):
    inputs = draw(M, H, I, H, "float32")
    shardings, args = place(make_mesh(shape), layout, inputs)
    where = (shardings[0], *shardings[:4]) if gradients == "as the operands" else None
    ours, plain = (compiled(which, args, where) for which in ("host", "xla"))
    check_all(ours(*args), inputs)
    moved, allowed = (collective_bytes(program.as_text()) for program in (ours, plain))
    print(f"{shape!s:10} {layout:16} {gradients:16} ours {dict(moved)} plain {dict(allowed)}")
    assert moved["all-reduce"] <= allowed["all-reduce"]
    assert moved["all-gather"] <= allowed["all-gather"]
    assert moved["all-to-all"] + moved["collective-permute"] == 0


def test_result_keeps_the_rows_of_x_without_a_gather():
    inputs = draw(M, H, I, H, "bfloat16")
    mesh = make_mesh((2, 1, 1))
    x = jax.device_put(inputs.x, NamedSharding(mesh, P("data", None)))
    weights = [jax.device_put(w, NamedSharding(mesh, P())) for w in inputs.operands[1:]]
    program = jax.jit(functools.partial(js.swiglu_mlp, implementation="host"))
    program = program.lower(x, *weights).compile()
    assert not collective_bytes(program.as_text())
    assert program(x, *weights).sharding.spec[0] == "data"


def test_weight_gradients_are_reduced_not_gathered():
    inputs = draw(M, H, I, H, "float32")
    _, args = place(make_mesh((2, 1, 1)), "data parallel", inputs)
    moved = collective_bytes(compiled("host", args).as_text())
    assert moved == {"all-reduce": 3 * H * I * 4}


def test_cotangent_with_another_sharding():
    inputs = draw(M, H, I, H, "float32")
    mesh = make_mesh((2, 1, 2))
    specs = (P("data", None), P(), P(), P(), P(None, "tensor"))
    args = [
        jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(inputs, specs, strict=True)
    ]
    check_all(compiled("host", args)(*args), inputs)


@pytest.mark.xfail(
    jax.__version_info__ < (0, 10), reason="JAX 0.9 cannot read such a sharding", strict=True
)
def test_rows_that_the_mesh_does_not_divide():
    inputs = draw(30, H, I, H, "float32")
    rows = NamedSharding(make_mesh((8, 1, 1)), P("data"))

    @jax.jit
    def constrained(x, *rest):
        return step("host", jax.lax.with_sharding_constraint(x, rows), *rest)

    check_all(constrained(*inputs), inputs)


@pytest.mark.parametrize("intermediate", [10, 12])
def test_tensor_parallel_over_four(intermediate):
    """With I=10, which four does not divide, the weights cannot be placed so; a constraint can."""
    inputs = draw(M, H, intermediate, H, "float32")
    mesh = make_mesh((1, 1, 4))

    @jax.jit
    def constrained(x, w_gate, w_up, w_down, dout):
        columns, rows = (NamedSharding(mesh, s) for s in (P(None, "tensor"), P("tensor", None)))
        w_gate, w_up = (jax.lax.with_sharding_constraint(w, columns) for w in (w_gate, w_up))
        w_down = jax.lax.with_sharding_constraint(w_down, rows)
        return step("host", x, w_gate, w_up, w_down, dout)

    check_all(constrained(*inputs), inputs)


def test_leading_dimensions():
    inputs = draw(M, H, I, H, "float32")
    sharding = NamedSharding(make_mesh((2, 2, 1)), P("data", "fsdp", None))
    x, dout = (jax.device_put(a.reshape(4, 8, H), sharding) for a in (inputs.x, inputs.dout))
    out, dx, *dweights = jax.jit(functools.partial(step, "host"))(x, *inputs[1:4], dout)
    check_all((out.reshape(M, H), dx.reshape(M, H), *dweights), inputs)


@pytest.mark.parametrize("split", [("data", "fsdp"), (None, "data")], ids=str)
def test_split_sequence_on_an_explicit_mesh(split):
    """A reshape that joins such dimensions has no type; the result is split as x is."""
    inputs = draw(M, H, I, H, "float32")
    mesh = make_mesh((2, 2, 2), AxisType.Explicit)
    sharding = NamedSharding(mesh, P(*split, None))
    x, dout = (jax.device_put(a.reshape(4, 8, H), sharding) for a in (inputs.x, inputs.dout))
    w_in, w_down = (NamedSharding(mesh, s) for s in LAYOUTS["tensor parallel"][1:])
    weights = [jax.device_put(w, s) for w, s in zip(inputs[1:4], (w_in, w_in, w_down), strict=True)]
    out, dx, *dweights = jax.jit(functools.partial(step, "host"))(x, *weights, dout)
    assert out.sharding.is_equivalent_to(sharding, 3)
    assert dx.sharding.is_equivalent_to(sharding, 3)
    out, dx = (np.asarray(a).reshape(M, H) for a in (out, dx))
    check_all((out, dx, *dweights), inputs)


def test_scan_over_layers():
    layers = 3
    inputs = [draw(M, H, I, H, "float32", seed=seed) for seed in range(layers)]
    stacks = [np.stack([layer[i] for layer in inputs]) for i in (1, 2, 3)]
    mesh = make_mesh((2, 2, 2))
    specs = (
        P(ROWS),
        P(None, "fsdp", "tensor"),
        P(None, "fsdp", "tensor"),
        P(None, "tensor", "fsdp"),
    )
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)

    def gradients(implementation, *args, **options):
        def loss(x, *stacks):
            def layer(x, weights):
                return x + js.swiglu_mlp(x, *weights, implementation=implementation), None

            return jnp.sum(jax.lax.scan(layer, x, stacks)[0] ** 2)

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)), **options)(*args)

    want = gradients("xla", inputs[0].x, *stacks)
    args = [jax.device_put(a, s) for a, s in zip((inputs[0].x, *stacks), shardings, strict=True)]
    got = gradients("host", *args, out_shardings=shardings)
    for g, w in zip(got, want, strict=True):
        check_value(g, np.asarray(w), 1e-5)


def test_vmap_over_a_mesh_axis():
    """Pipelines map over stages that lie on different devices."""
    stages = [draw(M, H, I, H, "float32", seed=seed) for seed in range(2)]
    stacked = [np.stack(arrays) for arrays in zip(*stages, strict=True)]
    mesh = make_mesh((2, 1, 1))
    args = [jax.device_put(a, NamedSharding(mesh, P("data"))) for a in stacked]
    mapped = jax.vmap(functools.partial(step, "host"), spmd_axis_name="data")
    program = jax.jit(mapped).lower(*args).compile()
    assert not collective_bytes(program.as_text())
    got = program(*args)
    for stage, inputs in enumerate(stages):
        check_all([g[stage] for g in got], inputs)


@pytest.mark.parametrize("ambient", [False, True], ids=["", "set_mesh"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_explicit_mesh(layout, ambient):
    """Gradients have the sharding of their operand as part of their type."""
    inputs = draw(M, H, I, H, "float32")
    mesh = make_mesh((2, 2, 2), AxisType.Explicit)
    with jax.set_mesh(mesh) if ambient else contextlib.nullcontext():
        shardings, args = place(mesh, layout, inputs)
        got = compiled("host", args)(*args)
    check_all(got, inputs)
    for g, sharding in zip(got[1:], shardings, strict=False):
        assert g.sharding.is_equivalent_to(sharding, g.ndim)


def test_partly_manual_mesh():
    inputs = draw(M, H, I, H, "float32")
    mesh = make_mesh((2, 1, 2))
    weights = (P(None, "tensor"), P(None, "tensor"), P("tensor", None))
    args = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip(inputs.operands, (P("data"), *weights), strict=True)
    ]
    mapped = jax.shard_map(
        functools.partial(js.swiglu_mlp, implementation="host"),
        mesh=mesh,
        in_specs=(P("data"), P(), P(), P()),
        out_specs=P("data"),
        axis_names={"data"},
    )
    want = mlp_and_grads(*inputs)[0]
    check_value(jax.jit(mapped)(*args), want, TOLERANCE["float32"])


def test_addend_is_added_once():
    """Where the sum of a matmul is split over devices."""
    from jax_swiglu._config import OpParams

    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(s).astype(np.float32) for s in ((8, 16), (16, 4), (8, 4)))
    params = OpParams(False, False, True, "", np.dtype(np.float32), "host", None)
    mesh = make_mesh((8, 1, 1))
    args = [
        jax.device_put(v, NamedSharding(mesh, spec))
        for v, spec in zip((a, b, c), (P(None, "data"), P("data", None), P()), strict=True)
    ]
    (got,) = jax.jit(lambda *args: matmul_p.bind(*args, params=params))(*args)
    check_value(got, (a.astype(float) @ b + c), TOLERANCE["float32"])


def test_one_device_needs_no_rule():
    """So that a program can be exported and found in the compile cache."""
    inputs = draw(M, H, I, H, "float32")
    text = jax.jit(functools.partial(step, "host")).lower(*inputs).as_text()
    assert "CustomSPMDPartitioning" not in text
    _, args = place(make_mesh((2, 1, 1)), "data parallel", inputs)
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
