"""Trains a small byte-level language model with the SwiGLU layer of jax_swiglu.

    python examples/train_lm.py                 # about two minutes on two CPU cores
    python examples/train_lm.py --mlp both      # also with a plain-Flax MLP; the curves must agree

The model is a decoder as in Llama and Qwen (RMSNorm, rotary attention, SwiGLU-MLP, tied
embedding) whose layers are stacked and run by ``nnx.scan``. The text is the language
reference that every CPython carries in ``pydoc_data.topics``, so nothing is downloaded.
The last tenth is held out; a bigram model counted on the rest is the loss to beat.

On a GPU the model is larger and computes in bfloat16 from float32 parameters.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from tqdm import tqdm

import jax_swiglu
from jax_swiglu.nnx import SwiGLUMLP

VOCAB = 256  # one token per byte value
BATCH_AXES = ("data", "fsdp")  # of the mesh of train_sharded.py
BIGRAM_MARGIN = 0.1  # nats per byte below the bigram model that count as clearly below
# Gaps allowed between the two loss curves, in nats per byte. They start from the same parameters
# and see the same data, so that at first they differ by rounding alone: a wrong gradient shows
# there. Later training amplifies rounding (changing the embedding by one unit in the last place
# moves single float32 losses by 0.03 within 300 steps), and only the mean gap says something.
EARLY_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03}
MEAN_TOLERANCE = 0.02


@dataclass(frozen=True)
class Config:
    """Sizes and schedule; the fields are the command line's options."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    seq: int
    batch: int
    steps: int
    learning_rate: float
    dtype: str
    seed: int = 0
    implementation: Literal["cudnn", "xla", "host"] | None = None


# Training on the CPU is limited by arithmetic, on the GPU by the text: 440 kB are read so often
# that a longer run only memorises them.
PRESETS = {
    "cpu": Config(128, 384, 4, 4, 128, 8, 500, 3e-3, "float32"),
    "gpu": Config(2048, 8192, 8, 16, 512, 16, 200, 3e-4, "bfloat16"),
}


class PlainMLP(nnx.Module):
    """The same MLP from three Flax layers: what SwiGLUMLP replaces."""

    def __init__(self, hidden: int, intermediate: int, *, dtype: Any, rngs: nnx.Rngs):
        self.gate_proj = nnx.Linear(hidden, intermediate, use_bias=False, dtype=dtype, rngs=rngs)
        self.up_proj = nnx.Linear(hidden, intermediate, use_bias=False, dtype=dtype, rngs=rngs)
        self.down_proj = nnx.Linear(intermediate, hidden, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding of ``[batch, seq, heads, head_dim]``."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def split_batch(x: jax.Array) -> jax.Array:
    """Keeps the batch split, on the mesh of train_sharded.py.

    Left to choose, the partitioner splits the last dimension as the weights are split.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, jax.P(BATCH_AXES))


class Attention(nnx.Module):
    """Causal self-attention with rotary positions.

    The heads are a dimension of the kernels, ``[hidden, 3, heads, head_dim]`` and ``[heads,
    head_dim, hidden]``, so that they can be split over devices.
    """

    def __init__(self, hidden: int, heads: int, *, dtype: Any, rngs: nnx.Rngs):
        per_head = (heads, hidden // heads)
        linear = partial(nnx.LinearGeneral, use_bias=False, dtype=dtype, rngs=rngs)
        self.qkv_proj = linear(hidden, (3, *per_head))
        self.out_proj = linear(per_head, hidden, axis=(-2, -1))

    def __call__(self, x: jax.Array) -> jax.Array:
        qkv = self.qkv_proj(x)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        fused = jax.default_backend() == "gpu" and x.dtype == jnp.bfloat16
        out = jax.nn.dot_product_attention(
            rotate(q), rotate(k), v, is_causal=True, implementation="cudnn" if fused else "xla"
        )
        return self.out_proj(out)


class Block(nnx.Module):
    """One decoder layer."""

    def __init__(self, config: Config, mlp: str, *, rngs: nnx.Rngs):
        h, i, dtype = config.hidden, config.intermediate, jnp.dtype(config.dtype)
        self.attention_norm = nnx.RMSNorm(h, dtype=dtype, rngs=rngs)
        self.attention = Attention(h, config.heads, dtype=dtype, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(h, dtype=dtype, rngs=rngs)
        self.mlp = (
            SwiGLUMLP(h, i, dtype=dtype, implementation=config.implementation, rngs=rngs)
            if mlp == "swiglu"
            else PlainMLP(h, i, dtype=dtype, rngs=rngs)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = split_batch(x + self.attention(self.attention_norm(x)))
        return split_batch(x + self.mlp(self.mlp_norm(x)))


class LanguageModel(nnx.Module):
    """Byte tokens ``[batch, seq]`` to float32 logits ``[batch, seq, 256]``.

    Args:
      config: Sizes and dtypes.
      mlp: ``"swiglu"`` for the layer of jax_swiglu, ``"flax"`` for three Flax layers. Both
        make the same parameters from the same seed.
      rngs: Random streams of the parameters.
    """

    def __init__(self, config: Config, mlp: str = "swiglu", *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, mlp, rngs=rngs)

        self.embed = nnx.Embed(
            VOCAB,
            config.hidden,
            dtype=dtype,
            embedding_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        self.blocks = stack(rngs)
        self.norm = nnx.RMSNorm(config.hidden, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        x = self.norm(run(split_batch(self.embed(tokens)), self.blocks))
        return self.embed.attend(x).astype(jnp.float32)


def load_text() -> tuple[np.ndarray, np.ndarray]:
    """The training bytes and the held-out last tenth."""
    data = np.frombuffer("\n".join(topics.values()).encode(), np.uint8)
    n = len(data) * 9 // 10
    return data[:n], data[n:]


def in_batches(text: np.ndarray, config: Config) -> np.ndarray:
    """Cuts a text into ``[n, batch, seq + 1]``: rows of ``seq`` inputs and the byte that follows.

    Each byte but the first is predicted once; what does not fill a batch is left out.
    """
    starts = np.arange(0, len(text) - config.seq, config.seq)
    batch = min(config.batch, len(starts))
    starts = starts[: len(starts) // batch * batch].reshape(-1, batch, 1)
    return text[starts + np.arange(config.seq + 1)]


def bigram_loss(text: np.ndarray, held_out: np.ndarray, add: float = 0.1) -> float:
    """Loss on ``held_out``, in nats per byte, of an add-k smoothed bigram model of ``text``."""
    counts = np.full((VOCAB, VOCAB), add)
    np.add.at(counts, (text[:-1], text[1:]), 1)
    log_prob = np.log(counts / counts.sum(axis=1, keepdims=True))
    return float(-log_prob[held_out[..., :-1], held_out[..., 1:]].mean())


def loss_of(model: LanguageModel, rows: jax.Array) -> jax.Array:
    """Mean next-byte cross entropy, in nats, over rows ``[n, seq + 1]``."""
    rows = rows.astype(jnp.int32)
    logits = model(rows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW with warm-up and cosine decay, clipped; norms and embeddings do not decay."""
    warmup = max(1, config.steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        config.learning_rate,
        warmup,
        max(config.steps, warmup + 1),
        0.05 * config.learning_rate,
    )

    def decays(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "kernel" in jax.tree_util.keystr(path), params
        )

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=decays),
    )


