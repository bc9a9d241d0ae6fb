"""Weights between the layouts of checkpoints and those of `swiglu_mlp`.

    weights = from_checkpoint(state, "llama", layer=3)
    y = swiglu_mlp(x, *weights)

`from_checkpoint` and `to_checkpoint` go by a `Format`, which says how a family of checkpoints
names and stores the MLP; `FORMATS` holds the usual ones. `unpack` and `pack` go by a `Packing`,
which says how one array holds gate and up. A layout is always named, never guessed from a shape.

All are pure functions. They take NumPy arrays, JAX arrays (traced ones too) and PyTorch tensors on
the CPU, and never change a dtype. What comes in as NumPy or PyTorch goes out as NumPy, as views of
the same memory where the layout allows it: nothing is on a device before the caller puts it there.
"""

import dataclasses
import difflib
import heapq
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_swiglu._config import WEIGHT_LAYOUTS, WeightLayout
from jax_swiglu._packing import Packing
from jax_swiglu._shapes import check_choice, weight_dims

__all__ = [
    "FORMATS",
    "Format",
    "MLPWeights",
    "Packing",
    "from_checkpoint",
    "pack",
    "to_checkpoint",
    "unpack",
]

Array = np.ndarray | jax.Array

_SILU = ("silu", "swish")


class MLPWeights(NamedTuple):
    """The weights of one SwiGLU-MLP, in the order in which `swiglu_mlp` takes them.

    Attributes:
      w_gate: `[H, I]`, or `[I, H]` with `weight_layout="out_in"`; `[L, H, I]` or `[L, I, H]` when
        stacked over L layers.
      w_up: as w_gate.
      w_down: `[I, O]` or `[O, I]`, stacked likewise.
    """

    w_gate: Array
    w_up: Array
    w_down: Array


@dataclasses.dataclass(frozen=True)
class Format:
    """How a family of checkpoints names and stores the MLP of a layer.

    Attributes:
      module: path of the MLP, with `{layer}` for the index of the layer.
      names: names below it of gate, up and down; with a packing, of gate-and-up and down. Parts of
        a path are joined by "." in flat state dicts, by "/" in nested parameter trees.
      weight_layout: of the arrays, as in `swiglu_mlp`; with a packing, of down alone.
      packing: how one array holds gate and up; None: they are separate.
      layer_axis: where the arrays of all layers are stacked into one, the axis of the layers in it.
      hidden_act: activation of the models that have this format, unless their configuration says
        otherwise.
    """

    module: str
    names: tuple[str, str, str] | tuple[str, str]
    weight_layout: WeightLayout
    packing: Packing | None = None
    layer_axis: int | None = None
    hidden_act: str = "silu"

    def __post_init__(self) -> None:
        check_choice("weight_layout", self.weight_layout, WEIGHT_LAYOUTS)
        expected = 3 if self.packing is None else 2
        if len(self.names) != expected:
            raise ValueError(
                f"names must be {expected} with packing={self.packing}; got {self.names}"
            )
        if self.layer_axis is not None and "{layer}" in self.module:
            raise ValueError(
                f"module must not contain {{layer}} with layer_axis={self.layer_axis}, where one "
                f"array holds all layers; got {self.module!r}"
            )

    @property
    def _separator(self) -> str:
        return "/" if "/" in self.module + self.names[0] else "."

    def _paths(self, layer: int | None) -> list[str]:
        module = self.module.replace("{layer}", str(layer))
        return [f"{module}{self._separator}{name}" if module else name for name in self.names]


