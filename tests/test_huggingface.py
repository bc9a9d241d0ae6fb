"""Parity with the MLPs of Hugging Face's transformers, inside the models that they belong to.

Skipped where PyTorch and transformers are not installed; JAX_SWIGLU_REQUIRE_PARITY=1 makes that a
failure.
"""

import importlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _reference64 import TOLERANCE, check_value, mlp_and_grads

import jax_swiglu as js
from jax_swiglu.convert import FORMATS, Packing, from_checkpoint, pack, to_checkpoint, unpack

REQUIRED = os.environ.get("JAX_SWIGLU_REQUIRE_PARITY") == "1"
torch, transformers, safetensors_numpy = (
    importlib.import_module(name) if REQUIRED else pytest.importorskip(name)
    for name in ("torch", "transformers", "safetensors.numpy")
)

H, I = 16, 24
MODELS = (
    *("deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "glm4", "llama", "mistral"),
    *("olmo2", "phi3", "qwen2", "qwen3"),
)
GEMMAS = [name for name in MODELS if name.startswith("gemma")]
models = pytest.mark.parametrize("model_type", MODELS)
layouts = pytest.mark.parametrize("weight_layout", ["in_out", "out_in"])


def make_model(model_type, **options):
    """A whole model with small random weights; of DeepSeek's two layers the first is dense."""
    config = transformers.AutoConfig.for_model(
        model_type,
        **{"vocab_size": 8, "pad_token_id": 0, "num_hidden_layers": 2, "initializer_range": 0.3},
        **{"hidden_size": H, "intermediate_size": I, "num_attention_heads": 2, "head_dim": 8},
        **{"num_key_value_heads": 2, "max_position_embeddings": 8},
        **({"first_k_dense_replace": 1, "moe_intermediate_size": 8, "n_shared_experts": 2}),
        **({"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}),
        **options,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def silu(model_type):
    """The options that make Gemma, whose activation is GeLU, a SwiGLU-MLP."""
    return (
        dict.fromkeys(("hidden_act", "hidden_activation"), "silu") if model_type in GEMMAS else {}
    )


def check_parity(model, mlp, dtype, weight_layout, **where):
    """Output and gradients of a PyTorch MLP are ours, and its parameters survive the way there."""
    mlp.to(getattr(torch, dtype))
    torch.manual_seed(1)
    x = torch.randn(2, 5, H, dtype=getattr(torch, dtype), requires_grad=True)
    ct = torch.randn(2, 5, H, dtype=x.dtype)
    out = mlp(x)
    out.backward(ct)
    theirs = [out.detach().numpy(), x.grad.numpy()]
    state = model.state_dict()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    options = {"hidden_act": "silu", "weight_layout": weight_layout, **where}
    weights = from_checkpoint(state, model.config.model_type, **options)
    theirs += from_checkpoint(gradients, model.config.model_type, **options)

    def ours(x, *weights):
        return js.swiglu_mlp(x, *weights, weight_layout=weight_layout)

    y, vjp = jax.vjp(ours, *map(jnp.asarray, (x.detach().numpy(), *weights)))
    want = mlp_and_grads(
        x.detach().numpy().reshape(-1, H), *weights, ct.numpy().reshape(-1, H), layout=weight_layout
    )
    for i, (got, their, right) in enumerate(
        zip((y, *vjp(jnp.asarray(ct.numpy()))), theirs, want, strict=True)
    ):
        assert got.dtype == dtype
        check_value(np.reshape(got, right.shape), right, TOLERANCE[dtype], f"ours, {i}")
        check_value(np.reshape(their, right.shape), right, TOLERANCE[dtype], f"theirs, {i}")

    back = to_checkpoint(weights, model.config.model_type, **options)
    assert back
    for name, value in back.items():
        np.testing.assert_array_equal(value, state[name].numpy(), strict=True)


@models
@layouts
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_parity(model_type, weight_layout, dtype, x64):
    model = make_model(model_type, **silu(model_type))
    check_parity(model, model.model.layers[0].mlp, dtype, weight_layout, layer=0)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
@layouts
def test_parity_of_shared_experts(model_type, weight_layout):
    model = make_model(model_type)
    shared = model.model.layers[1].mlp.shared_experts
    path = "model.layers.{layer}.mlp.shared_experts"
    check_parity(model, shared, "float32", weight_layout, layer=1, module=path)


def test_every_hugging_face_format_is_tested():
    paths = {name: spec.module for name, spec in FORMATS.items()}
    assert {name for name in paths if paths[name] == "model.layers.{layer}.mlp"} == set(MODELS)


def activation(config):
    return getattr(config, "hidden_activation", None) or config.hidden_act


@models
def test_activation_of_the_formats(model_type):
    config = transformers.AutoConfig.for_model(model_type)
    assert activation(config) == FORMATS[model_type].hidden_act


@pytest.mark.parametrize("model_type", GEMMAS)
def test_gelu_is_refused(model_type):
    model = make_model(model_type)
    with pytest.raises(ValueError, match="gelu_pytorch_tanh"):
        from_checkpoint(model.state_dict(), model_type, layer=0)
    # Under a name that promises SiLU, the configuration tells.
    with pytest.raises(ValueError, match="hidden_act must be one of"):
        from_checkpoint(model.state_dict(), "llama", layer=0, hidden_act=activation(model.config))


def test_bias_is_refused():
    model = make_model("llama", mlp_bias=True)
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp.gate_proj.bias' is there"):
        from_checkpoint(model.state_dict(), "llama", layer=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_tensors_are_taken_bit_by_bit_without_a_copy(dtype):
    tensor = torch.randn(2 * I, H).to(getattr(torch, dtype))
    halves = unpack(torch.nn.Parameter(tensor), Packing("(2 I) H"), weight_layout="out_in")
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    for half, want in zip(halves, tensor.view(bits).chunk(2), strict=True):
        assert half.dtype == dtype
        np.testing.assert_array_equal(half.view(want.numpy().dtype), want.numpy())
        assert half.__array_interface__["data"][0] == want.data_ptr()


def test_tensors_that_are_refused():
    with pytest.raises(TypeError, match=r"w_gate_up must be on the CPU; got a tensor on meta"):
        unpack(torch.empty(4, 4, device="meta"), Packing("(2 I) H"))
    with pytest.raises(TypeError, match=r"w_gate_up must have dtype .*float8_e4m3fn. Dequantize"):
        unpack(torch.ones(4, 4).to(torch.float8_e4m3fn), Packing("(2 I) H"))


def test_gpt_oss_columns():
    config = transformers.AutoConfig.for_model(
        "gpt_oss", hidden_size=H, intermediate_size=I, num_local_experts=3
    )
    experts = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts(config)
    gate_up = torch.randn(3, H, 2 * I)
    gate, up = unpack(gate_up, Packing("H (I 2)"))
    # What the model makes of its columns when no limit is reached.
    experts.limit = float("inf")
    applied = experts._apply_gate(gate_up).numpy()
    np.testing.assert_allclose(applied, (up + 1) * gate / (1 + np.exp(-experts.alpha * gate)), 1e-5)
    np.testing.assert_array_equal(pack(gate, up, Packing("H (I 2)")), gate_up.numpy())


def test_saved_as_safetensors():
    model = make_model("phi3")
    state = model.state_dict()
    weights = from_checkpoint(state, "phi3", layer=range(2))
    saved = safetensors_numpy.save(to_checkpoint(weights, "phi3", layer=range(2)))
    for name, value in safetensors_numpy.load(saved).items():
        np.testing.assert_array_equal(value, state[name].numpy(), strict=True)
