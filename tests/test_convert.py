"""Weights of checkpoints: every layout by its definition, both ways, names, views, error texts."""

import ast
import dataclasses
import doctest
import re
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _reference64 import TOLERANCE, check_value, draw, mlp
from flax import nnx
from flax.traverse_util import flatten_dict

import jax_swiglu as js
import jax_swiglu.linen
import jax_swiglu.nnx
from jax_swiglu import convert
from jax_swiglu.convert import (
    FORMATS,
    Format,
    Packing,
    from_checkpoint,
    pack,
    to_checkpoint,
    unpack,
)

LAYERS = 3
# Sizes that all differ, and sizes that a shape cannot tell apart.
SIZES = {"distinct": (6, 64), "ambiguous": (2, 2)}


def interleave(a, b, block):
    """Rows of a and b in turn, block of each at a time."""
    pieces = []
    for start in range(0, len(a), block):
        pieces += [a[start : start + block], b[start : start + block]]
    return np.concatenate(pieces)


# The packed array that holds w_gate and w_up, both [H, I], by its definition.
PACKED = {
    "MaxText": (Packing("H 2 I"), lambda g, u: np.stack([g, u], axis=1)),
    "Gemma": (Packing("2 H I"), lambda g, u: np.stack([g, u])),
    "Gemma transposed": (Packing("2 I H"), lambda g, u: np.stack([g.T, u.T])),
    "Phi-3": (Packing("(2 I) H"), lambda g, u: np.concatenate([g.T, u.T])),
    "Llama-4": (Packing("H (2 I)"), lambda g, u: np.concatenate([g, u], axis=1)),
    "gpt-oss": (Packing("H (I 2)"), lambda g, u: interleave(g.T, u.T, 1).T),
    "rows": (Packing("(I 2) H"), lambda g, u: interleave(g.T, u.T, 1)),
    "blocks": (Packing("(I 2) H", block=2), lambda g, u: interleave(g.T, u.T, 2)),
    "column blocks": (Packing("H (I 2)", block=2), lambda g, u: interleave(g.T, u.T, 2).T),
    "flashinfer": (Packing("(2 I) H", up_first=True), lambda g, u: np.concatenate([u.T, g.T])),
    "up first": (Packing("H (I 2)", up_first=True), lambda g, u: interleave(u.T, g.T, 1).T),
}
packings = pytest.mark.parametrize(("packing", "define"), PACKED.values(), ids=PACKED)
sizes = pytest.mark.parametrize(("h", "i"), SIZES.values(), ids=SIZES)
layouts = pytest.mark.parametrize("weight_layout", ["in_out", "out_in"])


def weights_of(h, i, seed=0, dtype=np.float32):
    return draw(1, h, i, h, dtype, seed=seed).operands[1:]


def laid_out(weights, weight_layout):
    """Weights of layout "in_out" in another one."""
    return [w if weight_layout == "in_out" else np.swapaxes(w, -1, -2) for w in weights]


def assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(g, w, err_msg=name, strict=True)


# Packings.


@packings
@sizes
@layouts
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pack_and_unpack(packing, define, h, i, weight_layout, dtype):
    gate, up, _ = weights_of(h, i, dtype=jnp.dtype(dtype))
    packed, parts = define(gate, up), tuple(laid_out((gate, up), weight_layout))
    assert_equal(pack(*parts, packing, weight_layout=weight_layout), packed)
    assert_equal(unpack(packed, packing, weight_layout=weight_layout), parts)


@packings
@layouts
def test_leading_dimensions(packing, define, weight_layout):
    stack = [weights_of(6, 4, seed)[:2] for seed in range(LAYERS)]
    packed = np.stack([define(*each) for each in stack])
    parts = tuple(laid_out([np.stack(w) for w in zip(*stack, strict=True)], weight_layout))
    assert_equal(pack(*parts, packing, weight_layout=weight_layout), packed)
    assert_equal(unpack(packed, packing, weight_layout=weight_layout), parts)