class TrainState(NamedTuple):
    """What a step replaces, and donates."""

    params: Any
    opt_state: Any
    step: jax.Array


def init(config: Config, mlp: str = "swiglu") -> tuple[Any, TrainState]:
    """The structure of the model, and the state before the first step."""
    graphdef, params = nnx.split(LanguageModel(config, mlp, rngs=nnx.Rngs(config.seed)), nnx.Param)
    opt_state = make_optimizer(config).init(params)
    return graphdef, TrainState(params, opt_state, jnp.zeros((), jnp.int32))


def update(
    graphdef: Any, config: Config, state: TrainState, rows: jax.Array
) -> tuple[TrainState, jax.Array]:
    """One step on rows ``[batch, seq + 1]``: the next state, and the loss before it."""
    loss, grads = jax.value_and_grad(lambda params: loss_of(nnx.merge(graphdef, params), rows))(
        state.params
    )
    updates, opt_state = make_optimizer(config).update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(params, opt_state, state.step + 1), loss


@dataclass(frozen=True)
class Run:
    """A trained model and how it got there.

    Attributes:
      graphdef: The model's structure, for ``nnx.merge(graphdef, params)``.
      params: The trained parameters.
      losses: Training loss of every step.
      held_out: Steps and the held-out loss after each.
      tokens_per_s: Median training speed.
    """

    graphdef: Any
    params: Any
    losses: np.ndarray
    held_out: dict[int, float]
    tokens_per_s: float


