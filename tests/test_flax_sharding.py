"""The Flax layers on a mesh: kernels are made in parts, as their metadata says, and trained so.

The MLP is implementation="host", whose custom calls XLA cannot look into, as on a GPU.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _reference64 import check_value, mlp, mlp_and_grads
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_swiglu.linen
import jax_swiglu.nnx

H, I, O = 16, 24, 20
RATE = 0.1
# Float32 initial values and sums are right to about 1e-6 relative.
TOLERANCE = 1e-5
RULES = (("embed", "fsdp"), ("mlp", "tensor"))

kinds = pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)


def make_mesh(kind):
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(kind,) * 3)


def nnx_layer():
    init = nnx.initializers.lecun_normal()
    return jax_swiglu.nnx.SwiGLUMLP(
        H,
        I,
        O,
        kernel_init=nnx.with_partitioning(init, ("fsdp", "tensor")),
        down_kernel_init=nnx.with_partitioning(init, ("tensor", "fsdp")),
        implementation="host",
        rngs=nnx.Rngs(0),
    )


def make_nnx(mesh):
    """The compiled init, apply, the shardings of the parameters, and their initial values."""
    with nnx.use_eager_sharding(False):
        graphdef, shapes = nnx.split(nnx.eval_shape(nnx_layer))
        shardings = nnx.get_named_sharding(shapes, mesh)
        init = jax.jit(lambda: nnx.state(nnx_layer()), out_shardings=shardings).lower().compile()
    plain = nnx.state(jax_swiglu.nnx.SwiGLUMLP(H, I, O, rngs=nnx.Rngs(0)))
    return init, lambda state, x: nnx.merge(graphdef, state)(x), shardings, plain


def make_linen(mesh):
    """The same, with names of dimensions that rules map to axes of the mesh."""
    init = nn.initializers.lecun_normal()
    module = jax_swiglu.linen.SwiGLUMLP(
        I,
        O,
        kernel_init=nn.with_logical_partitioning(init, ("embed", "mlp")),
        down_kernel_init=nn.with_logical_partitioning(init, ("mlp", "embed")),
        implementation="host",
    )

    key, x = jax.random.key(0), jnp.ones((1, H))
    specs = nn.get_partition_spec(jax.eval_shape(module.init, key, x))
    shardings = nn.logical_to_mesh_sharding(specs, mesh, RULES)
    init = jax.jit(lambda: module.init(key, x), out_shardings=shardings).lower().compile()
    plain = jax_swiglu.linen.SwiGLUMLP(I, O).init(key, x)
    return init, module.apply, shardings, plain


def check_made_in_parts(program):
    shapes = set(re.findall(r"\w+\[([\d,]+)\]", program.as_text()))
    assert {"8,12", "12,10"} <= shapes
    assert not {f"{H},{I}", f"{I},{O}", str(H * I), str(I * O)} & shapes


def kernels(params):
    down, gate, up = jax.tree.leaves(params)
    return gate, up, down


@kinds
@pytest.mark.parametrize("make", [make_nnx, make_linen], ids=["nnx", "linen"])
def test_training_step(make, kind):
    mesh = make_mesh(kind)
    init, apply, shardings, plain = make(mesh)
    check_made_in_parts(init)
    params = init()
    before = [np.asarray(w) for w in kernels(params)]
    for w, want in zip(before, kernels(plain), strict=True):
        check_value(w, np.asarray(want), TOLERANCE)

    def step(params, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.sum(apply(p, x) ** 2) / 2)(params)
        return loss, jax.tree.map(lambda w, g: w - RATE * g, params, grads)

    rows = np.random.default_rng(0).standard_normal((24, H)).astype(np.float32)
    x = jax.device_put(rows.reshape(8, 3, H), NamedSharding(mesh, P(("data", "fsdp"))))
    step = jax.jit(step, out_shardings=(NamedSharding(mesh, P()), shardings), donate_argnums=0)
    loss, params = step(params, x)

    out = mlp(rows, *before)
    _, _, *grads = mlp_and_grads(rows, *before, out)
    check_value(loss, np.sum(out**2) / 2, TOLERANCE)
    specs = (P("fsdp", "tensor"), P("fsdp", "tensor"), P("tensor", "fsdp"))
    for w, b, g, spec in zip(kernels(params), before, grads, specs, strict=True):
        assert w.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        check_value(w, b - RATE * g, TOLERANCE)


def test_nnx_layer_made_in_the_context_of_a_mesh():
    """Flax splits each kernel as soon as it is made; under jit, it is never whole."""
    with jax.set_mesh(make_mesh(AxisType.Auto)):
        check_made_in_parts(jax.jit(lambda: nnx.state(nnx_layer())).lower().compile())
        layer = nnx.jit(nnx_layer)()
        assert layer.gate_proj.kernel[...].sharding.spec == P("fsdp", "tensor")
        assert layer.down_proj.kernel[...].sharding.spec == P("tensor", "fsdp")
        x = np.random.default_rng(0).standard_normal((8, H)).astype(np.float32)
        got = nnx.jit(lambda layer, x: layer(x))(layer, jax.device_put(x, P(("data", "fsdp"))))
    check_value(got, mlp(x, *map(np.asarray, kernels(nnx.state(layer)))), TOLERANCE)
