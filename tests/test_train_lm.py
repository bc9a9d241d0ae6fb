"""The example trains: its parts give right values, and a few steps with either MLP agree."""

import dataclasses
import importlib.util
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def train_lm():
    spec = importlib.util.spec_from_file_location("train_lm", ROOT / "examples/train_lm.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_lm"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_lm"]


@pytest.fixture
def config(train_lm):
    return dataclasses.replace(
        train_lm.PRESETS["cpu"], hidden=16, intermediate=24, layers=2, heads=2, seq=16, batch=2
    )


def test_bigram_loss(train_lm):
    # After "a" the text has "a" once and "b" once; after "b" nothing.
    text = np.frombuffer(b"aab", np.uint8)
    k = 0.5
    seen, unseen = (1 + k) / (2 + 256 * k), 1 / 256
    rows = np.frombuffer(b"abc", np.uint8)[None]
    want = -(math.log(seen) + math.log(unseen)) / 2
    assert train_lm.bigram_loss(text, rows, add=k) == pytest.approx(want)


def test_batches_predict_each_byte_once(train_lm, config):
    text = np.arange(101, dtype=np.uint8)
    rows = train_lm.in_batches(text, config)
    assert rows.shape == (3, 2, 17)
    np.testing.assert_array_equal(rows[..., 1:].ravel(), np.arange(1, 97))
    np.testing.assert_array_equal(rows[..., :-1].ravel(), np.arange(96))
    # A text of fewer rows than a batch is one smaller batch.
    assert train_lm.in_batches(text[:17], config).shape == (1, 1, 17)


def test_both_models_have_the_same_parameters(train_lm, config):
    ours, plain = (
        nnx.to_pure_dict(nnx.state(train_lm.LanguageModel(config, mlp, rngs=nnx.Rngs(0))))
        for mlp in ("swiglu", "flax")
    )
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    jax.tree.map(np.testing.assert_array_equal, ours, plain)
    assert ours["blocks"]["mlp"]["gate_proj"]["kernel"].shape == (2, 16, 24)


def test_model_is_causal(train_lm, config):
    model = train_lm.LanguageModel(config, rngs=nnx.Rngs(0))
    tokens = jnp.arange(16)[None]
    logits, changed = model(tokens), model(tokens.at[0, 9].set(200))
    assert logits.shape == (1, 16, 256)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits[:, :9], changed[:, :9], atol=1e-6)
    assert jnp.all(jnp.any(logits[:, 9:] != changed[:, 9:], axis=-1))


def test_main_trains_both_models(train_lm, tmp_path, capsys):
    # On the CPU "host" is the implementation whose calls are those of the GPU.
    argv = "--hidden=32 --intermediate=48 --layers=2 --heads=2 --seq=16 --batch=4 --steps=8"
    argv += f" --sample=5 --mlp=both --dtype=bfloat16 --implementation=host --out={tmp_path}"
    # Eight steps do not beat the bigram model, and the exit status says so.
    assert train_lm.main(argv.split()) == 1
    out = capsys.readouterr().out
    assert out.startswith("device: ")
    assert "computes in bfloat16" in out
    assert "FAIL: swiglu: held-out loss" in out
    assert "PASS: loss curves of swiglu and flax" in out
    assert (tmp_path / "loss.png").stat().st_size > 0


def test_training_lowers_the_loss_and_generates(train_lm, config):
    config = dataclasses.replace(config, steps=200, learning_rate=1e-2)
    text = np.frombuffer(b"abcd" * 50, np.uint8)
    run = train_lm.train(config, "swiglu", text, train_lm.in_batches(text, config))
    assert run.losses.shape == (200,)
    assert list(run.held_out) == [50, 100, 150, 200]
    assert run.held_out[200] < 0.5 < math.log(256) - 1 < run.losses[0]
    # Longer than the window, so that it slides.
    assert train_lm.generate(run, config, b"ab", 30, temperature=0.1) == "abcd" * 8