@packings
@pytest.mark.parametrize(("h", "i"), [(0, 4), (6, 0)], ids=["no H", "no I"])
def test_zero_sizes(packing, define, h, i):
    parts = (np.zeros((h, i), np.float32),) * 2
    assert_equal(unpack(pack(*parts, packing), packing), parts)


@packings
def test_jit(packing, define):
    gate, up, _ = weights_of(6, 4)
    packed = define(gate, up)
    got = jax.jit(unpack, static_argnums=1)(packed, packing)
    assert_equal(got, tuple(map(jnp.asarray, (gate, up))))
    assert_equal(jax.jit(pack, static_argnums=2)(gate, up, packing), jnp.asarray(packed))


@packings
@layouts
def test_unpacked_parts_are_views(packing, define, weight_layout):
    packed = define(*weights_of(6, 4)[:2])
    parts = unpack(packed, packing, weight_layout=weight_layout)
    # Joining blocks back into one dimension is the one thing that strides cannot say.
    assert [np.shares_memory(part, packed) for part in parts] == [packing.block == 1] * 2


@pytest.mark.parametrize(
    ("packing", "shape", "expected"),
    [
        (Packing("H 2 I"), (8, 3, 4), "(H, 2, I)"),
        (Packing("2 H I"), (8, 4), "(2, H, I)"),
        (Packing("(2 I) H"), (7, 4), "((2 I), H)"),
        (Packing("(I 2) H", block=32), (96, 4), "((I 2), H), I a multiple of 32"),
    ],
    ids=str,
)
def test_packed_shape_error(packing, shape, expected):
    text = re.escape(f"w_gate_up must have shape {expected}") + f".*{re.escape(str(shape))}"
    with pytest.raises(ValueError, match=text):
        unpack(np.zeros(shape, np.float32), packing)


def test_pack_errors():
    w = np.zeros((6, 4), np.float32)
    with pytest.raises(ValueError, match=r"w_up must have shape \(..., H, I\)=\(6, 4\).*\(6, 5\)"):
        pack(w, np.zeros((6, 5), np.float32), Packing("H 2 I"))
    with pytest.raises(ValueError, match=r"w_gate must have shape \(..., I, H\).*got \(6,\)"):
        pack(w[:, 0], w[:, 0], Packing("H 2 I"), weight_layout="out_in")
    with pytest.raises(ValueError, match=r"multiple of 3 .*got I=4"):
        pack(w, w, Packing("H (I 2)", block=3))
    with pytest.raises(TypeError, match="w_up must have dtype float32"):
        pack(w, w.astype(np.float16), Packing("H 2 I"))
    with pytest.raises(ValueError, match="weight_layout must be one of"):
        pack(w, w, Packing("H 2 I"), weight_layout="HI")


def test_packing_errors():
    with pytest.raises(ValueError, match=r"axes must be one of 'H 2 I', .*got 'H I 2'"):
        Packing("H I 2")
    for block, axes in ((0, "(I 2) H"), (32, "(2 I) H")):
        with pytest.raises(
            ValueError, match=f"block must be.*got {block} with axes='{re.escape(axes)}'"
        ):
            Packing(axes, block=block)


# Formats. What a checkpoint holds for layer 1 of weights [H, I], [H, I], [I, H], spelled out.


def hugging_face(g, u, d, prefix="model.layers.1.mlp."):
    return {
        f"{prefix}gate_proj.weight": g.T,
        f"{prefix}up_proj.weight": u.T,
        f"{prefix}down_proj.weight": d.T,
    }


def phi3(g, u, d):
    return {
        "model.layers.1.mlp.gate_up_proj.weight": np.concatenate([g.T, u.T]),
        "model.layers.1.mlp.down_proj.weight": d.T,
    }


