"""The Flax layers: right values, the parameters of plain Flax, and Flax's transformations."""

import subprocess
import sys

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jax_swiglu.linen
import jax_swiglu.nnx

H, I, O = 12, 20, 7
LAYERS = 3
# Float32 GEMMs of these sizes are right to about 1e-6 relative; bfloat16 has 8 bits, and gate,
# up, h and the output are each rounded once.
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}


class PlainNnx(nnx.Module):
    """The MLP an existing nnx model would have."""

    def __init__(self, hidden, intermediate, out=None, *, rngs, **kwargs):
        out = hidden if out is None else out
        self.gate_proj = nnx.Linear(hidden, intermediate, use_bias=False, rngs=rngs, **kwargs)
        self.up_proj = nnx.Linear(hidden, intermediate, use_bias=False, rngs=rngs, **kwargs)
        self.down_proj = nnx.Linear(intermediate, out, use_bias=False, rngs=rngs, **kwargs)

    def __call__(self, x):
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class PlainLinen(nn.Module):
    """The MLP an existing Linen model would have."""

    intermediate: int
    out: int | None = None
    dtype: object = None
    param_dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x):
        def dense(n, name):
            return nn.Dense(
                n, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype, name=name
            )

        gate, up = (dense(self.intermediate, name)(x) for name in ("gate_proj", "up_proj"))
        out = x.shape[-1] if self.out is None else self.out
        return dense(out, "down_proj")(nn.silu(gate) * up)


def reference(x, w_gate, w_up, w_down, ct):
    """Output and gradients of rows ``x``, in float64 NumPy."""
    x, w_gate, w_up, w_down, ct = (
        np.asarray(a).astype(np.float64) for a in (x, w_gate, w_up, w_down, ct)
    )
    gate, up = x @ w_gate, x @ w_up
    sigmoid = 1 / (1 + np.exp(-gate))
    h = gate * sigmoid * up
    dh = ct @ w_down.T
    dgate = dh * up * sigmoid * (1 + gate * (1 - sigmoid))
    dup = dh * gate * sigmoid
    grads = x.T @ dgate, x.T @ dup, h.T @ ct
    return h @ w_down, dgate @ w_gate.T + dup @ w_up.T, *grads


