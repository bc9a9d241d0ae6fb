"""Plans that one process chose are built by the next one, without tuning."""

import json
import sys

import pytest

STEP = """
import json, jax, jax.numpy as jnp, numpy as np, jax_swiglu as js
from jax_swiglu import _ffi

keys = jax.random.split(jax.random.key(0), 5)
shapes = ((72, 256), (256, 512), (256, 512), (512, 256), (72, 256))
args = [jax.random.normal(k, s, jnp.bfloat16) / 16 for k, s in zip(keys, shapes)]

def step(*args):
    out, pullback = jax.vjp(js.swiglu_mlp, *args[:-1])
    return (out, *pullback(args[-1]))

values = [np.asarray(v, np.float32) for v in jax.jit(step)(*args)]
plans = {p["problem"]: [p["source"], p["route"], p["engines"]] for p in _ffi.prepared()}
print(json.dumps({"plans": plans, "sums": [float(abs(v).sum()) for v in values]}))
"""


@pytest.fixture
def run_step(run_python, tmp_path):
    def run():
        environment = {
            **run_python.keywords["env"],
            "JAX_SWIGLU_CACHE_DIR": str(tmp_path),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # room for tuning beside this process
        }
        for name in ("JAX_PLATFORMS", "JAX_SWIGLU_TUNING"):
            environment.pop(name, None)
        result = run_python([sys.executable, "-c", STEP], env=environment)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout), result.stderr

    return run


def test_kept_and_built_again(run_step, tmp_path):
    first, _ = run_step()
    assert {source for source, *_ in first["plans"].values()} == {"tuned"}
    files = sorted(tmp_path.glob("*/*/*.json"))
    assert len(files) == len(first["plans"])

    second, errors = run_step()
    assert {problem: plan[1:] for problem, plan in second["plans"].items()} == {
        problem: plan[1:] for problem, plan in first["plans"].items()
    }
    assert {source for source, *_ in second["plans"].values()} == {"disk"}
    assert second["sums"] == pytest.approx(first["sums"], rel=1e-2)
    assert "choosing" not in errors

    # An engine that cuDNN does not have: chosen anew, and the file replaced.
    damaged = files[0].read_text()
    table = json.loads(damaged)
    (plan,) = table["plans"].values()
    plan["engines"] = ["eng999_k24=1"] * len(plan["engines"])
    files[0].write_text(json.dumps(table))
    third, _ = run_step()
    sources = [source for source, *_ in third["plans"].values()]
    assert sorted(sources) == sorted(["tuned"] + ["disk"] * (len(sources) - 1))
    assert "eng999" not in files[0].read_text()