_HUGGING_FACE = Format(
    module="model.layers.{layer}.mlp",
    names=("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
    weight_layout="out_in",
)
_PHI3 = dataclasses.replace(
    _HUGGING_FACE,
    names=("gate_up_proj.weight", "down_proj.weight"),
    packing=Packing("(2 I) H"),
)
_FLAX = Format(
    module="",
    names=("gate_proj/kernel", "up_proj/kernel", "down_proj/kernel"),
    weight_layout="in_out",
)
_MAXTEXT = Format(
    module="params/decoder/layers_{layer}/mlp",
    names=("wi_0/kernel", "wi_1/kernel", "wo/kernel"),
    weight_layout="in_out",
)
_MAXTEXT_FUSED = dataclasses.replace(
    _MAXTEXT, names=("wi/kernel", "wo/kernel"), packing=Packing("H 2 I")
)
_MAXTEXT_SCANNED: Any = {"module": "params/decoder/layers/mlp", "layer_axis": 1}
_GEMMA = Format(
    module="layer_{layer}/mlp",
    names=("gating_einsum", "linear"),
    weight_layout="in_out",
    packing=Packing("2 H I"),
    hidden_act="gelu_pytorch_tanh",
)
_MEGATRON = Format(
    module="decoder.layers.{layer}.mlp",
    names=("linear_fc1.weight", "linear_fc2.weight"),
    weight_layout="out_in",
    packing=Packing("(2 I) H"),
)

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        # Hugging Face, by `config.model_type`.
        **dict.fromkeys(
            ("deepseek_v2", "deepseek_v3", "llama", "mistral", "olmo2", "qwen2", "qwen3"),
            _HUGGING_FACE,
        ),
        **dict.fromkeys(
            ("gemma", "gemma2", "gemma3_text"),
            dataclasses.replace(_HUGGING_FACE, hidden_act="gelu_pytorch_tanh"),
        ),
        **dict.fromkeys(("glm4", "phi3"), _PHI3),
        # Flax: Hugging Face's models of transformers 4, and the layers of this package.
        "hf_flax": dataclasses.replace(_FLAX, module="model/layers/{layer}/mlp"),
        "swiglu_mlp": _FLAX,
        "swiglu_mlp_packed": dataclasses.replace(
            _FLAX, names=("gate_up_proj/kernel", "down_proj/kernel"), packing=Packing("H 2 I")
        ),
        # MaxText, by `fused_mlp` and `scan_layers`.
        "maxtext": _MAXTEXT,
        "maxtext_fused": _MAXTEXT_FUSED,
        "maxtext_scanned": dataclasses.replace(_MAXTEXT, **_MAXTEXT_SCANNED),
        "maxtext_fused_scanned": dataclasses.replace(_MAXTEXT_FUSED, **_MAXTEXT_SCANNED),
        # google-deepmind/gemma, by `transpose_gating_einsum`.
        "gemma_flax": _GEMMA,
        "gemma_flax_transposed": dataclasses.replace(_GEMMA, packing=Packing("2 I H")),
        # Megatron-LM; interleaved with `moe_mlp_glu_interleave_size=32`.
        "megatron": _MEGATRON,
        "megatron_interleaved": dataclasses.replace(
            _MEGATRON, packing=Packing("(I 2) H", block=32)
        ),
    }
)

_REFUSED = {
    "gpt_oss": "its experts clamp gate and up, scale the sigmoid, add 1 to up and have biases, "
    "which is not silu(gate) * up. Their weights alone can be had: "
    'unpack(experts.gate_up_proj, Packing("H (I 2)"))'
}


def unpack(
    w_gate_up: Any, packing: Packing, *, weight_layout: WeightLayout = "in_out"
) -> tuple[Array, Array]:
    """Splits one array that holds gate and up.

    Views of NumPy arrays, but for blocks larger than 1.

    Args:
      w_gate_up: the array, with any number of leading dimensions before those of `packing`.
      packing: how it holds gate and up.
      weight_layout: of the result, as in `swiglu_mlp`.

    Returns:
      w_gate and w_up: `[..., H, I]`, or `[..., I, H]` with `weight_layout="out_in"`.

    Raises:
      ValueError: the shape does not fit the packing.
      TypeError: w_gate_up is not a floating-point array of 16 bits or more.

    Example:
      >>> import numpy as np
      >>> from jax_swiglu.convert import Packing, unpack
      >>> w = np.zeros((2 * 12, 8), np.float32)  # of Phi-3
      >>> [half.shape for half in unpack(w, Packing("(2 I) H"))]
      [(8, 12), (8, 12)]
    """
    check_choice("weight_layout", weight_layout, WEIGHT_LAYOUTS)
    return _unpack("w_gate_up", _array("w_gate_up", w_gate_up), packing, weight_layout)