def assert_close(got, want, dtype="float32"):
    """Relative Frobenius error within the dtype's tolerance."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= TOLERANCE[dtype] * np.linalg.norm(want)


def assert_trees_close(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(assert_close, got, want)


def assert_trees_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def output_and_gradients(layer, x, ct):
    """What ``reference`` returns, computed by the layer, as rows."""

    @jax.jit
    def run(params, x, ct):
        out, vjp = jax.vjp(layer.apply, params, x)
        return out, *vjp(ct.astype(out.dtype))

    out, d_params, dx = run(layer.params, x, ct)
    return out.reshape(-1, O), dx.reshape(-1, H), *kernels(d_params)


def kernels(params):
    return [params[name]["kernel"] for name in ("gate_proj", "up_proj", "down_proj")]


class NnxLayer:
    """An nnx layer as pure functions, so that one test serves both Flax APIs."""

    def __init__(self, plain=False, **kwargs):
        cls = PlainNnx if plain else jax_swiglu.nnx.SwiGLUMLP
        self.graphdef, state = nnx.split(cls(H, I, O, rngs=nnx.Rngs(0), **kwargs), nnx.Param)
        self.params = nnx.to_pure_dict(state)

    def apply(self, params, x):
        return nnx.merge(self.graphdef, nnx.State(params))(x)


class LinenLayer:
    """The same for Linen."""

    def __init__(self, plain=False, **kwargs):
        cls = PlainLinen if plain else jax_swiglu.linen.SwiGLUMLP
        self.module = cls(I, O, **kwargs)
        self.params = self.module.init(jax.random.key(0), jnp.ones((1, H)))["params"]

    def apply(self, params, x):
        return self.module.apply({"params": params}, x)


both_apis = pytest.mark.parametrize("make", [NnxLayer, LinenLayer], ids=["nnx", "linen"])


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(1), (2, 5, H))


@both_apis
def test_output_and_gradients(make, x):
    layer = make()
    ct = jax.random.normal(jax.random.key(2), (2, 5, O))
    want = reference(x.reshape(-1, H), *kernels(layer.params), ct.reshape(-1, O))
    for g, w in zip(output_and_gradients(layer, x, ct), want, strict=True):
        assert_close(g, w)


@both_apis
def test_parameters_are_those_of_plain_flax(make):
    ours, plain = make(), make(plain=True)
    assert {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(ours.params)} == {
        "['gate_proj']['kernel']",
        "['up_proj']['kernel']",
        "['down_proj']['kernel']",
    }
    # The same names and shapes, and from the same key the same initial values too.
    assert_trees_equal(ours.params, plain.params)


@both_apis
@pytest.mark.parametrize("to_ours", [True, False], ids=["plain to ours", "ours to plain"])
def test_checkpoint_round_trip(make, to_ours, x):
    source, target = make(plain=to_ours), make(plain=not to_ours)
    trained = jax.tree.map(lambda w: w + 0.1, source.params)
    stored = flax.serialization.to_bytes(trained)
    loaded = flax.serialization.from_bytes(target.params, stored)
    assert_trees_equal(loaded, trained)
    assert_close(target.apply(loaded, x), source.apply(trained, x))


def test_nnx_state_moves_both_ways(x):
    ours = jax_swiglu.nnx.SwiGLUMLP(H, I, rngs=nnx.Rngs(0))
    plain = PlainNnx(H, I, rngs=nnx.Rngs(1))
    assert jax.tree.structure(nnx.state(ours)) == jax.tree.structure(nnx.state(plain))
    nnx.update(ours, nnx.state(plain))
    assert_close(ours(x), plain(x))
    other = PlainNnx(H, I, rngs=nnx.Rngs(2))
    nnx.update(other, nnx.state(ours))
    assert_trees_equal(nnx.to_pure_dict(nnx.state(other)), nnx.to_pure_dict(nnx.state(plain)))


@both_apis
@pytest.mark.parametrize(
    ("dtype", "param_dtype", "x_dtype", "out_dtype"),
    [
        ("bfloat16", "float32", "float32", "bfloat16"),
        ("bfloat16", "float32", "bfloat16", "bfloat16"),
        ("float32", "bfloat16", "bfloat16", "float32"),
        (None, "float32", "bfloat16", "float32"),
        (None, "bfloat16", "float32", "float32"),
        (None, "bfloat16", "bfloat16", "bfloat16"),
    ],
)
def test_dtypes(make, dtype, param_dtype, x_dtype, out_dtype, x):
    ours, plain = (
        make(plain, dtype=dtype and jnp.dtype(dtype), param_dtype=jnp.dtype(param_dtype))
        for plain in (False, True)
    )
    x = x.astype(x_dtype)
    ct = jnp.ones((2, 5, O))
    got = output_and_gradients(ours, x, ct)
    out, dx, *d_kernels = got
    assert out.dtype == out_dtype == jax.eval_shape(plain.apply, plain.params, x).dtype
    assert dx.dtype == x_dtype
    assert all(g.dtype == param_dtype for g in d_kernels)
    want = reference(x.reshape(-1, H), *kernels(ours.params), ct.reshape(-1, O))
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, "bfloat16" if "bfloat16" in (dtype, param_dtype, x_dtype) else "float32")


@both_apis
def test_jit_and_leading_dims(make, x):
    layer = make()
    want = layer.apply(layer.params, x)
    assert_close(jax.jit(layer.apply)(layer.params, x), want)
    assert_close(layer.apply(layer.params, x[0, 0]), want[0, 0])
    assert layer.apply(layer.params, jnp.zeros((0, 3, H))).shape == (0, 3, O)


@both_apis
@pytest.mark.parametrize("argument", ["implementation", "residuals"])
def test_arguments_reach_the_op(make, argument, x):
    params = make().params
    # Flax traces a Linen layer when it makes its parameters, an nnx one only when it is called.
    with pytest.raises(ValueError, match=argument):
        make(**{argument: "no such choice"}).apply(params, x)


@both_apis
@pytest.mark.parametrize("residuals", ["gate_up", "full", "input"])
def test_residuals(make, residuals, x):
    layer, plain = make(residuals=residuals), make(plain=True)

    def loss(layer):
        return jax.grad(lambda params: jnp.sum(layer.apply(params, x) ** 2))(layer.params)

    assert_trees_close(loss(layer), loss(plain))


def test_down_kernel_init(x):
    zeros = nnx.initializers.zeros_init()
    ours = jax_swiglu.nnx.SwiGLUMLP(H, I, down_kernel_init=zeros, rngs=nnx.Rngs(0))
    assert jnp.any(ours.gate_proj.kernel[...])
    assert jnp.any(ours.up_proj.kernel[...])
    assert not jnp.any(ours(x))
    out, variables = jax_swiglu.linen.SwiGLUMLP(I, down_kernel_init=zeros).init_with_output(
        jax.random.key(0), x
    )
    assert jnp.any(variables["params"]["gate_proj"]["kernel"])
    assert not jnp.any(out)


def test_nnx_jit_and_grad(x):
    ours, plain = (cls(H, I, rngs=nnx.Rngs(0)) for cls in (jax_swiglu.nnx.SwiGLUMLP, PlainNnx))

    @nnx.jit
    def grads(module, x):
        return nnx.grad(lambda module: jnp.mean(module(x) ** 2))(module)

    assert_trees_close(*(nnx.to_pure_dict(grads(module, x)) for module in (ours, plain)))


def nnx_stack_loss(cls, remat):
    """Loss of x sent through stacked layers by ``nnx.scan``, with each layer's own weights."""

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap
    def stack(rngs):
        return cls(H, I, rngs=rngs)

    def layer(x, module):
        call = nnx.remat(lambda module, x: module(x)) if remat else cls.__call__
        return x + call(module, x)

    graphdef, params = nnx.split(stack(nnx.Rngs(0)), nnx.Param)

    def loss(params, x):
        run = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return jnp.mean(run(x, nnx.merge(graphdef, params)) ** 2)

    return loss, params


