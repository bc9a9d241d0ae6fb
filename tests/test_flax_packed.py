"""The Flax layers with gate and up in one parameter, beside those with two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _reference64 import TOLERANCE, check_value, draw, mlp_and_grads
from flax import linen as nn
from flax import nnx
from test_flax import H, I, NnxLayer, O, assert_close, assert_trees_equal, both_apis

import jax_swiglu.linen
import jax_swiglu.nnx
from jax_swiglu import convert
from jax_swiglu.convert import Packing, pack


def to_packed(params):
    weights = convert.from_checkpoint(params, "swiglu_mlp")
    return convert.to_checkpoint(weights, "swiglu_mlp_packed")


def to_separate(params):
    weights = convert.from_checkpoint(params, "swiglu_mlp_packed")
    return convert.to_checkpoint(weights, "swiglu_mlp")


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(1), (2, 5, H))


@both_apis
def test_parameters(make):
    params = make(packed=True, param_dtype=jnp.bfloat16).params
    assert {
        jax.tree_util.keystr(path): (leaf.shape, str(leaf.dtype))
        for path, leaf in jax.tree.leaves_with_path(params)
    } == {
        "['gate_up_proj']['kernel']": ((H, 2, I), "bfloat16"),
        "['down_proj']['kernel']": ((I, O), "bfloat16"),
    }


@both_apis
def test_packed_and_separate_parameters_move_both_ways(make, x):
    packed, separate = make(packed=True), make()
    assert_close(packed.apply(to_packed(separate.params), x), separate.apply(separate.params, x))
    assert_close(separate.apply(to_separate(packed.params), x), packed.apply(packed.params, x))
    assert_trees_equal(to_separate(to_packed(separate.params)), separate.params)


@both_apis
def test_gradients_are_those_of_separate_parameters(make, x):
    packed, separate = make(packed=True), make()

    def grads(layer, params):
        return jax.grad(lambda params: jnp.sum(layer.apply(params, x) ** 2))(params)

    got = to_separate(grads(packed, to_packed(separate.params)))
    jax.tree.map(assert_close, got, grads(separate, separate.params))


def test_nnx_initial_values_are_those_of_separate_parameters():
    assert_trees_equal(to_separate(NnxLayer(packed=True).params), NnxLayer().params)


def test_linen_initial_values_are_scaled_as_separate_ones():
    module = jax_swiglu.linen.SwiGLUMLP(256, packed=True)
    kernel = module.init(jax.random.key(0), jnp.ones((1, 128)))["params"]["gate_up_proj"]["kernel"]
    gate, up = np.asarray(kernel[:, 0]), np.asarray(kernel[:, 1])
    assert not np.array_equal(gate, up)
    for half in (gate, up):
        assert np.std(half) == pytest.approx(128**-0.5, rel=0.05)


@both_apis
def test_float32_parameters_with_bfloat16_arithmetic(make, x):
    layer = make(packed=True, dtype=jnp.bfloat16)
    out, pullback = jax.vjp(layer.apply, layer.params, x)
    assert out.dtype == jnp.bfloat16
    assert {g.dtype for g in jax.tree.leaves(pullback(out)[0])} == {jnp.dtype("float32")}


def test_nnx_partitioning_metadata():
    init = nnx.initializers.lecun_normal()
    mesh = jax.make_mesh((1, 1), ("embed", "mlp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        module = jax_swiglu.nnx.SwiGLUMLP(
            H,
            I,
            packed=True,
            kernel_init=nnx.with_partitioning(init, ("embed", "mlp")),
            rngs=nnx.Rngs(0),
        )
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(module)))
    assert specs["gate_up_proj"]["kernel"] == jax.P("embed", None, "mlp")
    # Without a mesh too, and with the values of a layer that has no metadata.
    plain = jax_swiglu.nnx.SwiGLUMLP(H, I, packed=True, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(module.gate_up_proj.kernel[...], plain.gate_up_proj.kernel[...])


def test_linen_partitioning_metadata(x):
    init = nn.initializers.lecun_normal()
    for wrap in (nn.with_partitioning, nn.with_logical_partitioning):
        module = jax_swiglu.linen.SwiGLUMLP(
            I, packed=True, kernel_init=wrap(init, ("embed", "mlp"))
        )
        variables = module.init(jax.random.key(0), x)
        spec = nn.get_partition_spec(variables)["params"]["gate_up_proj"]["kernel"]
        assert spec == jax.P("embed", None, "mlp")
        assert_close(module.apply(variables, x), module.apply(nn.unbox(variables), x))


def rounded_reference(params, x, dout):
    """out, dx and the gradients of the kernels in float64."""
    w_gate, w_up, w_down = convert.from_checkpoint(params, "swiglu_mlp_packed")
    out, dx, dw_gate, dw_up, dw_down = mlp_and_grads(x, w_gate, w_up, w_down, dout)
    return out, dx, pack(dw_gate, dw_up, Packing("H 2 I")), dw_down


@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("implementation", ["host", None])
def test_remat(implementation, api):
    """Against float64, for x (64, 128) and I = 256."""
    x, _, _, _, dout = map(jnp.asarray, draw(64, 128, 256, 128, "bfloat16"))
    options = {"packed": True, "implementation": implementation, "dtype": jnp.bfloat16}
    options |= {"param_dtype": jnp.bfloat16}
    if api == "linen":
        cls = jax_swiglu.linen.SwiGLUMLP
        params = cls(256, **options).init(jax.random.key(0), x)["params"]
        layer = nn.remat(cls)(256, **options)

        def apply(params, x):
            return layer.apply({"params": params}, x)

    else:
        module = jax_swiglu.nnx.SwiGLUMLP(128, 256, rngs=nnx.Rngs(0), **options)
        graphdef, state = nnx.split(module)
        params = nnx.to_pure_dict(state)

        def apply(params, x):
            nnx.replace_by_pure_dict(state, params)
            return nnx.remat(lambda module, x: module(x))(nnx.merge(graphdef, state), x)

    out, pullback = jax.vjp(apply, params, x)
    dparams, dx = pullback(dout)
    kernels = [dparams[name]["kernel"] for name in ("gate_up_proj", "down_proj")]
    want = rounded_reference(params, x, dout)
    for got, right in zip((out, dx, *kernels), want, strict=True):
        assert got.dtype == jnp.bfloat16
        check_value(got, right, TOLERANCE["bfloat16"])