def pack(
    w_gate: Any, w_up: Any, packing: Packing, *, weight_layout: WeightLayout = "in_out"
) -> Array:
    """Joins gate and up into one array: the inverse of `unpack`.

    Args:
      w_gate: `[..., H, I]`, or `[..., I, H]` with `weight_layout="out_in"`.
      w_up: as w_gate.
      packing: how the result holds them.
      weight_layout: of w_gate and w_up, as in `swiglu_mlp`.

    Returns:
      The packed array, with the leading dimensions of w_gate.

    Raises:
      ValueError: the shapes differ, or do not fit the packing.
      TypeError: an argument is not a floating-point array of 16 bits or more, or the dtypes differ.

    Example:
      >>> import numpy as np
      >>> from jax_swiglu.convert import Packing, pack
      >>> w = np.zeros((8, 12), np.float32)
      >>> pack(w, w, Packing("H 2 I")).shape  # of MaxText and TransformerEngine
      (8, 2, 12)
    """
    check_choice("weight_layout", weight_layout, WEIGHT_LAYOUTS)
    halves = [_array("w_gate", w_gate), _array("w_up", w_up)]
    dims = "(..., H, I)" if weight_layout == "in_out" else "(..., I, H)"
    if halves[0].ndim < 2:
        raise ValueError(
            f"w_gate must have shape {dims} for weight_layout={weight_layout!r}; "
            f"got {halves[0].shape}"
        )
    if halves[1].shape != halves[0].shape:
        raise ValueError(
            f"w_up must have shape {dims}={halves[0].shape} to match w_gate; got {halves[1].shape}"
        )
    if halves[1].dtype != halves[0].dtype:
        raise TypeError(
            f"w_up must have dtype {halves[0].dtype} to match w_gate; got {halves[1].dtype}"
        )
    letters = packing.letters
    x, *_ = halves = [_transpose(h, weight_layout, packing.weight_layout) for h in halves]
    if "J" in letters:
        axis = x.ndim - (2 if letters[-1] == "H" else 1)
        intermediate = x.shape[axis]
        if intermediate % packing.block:
            raise ValueError(
                f"w_gate must have an I that is a multiple of {packing.block} for {packing}; "
                f"got I={intermediate} in shape {x.shape}"
            )
        split = (intermediate // packing.block, packing.block)
        halves = [h.reshape(*h.shape[:axis], *split, *h.shape[axis + 1 :]) for h in halves]
    if packing.up_first:
        halves.reverse()
    joined = _namespace(halves).stack(halves, axis=letters.index("2") - len(letters))
    sizes = dict(zip(letters, joined.shape[-len(letters) :], strict=True))
    intermediate = sizes["J"] * sizes["B"] if "J" in letters else sizes["I"]
    size = {"2": 2, "H": sizes["H"], "I": intermediate}
    shape = [size.get(dim, 2 * intermediate) for dim in packing.dims]
    return joined.reshape(*x.shape[:-2], *shape)


def from_checkpoint(
    state: Mapping[Any, Any],
    format: Format | str,
    *,
    layer: int | Sequence[int] | None = None,
    module: str | None = None,
    hidden_act: str | None = None,
    weight_layout: WeightLayout = "in_out",
) -> MLPWeights:
    """Takes the weights of SwiGLU-MLPs out of the parameters of a model.

    Args:
      state: names and arrays: a PyTorch or safetensors state dict, or a Flax parameter tree, nested
        or flattened. Only the arrays asked for are looked up.
      format: how the checkpoint names and stores them: a name in `FORMATS`, for Hugging Face the
        `model_type` of the configuration, or a `Format`.
      layer: index of the layer; or indices, e.g. a range, for weights stacked in that order on a
        new first axis. None: the one MLP there is, or all layers of a format that stacks them.
      module: path of the MLP where it is not `format.module`, e.g.
        "model.layers.{layer}.mlp.shared_experts", or "" for the state of the MLP alone.
      hidden_act: the activation that the model's configuration states. None: that of the format.
      weight_layout: of the result, as in `swiglu_mlp`. "out_in" is what PyTorch stores.

    Returns:
      `MLPWeights`, in the dtypes of the checkpoint.

    Raises:
      ValueError: a name is not there (the error says which are), a shape does not fit, the layer
        has biases, its activation is not SiLU, or an option does not fit.
      TypeError: an array is not floating-point with 16 bits or more (quantized weights have to be
        dequantized first), or is not a NumPy, JAX or PyTorch array in host memory.

    Example:
      >>> import numpy as np
      >>> from jax_swiglu import convert
      >>> state = {
      ...     f"model.layers.{layer}.mlp.{name}_proj.weight": np.zeros(shape, np.float32)
      ...     for layer in range(4)
      ...     for name, shape in {"gate": (12, 8), "up": (12, 8), "down": (8, 12)}.items()
      ... }
      >>> convert.from_checkpoint(state, "llama", layer=3).w_gate.shape
      (8, 12)
      >>> convert.from_checkpoint(state, "llama", layer=range(4)).w_down.shape
      (4, 12, 8)
    """
    check_choice("weight_layout", weight_layout, WEIGHT_LAYOUTS)
    spec = _resolve(format, module, hidden_act)
    if spec.layer_axis is not None:
        return _read(state, spec, None, weight_layout, select=layer)
    if not isinstance(layer, Iterable):
        return _read(state, spec, _one_layer(spec, layer), weight_layout)
    layers = [_one_layer(spec, index) for index in layer]
    if not layers:
        raise ValueError(f"layer must name at least one layer; got {layer!r}")
    read = [_read(state, spec, index, weight_layout) for index in layers]
    for index, weights in zip(layers, read, strict=True):
        for name, value, first in zip(MLPWeights._fields, weights, read[0], strict=True):
            if (value.shape, value.dtype) != (first.shape, first.dtype):
                raise ValueError(
                    f"{name} of layer {index} must be {first.dtype}{first.shape} as in layer "
                    f"{layers[0]} to be stacked; got {value.dtype}{value.shape}"
                )
    return MLPWeights(*(_namespace(parts).stack(parts) for parts in zip(*read, strict=True)))


def to_checkpoint(
    weights: Sequence[Any],
    format: Format | str,
    *,
    layer: int | Sequence[int] | None = None,
    module: str | None = None,
    hidden_act: str | None = None,
    weight_layout: WeightLayout = "in_out",
) -> dict[str, Any]:
    """Names and lays out weights as a checkpoint does: the inverse of `from_checkpoint`.

    NumPy arrays of the result are contiguous, as writers of safetensors need them.

    Args:
      weights: w_gate, w_up and w_down, stacked over layers if `layer` has several indices or the
        format stores stacks.
      format: see `from_checkpoint`.
      layer: index of the layer, or those of a stack. None: the format has no index in its names.
      module: see `from_checkpoint`.
      hidden_act: see `from_checkpoint`.
      weight_layout: of `weights`.

    Returns:
      Names and arrays; nested dicts in formats of parameter trees, whose paths have a "/".

    Raises:
      ValueError: as `from_checkpoint`.
      TypeError: as `from_checkpoint`.

    Example:
      >>> import numpy as np
      >>> from jax_swiglu import convert
      >>> w_gate = w_up = np.zeros((8, 12), np.float32)
      >>> state = convert.to_checkpoint((w_gate, w_up, w_gate.T), "phi3", layer=0)
      >>> for name, array in state.items():
      ...     print(name, array.shape)
      model.layers.0.mlp.gate_up_proj.weight (24, 8)
      model.layers.0.mlp.down_proj.weight (8, 12)
    """
    check_choice("weight_layout", weight_layout, WEIGHT_LAYOUTS)
    spec = _resolve(format, module, hidden_act)
    if len(weights) != 3:
        raise ValueError(f"weights must be w_gate, w_up and w_down; got {len(weights)} arrays")
    named = dict(zip(MLPWeights._fields, weights, strict=True))
    arrays = MLPWeights(*(_array(name, value) for name, value in named.items()))
    stacked = spec.layer_axis is not None or isinstance(layer, Iterable)
    _check_mlp(arrays, MLPWeights._fields, weight_layout, stacked)
    if spec.layer_axis is not None:
        if layer is not None:
            raise ValueError(
                f"layer must be None, since {spec.module!r} holds the stack of all layers; "
                f"got {layer!r}"
            )
        written = [(None, arrays)]
    elif not isinstance(layer, Iterable):
        written = [(_one_layer(spec, layer), arrays)]
    else:
        layers = [_one_layer(spec, index) for index in layer]
        if len(layers) != len(arrays.w_gate):
            raise ValueError(
                f"layer must name {len(arrays.w_gate)} layers, as many as w_gate of shape "
                f"{arrays.w_gate.shape} stacks; got {len(layers)}"
            )
        written = [(index, MLPWeights(*(w[i] for w in arrays))) for i, index in enumerate(layers)]
    flat: dict[str, Array] = {}
    for index, each in written:
        w_gate, w_up, w_down = (_transpose(w, weight_layout, spec.weight_layout) for w in each)
        if spec.packing is None:
            parts = [w_gate, w_up, w_down]
        else:
            packed = pack(w_gate, w_up, spec.packing, weight_layout=spec.weight_layout)
            parts = [packed, w_down]
        for path, part in zip(spec._paths(index), parts, strict=True):
            if spec.layer_axis is not None:
                part = _namespace([part]).moveaxis(part, 0, spec.layer_axis)
            # safetensors.numpy (0.8) writes the memory of an array as it is, whatever its strides.
            flat[path] = np.ascontiguousarray(part) if isinstance(part, np.ndarray) else part
    return flat if spec._separator == "." else _nest(flat)


def _resolve(format: Format | str, module: str | None, hidden_act: str | None) -> Format:
    """The format asked for, once its models are known to compute what we compute."""
    if isinstance(format, str):
        if format in _REFUSED:
            raise ValueError(f"format {format!r} is not a SwiGLU-MLP: {_REFUSED[format]}")
        check_choice("format", format, tuple(FORMATS))
    spec = FORMATS[format] if isinstance(format, str) else format
    if hidden_act is None and spec.hidden_act not in _SILU:
        raise ValueError(
            f"format {format!r} is of models with hidden_act={spec.hidden_act!r}, which swiglu_mlp "
            "does not compute. Pass the hidden_act of the model's configuration if it is 'silu'"
        )
    check_choice("hidden_act", hidden_act, (None, *_SILU))
    return spec if module is None else dataclasses.replace(spec, module=module)


def _one_layer(spec: Format, layer: Any) -> int | None:
    """Checks an index against names with or without one."""
    if "{layer}" not in spec.module:
        if layer is not None:
            raise ValueError(
                f"layer must be None, since module={spec.module!r} has no {{layer}}; got {layer!r}"
            )
        return None
    if not _is_index(layer):
        raise ValueError(
            f"layer must be an index, or several, for module={spec.module!r}; got {layer!r}"
        )
    return int(layer)


def _read(
    state: Mapping[Any, Any],
    spec: Format,
    layer: int | None,
    weight_layout: WeightLayout,
    select: int | Sequence[int] | None = None,
) -> MLPWeights:
    """Reads one MLP, or of stacked arrays the layers that select names."""
    paths = spec._paths(layer)
    found = {path: _find(state, path, spec._separator) for path in paths}
    if any(value is None for value in found.values()):
        raise ValueError(_missing(state, spec, found))
    for path in paths:
        bias = re.sub(r"[^./]+$", "bias", path)
        if bias != path and _find(state, bias, spec._separator) is not None:
            raise ValueError(f"{bias!r} is there, but a SwiGLU-MLP here has no biases")
    arrays = [_array(path, value) for path, value in found.items()]
    dims = weight_dims(spec.weight_layout)
    stored = dims if spec.packing is None else (spec.packing.dims, dims[2])
    for i, (path, x) in enumerate(zip(paths, arrays, strict=True)):
        expected = list(stored[i])
        if spec.layer_axis is not None:
            expected.insert(spec.layer_axis, "L")
        if x.ndim != len(expected):
            raise ValueError(f"{path!r} must have shape ({', '.join(expected)}); got {x.shape}")
        if spec.layer_axis is not None:
            arrays[i] = _select(path, x, spec.layer_axis, select)
    if spec.packing is not None:
        packed, w_down = arrays
        arrays = [*_unpack(repr(paths[0]), packed, spec.packing, spec.weight_layout), w_down]
        paths = [paths[0], *paths]
    stacked = spec.layer_axis is not None and (select is None or isinstance(select, Iterable))
    weights = MLPWeights(*arrays)
    _check_mlp(weights, list(map(repr, paths)), spec.weight_layout, stacked)
    return MLPWeights(*(_transpose(w, spec.weight_layout, weight_layout) for w in weights))


def _select(path: str, x: Array, axis: int, layer: int | Sequence[int] | None) -> Array:
    """The layers asked for of an array that stacks them along axis; several of them come first."""
    x = _namespace([x]).moveaxis(x, axis, 0)
    if layer is None:
        return x
    indices = layer if isinstance(layer, Iterable) else [layer]
    # JAX clamps an index that is out of bounds.
    if not all(_is_index(index) and index < len(x) for index in indices):
        raise ValueError(
            f"layer must be an index, or several, of the {len(x)} layers of {path!r}; got {layer!r}"
        )
    if isinstance(layer, range) and layer.step > 0:
        return x[layer.start : layer.stop : layer.step]
    return x[np.asarray(layer)] if isinstance(layer, Iterable) else x[int(layer)]


def _is_index(value: Any) -> bool:
    integral = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return integral and bool(value >= 0)


def _check_mlp(
    weights: MLPWeights, names: Sequence[str], weight_layout: WeightLayout, stacked: bool
) -> None:
    """Checks that three arrays are those of one MLP, or of a stack of them."""
    gate, up, down = weights
    dims = [("L", *d) if stacked else d for d in weight_dims(weight_layout)]
    for name, value, expected in zip(names, weights, dims, strict=True):
        if value.ndim != len(expected):
            raise ValueError(f"{name} must have shape ({', '.join(expected)}); got {value.shape}")
    if up.shape != gate.shape:
        raise ValueError(
            f"{names[1]} must have shape ({', '.join(dims[1])})={gate.shape} to match {names[0]}; "
            f"got {up.shape}"
        )
    shared = {dim: gate.shape[axis] for axis, dim in enumerate(dims[0]) if dim != "H"}
    sizes = dict(zip(dims[2], down.shape, strict=True))
    if any(sizes[dim] != size for dim, size in shared.items()):
        need = ", ".join(f"{dim}={size}" for dim, size in shared.items())
        raise ValueError(
            f"{names[2]} must have shape ({', '.join(dims[2])}) with {need} to match {names[0]}; "
            f"got {down.shape}"
        )


def _unpack(
    name: str, x: Array, packing: Packing, weight_layout: WeightLayout
) -> tuple[Array, Array]:
    lead = x.shape[: max(0, x.ndim - len(packing.dims))]
    shape = x.shape[len(lead) :]
    if not packing.fits(shape):
        raise ValueError(
            f"{name} must have shape {packing.expected()}, after any leading dimensions, for "
            f"{packing}; got {x.shape}"
        )
    letters = packing.letters
    x = x.reshape(*lead, *packing.split(shape))
    before = (slice(None),) * (len(lead) + letters.index("2"))
    halves = [x[(*before, half)] for half in (0, 1)]
    if "J" in letters:
        axis = len(lead) + letters.index("2") - 1
        blocks, block = halves[0].shape[axis : axis + 2]
        merged = (*halves[0].shape[:axis], blocks * block, *halves[0].shape[axis + 2 :])
        halves = [half.reshape(merged) for half in halves]
    if packing.up_first:
        halves.reverse()
    gate, up = (_transpose(half, packing.weight_layout, weight_layout) for half in halves)
    return gate, up


def _transpose(x: Array, stored: WeightLayout, wanted: WeightLayout) -> Array:
    return x if stored == wanted else x.swapaxes(-1, -2)


def _namespace(arrays: Sequence[Array]) -> Any:
    """`jax.numpy` where JAX is among the arrays, else `numpy`."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


def _array(name: str, value: Any) -> Array:
    """A NumPy or JAX array of what the user passed, without a copy."""
    torch: Any = sys.modules.get("torch")  # whoever has a tensor has imported it
    if torch is not None and isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise TypeError(
                f"{name} must be on the CPU; got a tensor on {value.device}. Pass x.cpu()"
            )
        tensor = value.detach()
        if tensor.dtype == torch.bfloat16:
            # PyTorch does not turn this dtype into NumPy's, so it goes by its bits.
            return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
        if tensor.dtype in (torch.float16, torch.float32, torch.float64):
            return tensor.numpy()
        dtype = tensor.dtype
    elif isinstance(value, np.ndarray | jax.Array):
        dtype = value.dtype
        if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 2:
            return value
    else:
        raise TypeError(f"{name} must be a NumPy, JAX or PyTorch array; got {type(value).__name__}")
    raise TypeError(
        f"{name} must have dtype bfloat16, float16, float32 or float64; got {dtype}. "
        "Dequantize quantized weights first"
    )


def _find(node: Any, path: str, separator: str) -> Any:
    """The array at a path; None if there is none. Trees may be nested, flat, or flat in part."""
    parts = path.split(separator)
    if isinstance(node, Mapping):
        for n in range(len(parts), 0, -1):
            keys: list[Any] = [separator.join(parts[:n]), tuple(parts[:n])]
            if n == 1 and parts[0].isdecimal():
                keys.append(int(parts[0]))
            for key in keys:
                if key in node:
                    if n == len(parts):
                        return node[key]
                    found = _find(node[key], separator.join(parts[n:]), separator)
                    if found is not None:
                        return found
    return None


def _names(node: Mapping[Any, Any], separator: str) -> Iterator[str]:
    """Paths of all arrays."""
    for key, value in node.items():
        head = separator.join(map(str, key)) if isinstance(key, tuple) else str(key)
        if isinstance(value, Mapping):
            yield from (f"{head}{separator}{rest}" for rest in _names(value, separator))
        else:
            yield head


def _missing(state: Mapping[Any, Any], spec: Format, found: Mapping[str, Any]) -> str:
    """What was looked for, what of it is not there, and what is there instead."""
    names = list(_names(state, spec._separator))
    missing = [path for path, value in found.items() if value is None]
    wanted = set(missing[0].split(spec._separator))
    # A mixture of experts has tens of thousands of names, too many for difflib.
    alike = heapq.nlargest(
        64, names, key=lambda name: len(wanted.intersection(name.split(spec._separator)))
    )
    nearest = difflib.get_close_matches(missing[0], alike, n=4, cutoff=0)
    return (
        f"state must have {', '.join(map(repr, found))}; "
        f"not there: {', '.join(map(repr, missing))}. "
        f"Nearest of the {len(names)} names there: {', '.join(map(repr, nearest)) or 'none'}. "
        "Pass module= where the MLP has another path, or the format that has these names"
    )


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree
