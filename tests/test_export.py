"""jax.export: on one device, through shard_map on several, for GPUs, with unknown sizes."""

import functools
import re
import sys

import jax
import numpy as np
import pytest
from _programs import with_grads
from _reference64 import NAMES, TOLERANCE, check, check_value, draw, mlp, mlp_and_grads
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_swiglu as js

# More rows than those whose weight gradients go to XLA.
M, H, I, O = 72, 8, 16, 6
SPLIT = (P("data"), P(None, "tensor"), P(None, "tensor"), P("tensor"))


def exported(function, *args, platforms=("cpu",), names=js.CUSTOM_CALLS):
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in names]
    exporting = export.export(jax.jit(function), platforms=platforms, disabled_checks=checks)
    return exporting(*args)


def custom_calls(program):
    """The names of our calls in an exported program."""
    return set(re.findall(r"@(jax_swiglu_\w+)", program.mlir_module()))


def host(*args):
    return js.swiglu_mlp(*args, implementation="host")


def specs(dtype, rows=(M,), *, h=H, i=I):
    """x, w_gate, w_up, w_down and dout."""
    shapes = (*rows, h), (h, i), (h, i), (i, O), (*rows, O)
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


@pytest.fixture
def mesh():
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def on_mesh(mesh, implementation):
    """The MLP with split rows and a split I."""

    def part(*args):
        return jax.lax.psum(js.swiglu_mlp(*args, implementation=implementation), "tensor")

    return jax.shard_map(part, mesh=mesh, in_specs=SPLIT, out_specs=P("data"))


def split_specs(mesh, dtype):
    return [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
        for a, spec in zip(specs(dtype)[:4], SPLIT, strict=True)
    ]


def test_names_of_custom_calls():
    assert set(js.CUSTOM_CALLS) == {
        "jax_swiglu_glu_fwd",
        "jax_swiglu_glu_bwd",
        "jax_swiglu_matmul",
    }


RELOAD = """
import pathlib, sys
import jax, numpy as np
from jax import export
import jax_swiglu  # registers the custom calls

for path in pathlib.Path(sys.argv[1]).glob("*.exported"):
    program = export.deserialize(bytearray(path.read_bytes()))
    *args, dout = np.load(path.with_suffix(".npz")).values()
    if program.nr_devices > 1:
        auto = (jax.sharding.AxisType.Auto,) * 2
        mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=auto)
        args = map(jax.device_put, args, program.in_shardings_jax(mesh))
    out, pullback = jax.vjp(jax.jit(program.call), *args)
    np.savez(path.with_suffix(".out.npz"), out, *pullback(dout))
"""


def test_reload_in_a_fresh_process(tmp_path, run_python, mesh):
    """Values and gradients, which are exported beside the program."""
    inputs = draw(M, H, I, O, "float32")
    programs = {
        "one device": exported(host, *specs("float32")[:4]),
        "shard_map": exported(on_mesh(mesh, "host"), *split_specs(mesh, "float32")),
    }
    for name, program in programs.items():
        assert custom_calls(program) == {"jax_swiglu_glu_fwd", "jax_swiglu_matmul"}
        assert custom_calls(program.vjp()) == set(js.CUSTOM_CALLS)
        (tmp_path / f"{name}.exported").write_bytes(program.serialize(vjp_order=1))
        np.savez(tmp_path / f"{name}.npz", *inputs)
    result = run_python([sys.executable, "-c", RELOAD, tmp_path])
    assert result.returncode == 0, result.stderr
    for name in programs:
        check(list(np.load(tmp_path / f"{name}.out.npz").values()), inputs)


def test_export_for_a_gpu():
    mlp = functools.partial(js.swiglu_mlp, implementation="cudnn")
    program = exported(functools.partial(with_grads, mlp), *specs("bfloat16"), platforms=["cuda"])
    assert custom_calls(export.deserialize(program.serialize())) == set(js.CUSTOM_CALLS)


def test_export_for_several_gpus(mesh):
    program = exported(on_mesh(mesh, None), *split_specs(mesh, "bfloat16"), platforms=["cuda"])
    assert program.nr_devices == 8
    assert custom_calls(program) == {"jax_swiglu_glu_fwd", "jax_swiglu_matmul"}
    assert custom_calls(program.vjp()) == set(js.CUSTOM_CALLS)


def test_export_without_the_names_is_refused():
    with pytest.raises(ValueError, match="jax_swiglu_glu_fwd"):
        exported(js.swiglu_mlp, *specs("bfloat16")[:4], platforms=["cuda"], names=())


def test_export_for_two_platforms_runs_on_this_one():
    inputs = draw(13, 24, 40, 16, "bfloat16")
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in inputs.operands]
    program = exported(js.swiglu_mlp, *args, platforms=["cpu", "cuda"])
    assert custom_calls(program) == {"jax_swiglu_glu_fwd", "jax_swiglu_matmul"}
    check_value(program.call(*inputs.operands), mlp(*inputs.operands), TOLERANCE["bfloat16"])


def test_export_of_a_partitioning_rule_is_refused(mesh):
    with pytest.raises(NotImplementedError, match=r"inside jax\.shard_map"):
        exported(host, *split_specs(mesh, "float32"))


# Sizes that are not known: such programs run on XLA.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("names", "rows"), [("m", "m"), ("b, s", "bs"), ("m, h, i", "m")], ids=str)
def test_symbolic_sizes(names, rows, dtype):
    sizes = {"h": H, "i": I}
    sizes |= zip(names.split(", "), export.symbolic_shape(names), strict=True)
    program = exported(
        functools.partial(with_grads, js.swiglu_mlp),
        *specs(dtype, [sizes[name] for name in rows], h=sizes["h"], i=sizes["i"]),
        platforms=["cpu", "cuda"],
    )
    assert not custom_calls(program)
    program = export.deserialize(program.serialize())
    for leading in [(1,), (30,)] if len(rows) == 1 else [(1, 1), (5, 6)]:
        inputs = draw(int(np.prod(leading)), H, I, O, dtype)
        x, dout = (a.reshape(*leading, -1) for a in (inputs.x, inputs.dout))
        got = program.call(x, *inputs[1:4], dout)
        for name, g, want in zip(NAMES, got, mlp_and_grads(*inputs), strict=True):
            # Few elements: single roundings do not average out.
            check_value(np.reshape(g, want.shape), want, 2 * TOLERANCE[dtype], name)


@pytest.mark.parametrize(("implementation", "platform"), [("cudnn", "cuda"), ("host", "cpu")])
def test_symbolic_sizes_are_refused_where_xla_was_not_asked_for(implementation, platform):
    (rows,) = export.symbolic_shape("rows")
    function = functools.partial(js.swiglu_mlp, implementation=implementation)
    with pytest.raises(NotImplementedError, match=rf"{implementation}.* sizes; got rows\. Use"):
        exported(function, *specs("bfloat16", [rows])[:4], platforms=[platform])