def flax(g, u, d):
    return {
        "gate_proj": {"kernel": g},
        "up_proj": {"kernel": u},
        "down_proj": {"kernel": d},
    }


def maxtext(g, u, d, layers="layers_1"):
    mlp = {"wi_0": {"kernel": g}, "wi_1": {"kernel": u}, "wo": {"kernel": d}}
    return {"params": {"decoder": {layers: {"mlp": mlp}}}}


def maxtext_fused(g, u, d, layers="layers_1"):
    mlp = {"wi": {"kernel": np.stack([g, u], axis=-2)}, "wo": {"kernel": d}}
    return {"params": {"decoder": {layers: {"mlp": mlp}}}}


def megatron(fc1, d):
    return {
        "decoder.layers.1.mlp.linear_fc1.weight": fc1,
        "decoder.layers.1.mlp.linear_fc2.weight": d.T,
    }


ONE_LAYER = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "llama", "mistral", "olmo2", "qwen2", "qwen3"), hugging_face
    ),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), hugging_face),
    **dict.fromkeys(("glm4", "phi3"), phi3),
    "hf_flax": lambda g, u, d: {"model": {"layers": {"1": {"mlp": flax(g, u, d)}}}},
    "swiglu_mlp": flax,
    "swiglu_mlp_packed": lambda g, u, d: {
        "gate_up_proj": {"kernel": np.stack([g, u], axis=-2)},
        "down_proj": {"kernel": d},
    },
    "maxtext": maxtext,
    "maxtext_fused": maxtext_fused,
    "gemma_flax": lambda g, u, d: {
        "layer_1": {"mlp": {"gating_einsum": np.stack([g, u]), "linear": d}}
    },
    "gemma_flax_transposed": lambda g, u, d: {
        "layer_1": {"mlp": {"gating_einsum": np.stack([g.T, u.T]), "linear": d}}
    },
    "megatron": lambda g, u, d: megatron(np.concatenate([g.T, u.T]), d),
    "megatron_interleaved": lambda g, u, d: megatron(interleave(g.T, u.T, 32), d),
}
SCANNED = {"maxtext_scanned": maxtext, "maxtext_fused_scanned": maxtext_fused}
# Of the names that mean the same format, the last.
DISTINCT = {FORMATS[name]: name for name in ONE_LAYER}.values()
one_layer = pytest.mark.parametrize(("name", "define"), ONE_LAYER.items(), ids=ONE_LAYER)
distinct = pytest.mark.parametrize("name", DISTINCT)
scanned = pytest.mark.parametrize(("name", "define"), SCANNED.items(), ids=SCANNED)


def options(name, layer=1):
    """Arguments that a format needs."""
    needed = {"layer": layer} if "{layer}" in FORMATS[name].module else {}
    return needed if FORMATS[name].hidden_act == "silu" else needed | {"hidden_act": "silu"}


def test_every_format_is_tested():
    assert {*ONE_LAYER, *SCANNED} == set(FORMATS)


@one_layer
@layouts
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_formats(name, define, weight_layout, dtype):
    weights = weights_of(6, 64, dtype=jnp.dtype(dtype))
    state, want = define(*weights), tuple(laid_out(weights, weight_layout))
    got = from_checkpoint(state, name, **options(name), weight_layout=weight_layout)
    assert_equal(tuple(got), want)
    assert_equal(to_checkpoint(got, name, **options(name), weight_layout=weight_layout), state)


@distinct
def test_formats_under_jit(name):
    weights = weights_of(6, 64)
    state = ONE_LAYER[name](*weights)
    load = jax.jit(lambda state: from_checkpoint(state, name, **options(name)))
    save = jax.jit(lambda weights: to_checkpoint(weights, name, **options(name)))
    as_jax = jax.tree.map(jnp.asarray, state)
    assert_equal(tuple(load(as_jax)), weights)
    assert_equal(save(weights), state)