@pytest.mark.parametrize("remat", [False, True], ids=["scan", "remat in scan"])
def test_nnx_scan(remat, x):
    got, want = (
        jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x)
        for loss, params in (
            nnx_stack_loss(jax_swiglu.nnx.SwiGLUMLP, remat),
            nnx_stack_loss(PlainNnx, False),
        )
    )
    assert jax.tree.leaves(got)[1].shape[0] == LAYERS
    assert_trees_close(jax.tree.leaves(got), jax.tree.leaves(want))


def test_nnx_remat(x):
    module = jax_swiglu.nnx.SwiGLUMLP(H, I, rngs=nnx.Rngs(0))

    def grads(call):
        return nnx.to_pure_dict(nnx.grad(lambda module: jnp.mean(call(module, x) ** 2))(module))

    remat = nnx.remat(lambda module, x: module(x))
    assert_trees_close(grads(remat), grads(lambda module, x: module(x)))


def linen_stack_loss(cls, remat):
    """Loss of x sent through stacked layers by ``nn.scan``, with each layer's own weights."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            mlp = (nn.remat(cls) if remat else cls)(I, name="mlp")
            return x + mlp(x), None

    stack = nn.scan(
        Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
    )()
    variables = stack.init(jax.random.key(0), jnp.ones((1, H)), None)

    def loss(variables, x):
        return jnp.mean(stack.apply(variables, x, None)[0] ** 2)

    return loss, variables


@pytest.mark.parametrize("remat", [False, True], ids=["scan", "remat in scan"])
def test_linen_scan(remat, x):
    got, want = (
        jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(variables, x)
        for loss, variables in (
            linen_stack_loss(jax_swiglu.linen.SwiGLUMLP, remat),
            linen_stack_loss(PlainLinen, False),
        )
    )
    assert jax.tree.leaves(got)[1].shape[0] == LAYERS
    assert_trees_close(got, want)


def test_linen_remat(x):
    plain, remat = jax_swiglu.linen.SwiGLUMLP(I), nn.remat(jax_swiglu.linen.SwiGLUMLP)(I)
    variables = plain.init(jax.random.key(0), x)
    assert_trees_equal(remat.init(jax.random.key(0), x), variables)

    def grads(module):
        return jax.grad(lambda v: jnp.mean(module.apply(v, x) ** 2))(variables)

    assert_trees_close(grads(remat), grads(plain))


def assert_partitioned(specs):
    gate, up, down = kernels(specs)
    assert gate == up == jax.P("embed", "mlp")
    assert down == jax.P("mlp", "embed")


def test_nnx_partitioning_metadata_is_kept(x):
    init = nnx.initializers.lecun_normal()
    mesh = jax.make_mesh((1, 1), ("embed", "mlp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    # Flax lays a parameter out on the mesh of the context as soon as it is made.
    with jax.set_mesh(mesh):
        module = jax_swiglu.nnx.SwiGLUMLP(
            H,
            I,
            kernel_init=nnx.with_partitioning(init, ("embed", "mlp")),
            down_kernel_init=nnx.with_partitioning(init, ("mlp", "embed")),
            rngs=nnx.Rngs(0),
        )
        out = module(x)
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(module)))
    assert_partitioned(specs)
    assert_close(out, jax_swiglu.nnx.SwiGLUMLP(H, I, rngs=nnx.Rngs(0))(x))


def test_linen_partitioning_metadata_is_kept(x):
    init = nn.initializers.lecun_normal()
    module = jax_swiglu.linen.SwiGLUMLP(
        I,
        kernel_init=nn.with_partitioning(init, ("embed", "mlp")),
        down_kernel_init=nn.with_partitioning(init, ("mlp", "embed")),
    )
    variables = module.init(jax.random.key(0), x)
    assert_partitioned(nn.get_partition_spec(variables)["params"])
    # Boxed parameters apply as they are.
    assert_close(module.apply(variables, x), module.apply(nn.unbox(variables), x))


@pytest.mark.parametrize("name", ["nnx", "linen"])
def test_without_flax_the_error_names_the_extra(name):
    code = f"""
import sys
import jax_swiglu
assert "flax" not in sys.modules, "import jax_swiglu imported flax"
sys.modules["flax"] = None
try:
    import jax_swiglu.{name}
except ImportError as error:
    assert "pip install jax_swiglu[flax]" in str(error), error
else:
    raise AssertionError("imported without flax")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