def train(config: Config, mlp: str, text: np.ndarray, held_out: np.ndarray) -> Run:
    """Trains one model.

    Args:
      config: Sizes and schedule. The seed fixes the parameters and the order of the data.
      mlp: ``"swiglu"`` or ``"flax"``.
      text: Training bytes.
      held_out: Held-out bytes ``[n, batch, seq + 1]``.

    Returns:
      The trained model with its curves.
    """
    graphdef, state = init(config, mlp)
    key = jax.random.key(config.seed)
    data = jnp.asarray(text)
    batches = jnp.asarray(held_out)

    def step(state: TrainState, data: jax.Array) -> tuple[TrainState, jax.Array]:
        starts = jax.random.randint(
            jax.random.fold_in(key, state.step), (config.batch,), 0, len(data) - config.seq
        )
        rows = data[starts[:, None] + jnp.arange(config.seq + 1)]
        return update(graphdef, config, state, rows)

    def evaluate(params: Any, rows: jax.Array) -> jax.Array:
        return loss_of(nnx.merge(graphdef, params), rows)

    # Compiled ahead of the loop: the bar times steps only, and nothing can recompile in it.
    start = time.perf_counter()
    run_step = jax.jit(step, donate_argnums=0).lower(state, data).compile()
    run_evaluate = jax.jit(evaluate).lower(state.params, batches[0]).compile()
    print(f"{mlp}: compiled in {time.perf_counter() - start:.1f} s", flush=True)

    # By itself, since on a GPU it may wait for cuDNN's plans to be timed.
    start = time.perf_counter()
    state, loss = run_step(state, data)
    losses = [loss.block_until_ready()]
    print(f"{mlp}: first step took {time.perf_counter() - start:.1f} s", flush=True)

    every = max(1, config.steps // 50)  # reading a loss waits for the device: not each step
    evaluate_at = {round(config.steps * quarter / 4) for quarter in (1, 2, 3, 4)}
    held_out_losses, rates = {}, []
    with tqdm(
        total=config.steps,
        initial=1,
        desc=mlp,
        mininterval=0.1 if sys.stderr.isatty() else 10,
        bar_format="{desc} {percentage:3.0f}%|{bar:20}| {n}/{total} steps, {elapsed} elapsed, "
        "{remaining} left{postfix}",
    ) as bar:
        start = time.perf_counter()
        for i in range(2, config.steps + 1):
            state, loss = run_step(state, data)
            losses.append(loss)
            since = i - bar.n
            if i % every == 0 or i in evaluate_at:
                shown = float(loss)
                rates.append(since * config.batch * config.seq / (time.perf_counter() - start))
                bar.set_postfix_str(f"loss {shown:.3f}, {rates[-1]:,.0f} tokens/s", refresh=False)
                bar.update(since)
                start = time.perf_counter()
            if i in evaluate_at:
                held_out_losses[i] = float(
                    np.mean([run_evaluate(state.params, rows) for rows in batches])
                )
                start = time.perf_counter()
    return Run(
        graphdef,
        state.params,
        np.asarray(jax.device_get(losses)),
        held_out_losses,
        float(np.median(rates)),
    )


def generate(run: Run, config: Config, prompt: bytes, length: int, temperature: float = 0.8) -> str:
    """Continues ``prompt`` by ``length`` sampled bytes.

    Every byte is a whole forward over the last ``seq`` bytes: slow, but there is no cache to
    keep and one shape to compile.
    """
    tokens = jnp.zeros(max(len(prompt) + length, config.seq), jnp.int32)
    tokens = tokens.at[: len(prompt)].set(jnp.asarray(list(prompt)))

    @partial(jax.jit, donate_argnums=1)
    def extend(params: Any, tokens: jax.Array, i: jax.Array) -> jax.Array:
        # Zeros behind position i are in the window too; the causal mask hides them.
        start = jnp.maximum(i - config.seq, 0)
        window = jax.lax.dynamic_slice(tokens, (start,), (config.seq,))
        logits = nnx.merge(run.graphdef, params)(window[None])[0, i - 1 - start]
        key = jax.random.fold_in(jax.random.key(config.seed), i)
        return tokens.at[i].set(jax.random.categorical(key, logits / temperature))

    end = len(prompt) + length
    for i in range(len(prompt), end):
        tokens = extend(run.params, tokens, jnp.asarray(i))
    return bytes(np.asarray(tokens[:end], np.uint8)).decode(errors="replace")


def plot(runs: dict[str, Run], bigram: float, path: Path) -> None:
    """Writes the loss curves as a PNG."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for (name, run), style in zip(runs.items(), ("-", "--"), strict=False):
        steps = np.arange(1, len(run.losses) + 1)
        (line,) = axes.plot(steps, run.losses, style, lw=1, alpha=0.7, label=f"{name}, training")
        axes.plot(
            list(run.held_out),
            list(run.held_out.values()),
            style,
            marker="o",
            color=line.get_color(),
            label=f"{name}, held out",
        )
    axes.axhline(bigram, color="gray", ls=":", label="bigram, held out")
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def describe(config: Config, mlps: Sequence[str]) -> str:
    """Says what runs where: device, dtypes, sizes, and the implementation of the MLP."""
    device = jax.devices()[0]
    h, i, dtype = config.hidden, config.intermediate, jnp.dtype(config.dtype)
    lines = [
        f"device: {device.device_kind} ({device.platform}), jax {jax.__version__}",
        f"dtype: computes in {dtype}, parameters and optimizer in float32",
        f"model: {config.layers} layers, hidden {h}, intermediate {i}, {config.heads} heads",
        f"training: {config.steps} steps of {config.batch} x {config.seq} bytes",
        f"MLP: {', '.join(mlps)}",
    ]
    if "swiglu" in mlps:
        x = jax.ShapeDtypeStruct((config.batch, config.seq, h), dtype)
        w = jax.ShapeDtypeStruct((h, i), jnp.float32)
        w_down = jax.ShapeDtypeStruct((i, h), jnp.float32)
        lines.append(
            str(
                jax_swiglu.explain(
                    x, w, w, w_down, dtype=dtype, implementation=config.implementation
                )
            )
        )
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The fields of ``Config``, with the defaults of the device."""
    preset = PRESETS["cpu" if jax.default_backend() == "cpu" else "gpu"]
    for name, meaning in {
        "hidden": "width of the residual stream",
        "intermediate": "width of the MLP",
        "layers": "decoder layers",
        "heads": "attention heads",
        "seq": "bytes of context",
        "batch": "rows per step",
        "steps": "training steps",
        "learning_rate": "peak of the schedule",
        "seed": "of the parameters, the order of the data and the sample",
    }.items():
        default = getattr(preset, name)
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default, help=meaning)
    parser.add_argument(
        "--dtype", choices=list(EARLY_TOLERANCE), default=preset.dtype, help="computation dtype"
    )
    parser.add_argument(
        "--implementation",
        choices=["cudnn", "xla", "host"],
        help="of swiglu_mlp; left out, the default of the device",
    )