@distinct
def test_arrays_are_views_and_saved_ones_contiguous(name):
    state = jax.tree.map(np.ascontiguousarray, ONE_LAYER[name](*weights_of(6, 64)))
    got = from_checkpoint(state, name, **options(name))
    stored = jax.tree.leaves(state)
    shared = [any(np.shares_memory(w, s) for s in stored) for w in got]
    assert shared == ([False, False, True] if name == "megatron_interleaved" else [True] * 3)
    saved = to_checkpoint(got, name, **options(name))
    assert all(w.flags.c_contiguous for w in jax.tree.leaves(saved))


@pytest.mark.parametrize("name", [name for name in DISTINCT if "{layer}" in FORMATS[name].module])
@layouts
def test_stacking_over_layers(name, weight_layout):
    layers = [weights_of(6, 64, seed) for seed in range(LAYERS)]
    stack = [np.stack(w) for w in zip(*layers, strict=True)]
    arguments = {**options(name, range(LAYERS)), "weight_layout": weight_layout}
    state = to_checkpoint(laid_out(stack, weight_layout), name, **arguments)
    for layer, weights in enumerate(layers):
        assert_equal(tuple(from_checkpoint(state, name, **options(name, layer))), weights)
    got = from_checkpoint(state, name, **arguments)
    assert_equal(tuple(got), tuple(laid_out(stack, weight_layout)))
    # In the order asked for, which need not be that of the model.
    last_first = from_checkpoint(state, name, **options(name, [2, 0]))
    assert_equal(tuple(last_first), tuple(w[[2, 0]] for w in stack))


@scanned
@layouts
def test_scanned_formats(name, define, weight_layout):
    layers = [weights_of(6, 4, seed) for seed in range(LAYERS)]
    stack = [np.stack(w) for w in zip(*layers, strict=True)]
    # MaxText puts the layers second: [H, L, I], [H, L, 2, I], [I, L, H].
    state = jax.tree.map(lambda w: np.moveaxis(w, 0, 1), define(*stack, layers="layers"))
    arguments = {"weight_layout": weight_layout}
    got = from_checkpoint(state, name, **arguments)
    assert_equal(tuple(got), tuple(laid_out(stack, weight_layout)))
    assert_equal(to_checkpoint(got, name, **arguments), state)
    for convert_state in (lambda s: s, lambda s: jax.tree.map(jnp.asarray, s)):
        stored = convert_state(state)
        for layer, weights in enumerate(layers):
            one = from_checkpoint(stored, name, layer=layer, **arguments)
            assert_equal(tuple(one), tuple(laid_out(weights, weight_layout)))
        for several in (range(1, 3), [2, 0], range(2, -1, -1)):
            some = from_checkpoint(stored, name, layer=several, **arguments)
            assert_equal(
                tuple(some), tuple(laid_out([w[list(several)] for w in stack], weight_layout))
            )
        for layer in (LAYERS, -1, 1.0, range(2, 5)):
            with pytest.raises(ValueError, match=r"of the 3 layers of 'params/decoder/layers/mlp"):
                from_checkpoint(stored, name, layer=layer)


def test_layer_axis_is_data():
    stack = [np.stack(w) for w in zip(*(weights_of(6, 4, s) for s in range(2)), strict=True)]
    first = dataclasses.replace(FORMATS["maxtext_scanned"], layer_axis=0)
    state = maxtext(*stack, layers="layers")
    assert_equal(tuple(from_checkpoint(state, first)), tuple(stack))


def test_a_format_of_ones_own():
    g, u, d = weights_of(6, 4)
    state = {
        f"layers.1.feed_forward.w{n}.weight": w.T for n, w in zip((1, 3, 2), (g, u, d), strict=True)
    }
    meta = Format("layers.{layer}.feed_forward", ("w1.weight", "w3.weight", "w2.weight"), "out_in")
    assert_equal(tuple(from_checkpoint(state, meta, layer=1)), (g, u, d))
    assert_equal(to_checkpoint((g, u, d), meta, layer=np.int64(1)), state)


def test_other_paths():
    weights = weights_of(6, 4)
    shared = "model.layers.{layer}.mlp.shared_experts"
    state = hugging_face(*weights, prefix="model.layers.1.mlp.shared_experts.")
    assert_equal(tuple(from_checkpoint(state, "deepseek_v3", layer=1, module=shared)), weights)
    assert_equal(to_checkpoint(weights, "deepseek_v3", layer=1, module=shared), state)
    alone = hugging_face(*weights, prefix="")
    assert_equal(tuple(from_checkpoint(alone, "llama", module="")), weights)
    assert_equal(to_checkpoint(weights, "llama", module=""), alone)


TREES = {
    "nested": lambda mlp: {"model": {"layers": {"1": {"mlp": mlp}}}},
    "flat": lambda mlp: {f"model/layers/1/mlp/{name}/kernel": mlp[name]["kernel"] for name in mlp},
    "tuples": lambda mlp: flatten_dict(TREES["nested"](mlp)),
    "flat in part": lambda mlp: {"model/layers/1": {"mlp": mlp}},
    "lists": lambda mlp: {"model": {"layers": {1: {"mlp": mlp}}}},
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_parameter_trees(tree):
    weights = weights_of(6, 4)
    assert_equal(tuple(from_checkpoint(tree(flax(*weights)), "hf_flax", layer=1)), weights)


def test_only_what_is_asked_for_is_read():
    class Lazy(Mapping):
        def __init__(self, state):
            self.state, self.read = state, set()

        def __getitem__(self, name):
            self.read.add(name)
            return self.state[name]

        def __iter__(self):
            return iter(self.state)

        def __len__(self):
            return len(self.state)

        def __contains__(self, name):
            return name in self.state

    wanted = hugging_face(*weights_of(6, 4))
    state = Lazy(wanted | {"model.embed_tokens.weight": None})
    from_checkpoint(state, "llama", layer=1)
    assert state.read == set(wanted)


def test_odd_output_size():
    g, u, _ = weights_of(6, 4)
    down = np.ones((4, 5), np.float32)
    state = to_checkpoint((g, u, down), "llama", layer=0)
    assert state["model.layers.0.mlp.down_proj.weight"].shape == (5, 4)
    assert from_checkpoint(state, "llama", layer=0).w_down.shape == (4, 5)


# Into the layers of this package.


def test_into_flax_layers():
    x, *weights, _ = draw(5, 6, 4, 6, np.float32)
    params = to_checkpoint(from_checkpoint(hugging_face(*weights), "llama", layer=1), "swiglu_mlp")
    want = mlp(x, *weights)
    layer = js.nnx.SwiGLUMLP(6, 4, rngs=nnx.Rngs(0))
    nnx.update(layer, jax.tree.map(jnp.asarray, params))
    check_value(layer(x), want, TOLERANCE["float32"])
    check_value(js.linen.SwiGLUMLP(4).apply({"params": params}, x), want, TOLERANCE["float32"])
    back = from_checkpoint(nnx.to_pure_dict(nnx.state(layer)), "swiglu_mlp")
    assert_equal(to_checkpoint(back, "llama", layer=1), hugging_face(*weights))


# Errors.


def test_missing_name_says_what_is_there():
    state = hugging_face(*weights_of(6, 4), prefix="model.language_model.layers.1.mlp.")
    state |= {f"model.vision.blocks.{n}.norm.weight": np.ones(3) for n in range(500)}
    with pytest.raises(ValueError, match="state must have") as error:
        from_checkpoint(state, "llama", layer=1)
    text = str(error.value)
    for name in ("gate", "up", "down"):
        assert f"'model.layers.1.mlp.{name}_proj.weight'" in text
        assert f"'model.language_model.layers.1.mlp.{name}_proj.weight'" in text
    assert "503 names" in text and "module=" in text


def test_one_missing_name():
    state = hugging_face(*weights_of(6, 4))
    state["model.layers.1.mlp.up_porj.weight"] = state.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(
        ValueError,
        match=r"not there: 'model.layers.1.mlp.up_proj.weight'. "
        r"Nearest of the 3 names there: 'model.layers.1.mlp.up_porj.weight'",
    ):
        from_checkpoint(state, "llama", layer=1)


def test_missing_name_in_a_tree():
    tree = maxtext_fused(*weights_of(6, 4))
    with pytest.raises(ValueError, match="'params/decoder/layers_1/mlp/wi/kernel'"):
        from_checkpoint(tree, "maxtext", layer=1)
    with pytest.raises(ValueError, match="0 names there: none"):
        from_checkpoint({}, "maxtext", layer=1)


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        (
            "gate_proj",
            (4,),
            r"'model.layers.1.mlp.gate_proj.weight' must have shape \(I, H\); got \(4,\)",
        ),
        (
            "up_proj",
            (4, 7),
            r"'model.layers.1.mlp.up_proj.weight' must have shape \(I, H\)=\(4, 6\) .*\(4, 7\)",
        ),
        (
            "down_proj",
            (4, 6),
            r"'model.layers.1.mlp.down_proj.weight' must have shape \(O, I\) with I=4 .*\(4, 6\)",
        ),
    ],
    ids=["gate", "up", "down"],
)
@layouts
def test_wrong_shape(name, shape, text, weight_layout):
    state = hugging_face(*weights_of(6, 4))
    state[f"model.layers.1.mlp.{name}.weight"] = np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=text):
        from_checkpoint(state, "llama", layer=1, weight_layout=weight_layout)


def test_wrong_shape_of_packed_and_stacked():
    g, u, d = weights_of(6, 4)
    state = phi3(g, u, d)
    state["model.layers.1.mlp.gate_up_proj.weight"] = np.zeros((7, 6), np.float32)
    with pytest.raises(
        ValueError, match=r"'model.layers.1.mlp.gate_up_proj.weight' must .*\(\(2 I\), H\)"
    ):
        from_checkpoint(state, "phi3", layer=1)
    # The other of the two layouts of Gemma, found out by w_down.
    with pytest.raises(
        ValueError, match=r"linear' must have shape \(I, O\) with I=6 .*got \(4, 6\)"
    ):
        from_checkpoint(
            ONE_LAYER["gemma_flax_transposed"](g, u, d), "gemma_flax", layer=1, hidden_act="silu"
        )
    with pytest.raises(ValueError, match=r"must have shape \(H, L, 2, I\); got \(6, 2, 4\)"):
        from_checkpoint(maxtext_fused(g, u, d, layers="layers"), "maxtext_fused_scanned")


def test_layers_that_do_not_stack():
    state = hugging_face(*weights_of(6, 4)) | to_checkpoint(weights_of(6, 5), "llama", layer=2)
    with pytest.raises(
        ValueError, match=r"w_gate of layer 2 must be float32\(6, 4\) as in layer 1"
    ):
        from_checkpoint(state, "llama", layer=(1, 2))


@pytest.mark.parametrize("save", [False, True], ids=["load", "save"])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"format": "llama5"}, "format must be one of .*'llama'"),
        ({"format": "gpt_oss"}, r"not a SwiGLU-MLP.*unpack\(.*Packing\(\"H \(I 2\)\"\)"),
        ({"format": "gpt_oss", "hidden_act": "silu"}, "not a SwiGLU-MLP"),
        ({"format": "gemma2"}, "hidden_act='gelu_pytorch_tanh', which swiglu_mlp does not compute"),
        ({"format": "gemma_flax"}, "hidden_act='gelu_pytorch_tanh', which swiglu_mlp does not"),
        ({"hidden_act": "gelu"}, "hidden_act must be one of .*got 'gelu'"),
        ({"layer": None}, "layer must be an index, or several"),
        ({"layer": -1}, "layer must be an index.*got -1"),
        ({"layer": True}, "layer must be an index.*got True"),
        ({"layer": 1.0}, "layer must be"),
        ({"module": "mlp"}, "layer must be None, since module='mlp'"),
        ({"weight_layout": "HI"}, "weight_layout must be one of"),
        ({"format": "maxtext_scanned", "module": "layers_{layer}/mlp"}, "must not contain {layer}"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_options(save, arguments, text):
    arguments = {"format": "llama", "layer": 1} | arguments
    weights = weights_of(6, 4)
    with pytest.raises(ValueError, match=text):
        (to_checkpoint if save else from_checkpoint)(
            weights if save else hugging_face(*weights), **arguments
        )


def test_saving_errors():
    g, u, d = weights_of(6, 4)
    with pytest.raises(ValueError, match="weights must be w_gate, w_up and w_down; got 2 arrays"):
        to_checkpoint((g, d), "llama", layer=0)
    with pytest.raises(ValueError, match=r"w_up must have shape \(H, I\)=\(6, 4\) .*got \(4, 6\)"):
        to_checkpoint((g, d, d), "llama", layer=0)
    with pytest.raises(ValueError, match=r"w_gate must have shape \(L, H, I\); got \(6, 4\)"):
        to_checkpoint((g, u, d), "llama", layer=[0])
    stack = [w[None] for w in (g, u, d)]
    with pytest.raises(ValueError, match=r"layer must name 1 layers.*\(1, 6, 4\) stacks; got 2"):
        to_checkpoint(stack, "llama", layer=range(2))
    with pytest.raises(ValueError, match="layer must be None, since 'params/decoder/layers/mlp'"):
        to_checkpoint(stack, "maxtext_scanned", layer=0)


def test_no_layers():
    with pytest.raises(ValueError, match="layer must name at least one layer"):
        from_checkpoint(hugging_face(*weights_of(6, 4)), "llama", layer=[])


def test_biases_are_refused():
    state = hugging_face(*weights_of(6, 4)) | {"model.layers.1.mlp.down_proj.bias": np.ones(6)}
    with pytest.raises(ValueError, match=r"'model.layers.1.mlp.down_proj.bias' is there"):
        from_checkpoint(state, "llama", layer=1)
    tree = flax(*weights_of(6, 4))
    tree["up_proj"]["bias"] = np.ones(4)
    with pytest.raises(ValueError, match="'up_proj/bias' is there"):
        from_checkpoint(tree, "swiglu_mlp")


@pytest.mark.parametrize("dtype", [np.int8, jnp.float8_e4m3fn], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("asarray", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_quantized_weights_are_refused(dtype, asarray):
    state = hugging_face(*weights_of(6, 4))
    name = "model.layers.1.mlp.up_proj.weight"
    state[name] = asarray(state[name]).astype(dtype)
    with pytest.raises(
        TypeError, match=f"{name} must have dtype.*got {np.dtype(dtype)}. Dequantize"
    ):
        from_checkpoint(state, "llama", layer=1)


def test_other_objects_are_refused():
    with pytest.raises(
        TypeError, match="w_gate_up must be a NumPy, JAX or PyTorch array; got list"
    ):
        unpack([[1.0]], Packing("(2 I) H"))


def test_format_errors():
    with pytest.raises(ValueError, match="names must be 2 with packing"):
        Format("", ("a", "b", "c"), "in_out", packing=Packing("H 2 I"))
    with pytest.raises(ValueError, match="names must be 3 with packing=None"):
        Format("", ("a", "b"), "in_out")
    with pytest.raises(ValueError, match="weight_layout must be one of"):
        Format("", ("a", "b", "c"), "HI")


# Documentation.


def test_examples_in_docstrings():
    assert doctest.testmod(convert).attempted
    assert not doctest.testmod(convert).failed


def snippets(path):
    """Every Python block of a document, statement by statement: some show several ways to load."""
    text = (Path(__file__).parents[1] / path).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    return [ast.unparse(node) for block in blocks for node in ast.parse(block).body]


def documented(h, i):
    """The names that the documents take for granted, one layer's weights, and those of all."""
    x = np.ones((5, h), np.float32)
    layers = [weights_of(h, i, seed) for seed in range(4)]
    stack = [np.stack(w) for w in zip(*layers, strict=True)]
    g, u, d = layers[3]
    state, tree = {}, {}
    for n, (gate, up, down) in enumerate(layers):
        state |= hugging_face(gate, up, down, prefix=f"model.layers.{n}.mlp.")
    state |= hugging_face(g, u, d, prefix="model.layers.3.mlp.shared_experts.")
    state["model.layers.3.mlp.gate_up_proj.weight"] = np.concatenate([g.T, u.T])
    state["decoder.layers.3.mlp.linear_fc1.weight"] = np.concatenate([g.T, u.T])
    state["decoder.layers.3.mlp.linear_fc2.weight"] = d.T
    state |= {f"layers.3.feed_forward.w{n}.weight": w.T for n, w in ((1, g), (3, u), (2, d))}
    for define in (maxtext, maxtext_fused):
        scanned = jax.tree.map(lambda w: np.moveaxis(w, 0, 1), define(*stack, layers="layers"))
        for part in (scanned, define(g, u, d, layers="layers_3")):
            tree |= flatten_dict(part)
    tree |= flatten_dict({"model": {"layers": {"3": {"mlp": flax(g, u, d)}}}, **flax(g, u, d)})
    tree |= flatten_dict({"layer_3": {"mlp": {"gating_einsum": np.stack([g, u]), "linear": d}}})

    class Config:
        num_hidden_layers, hidden_act = 4, "silu"

    names = {"jax": jax, "jnp": jnp, "nnx": nnx, "x": x, "H": h, "I": i, "config": Config}
    names |= {"state": state, "params": tree, "gate_up_proj": np.concatenate([g.T, u.T])}
    return names, layers[3], stack


def test_snippets_of_the_documentation():
    """Every block of docs/checkpoints.md runs and loads the right weights."""
    names, layer, stack = documented(6, 64)
    statements = snippets("docs/checkpoints.md")
    loads = 0
    for statement in statements:
        exec(statement, names)
        if statement.startswith("weights = convert.from_checkpoint("):
            loads += 1
            got = names["weights"]
            want = stack if got.w_gate.ndim == 3 else layer
            layout = "out_in" if "out_in" in statement else "in_out"
            assert_equal(tuple(map(np.asarray, got)), tuple(laid_out(want, layout)))
    g, u, d = layer
    assert_equal((names["w_gate"], names["w_up"]), (g, u))
    assert_equal(names["saved"], hugging_face(g, u, d, prefix="model.layers.3.mlp."))
    assert loads == sum(s.count("convert.from_checkpoint(") for s in statements)


def test_snippets_of_the_readme(capsys):
    """Every block of README.md runs, and each way to load finds the right weights."""
    names, layer, _ = documented(512, 64)
    statements = snippets("README.md")
    (run,) = (s for s in statements if "js.swiglu_mlp(x, *weights" in s)
    loads = 0
    with jax.numpy_dtype_promotion("standard"):
        for statement in statements:
            exec(statement, names)
            if statement.startswith("weights = from_checkpoint("):
                loads += 1
                assert_equal(tuple(map(np.asarray, names["weights"])), tuple(layer))
                exec(run, names)
                check_value(
                    names["y"].reshape(-1, 512),
                    mlp(names["x"].reshape(-1, 512), *layer),
                    2 * TOLERANCE["bfloat16"],  # roundings of weights come on top
                )
    assert loads == sum("from_checkpoint(" in s for s in statements)
    assert "swiglu_mlp on" in capsys.readouterr().out