def config_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Config:
    if args.steps < 2:
        parser.error("--steps must be at least 2")
    if args.hidden % (2 * args.heads):
        parser.error("--hidden must be a multiple of twice --heads: rotary positions need pairs")
    return Config(**{f.name: getattr(args, f.name) for f in fields(Config)})


def parse_args(argv: Sequence[str] | None) -> tuple[Config, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        description="Train a small byte-level language model with the SwiGLU layer of jax_swiglu.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_options(parser)
    parser.add_argument(
        "--mlp",
        choices=["swiglu", "flax", "both"],
        default="swiglu",
        help="whose MLP; both: train twice and compare the curves",
    )
    parser.add_argument("--sample", type=int, default=400, help="bytes to generate")
    parser.add_argument("--out", type=Path, default=Path("train_lm_out"), help="folder of the PNG")
    args = parser.parse_args(argv)
    return config_of(parser, args), args


def compare(names: str, ours: np.ndarray, theirs: np.ndarray, config: Config) -> tuple[bool, str]:
    """Whether two loss curves that only rounding may tell apart agree, and a statement of it."""
    gap = np.abs(ours - theirs)
    early, tolerance = gap[: max(10, config.steps // 10)], EARLY_TOLERANCE[config.dtype]
    return bool(early.max() <= tolerance and gap.mean() <= MEAN_TOLERANCE), (
        f"loss curves of {names}, nats per byte apart: at most {early.max():.2g} in "
        f"the first {len(early)} steps (allowed: {tolerance}), {gap.mean():.2g} on average "
        f"(allowed: {MEAN_TOLERANCE}), at most {gap.max():.2g} (step {gap.argmax() + 1})"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example; returns 0 if every check it prints passed."""
    config, args = parse_args(argv)
    mlps = ["swiglu", "flax"] if args.mlp == "both" else [args.mlp]
    print(describe(config, mlps), flush=True)
    text, rest = load_text()
    held_out = in_batches(rest, config)
    bigram = bigram_loss(text, held_out)
    print(f"data: {len(text):,} bytes to train on, {len(rest):,} held out", flush=True)

    runs = {mlp: train(config, mlp, text, held_out) for mlp in mlps}

    passed = []

    def check(ok: bool, statement: str) -> None:
        passed.append(ok)
        print(f"{'PASS' if ok else 'FAIL'}: {statement}")

    print()
    for name, run in runs.items():
        print(f"{name}: {run.tokens_per_s:,.0f} tokens/s")
        loss = run.held_out[config.steps]
        check(
            loss < bigram - BIGRAM_MARGIN,
            f"{name}: held-out loss {loss:.3f} nats per byte, bigram model {bigram:.3f}, "
            f"asked for: at least {BIGRAM_MARGIN} below",
        )
    if args.mlp == "both":
        check(*compare("swiglu and flax", runs["swiglu"].losses, runs["flax"].losses, config))

    path = args.out / "loss.png"
    plot(runs, bigram, path)
    print(f"\nloss curves: {path}\nsample:\n")
    print(generate(runs[mlps[0]], config, b"The ", args.sample))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
