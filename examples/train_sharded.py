"""Trains the language model of train_lm.py on a mesh of devices.

    python examples/train_sharded.py --mesh data=2,fsdp=2,tensor=2 --check

The batch is split over ``data`` and ``fsdp``, the weights over ``fsdp`` (gathered when used) and
``tensor`` (heads, the MLP's intermediate size). Without a GPU there are eight CPU devices.
Several processes, on one host or many, make one mesh of all their devices:

    for i in 0 1; do
      python examples/train_sharded.py --mesh data=2,fsdp=2,tensor=2 --cpu-devices 4 \\
        --coordinator localhost:12345 --num-processes 2 --process-id $i &
    done; wait

Where JAX can find the other processes itself (Slurm, Open MPI, Kubernetes), ``--distributed`` is
all it takes. ``--check`` trains on one device too: the losses must be the same.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import train_lm
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from train_lm import Config

AXES = ("data", "fsdp", "tensor")
ROWS = P(train_lm.BATCH_AXES)
# How the parameters of each layer are split. Those of the blocks are stacked: one more dimension
# in front, which is not split. What is not named here, like the scales of norms, is whole.
SPLIT = {
    "embed": P(("tensor", "fsdp"), None),
    "qkv_proj": P("fsdp", None, "tensor", None),
    "out_proj": P("tensor", None, "fsdp"),
    "gate_proj": P("fsdp", "tensor"),
    "up_proj": P("fsdp", "tensor"),
    "down_proj": P("tensor", "fsdp"),
}


def spec_of(path: Any, leaf: Any) -> P:
    """How a parameter, or a moment of the optimizer, which has the same path, is split."""
    names = {getattr(key, "key", None) for key in path}
    for name, spec in SPLIT.items():
        if name in names:
            return P(*[None] * (leaf.ndim - len(spec)), *spec)
    return P()


def rows_of_step(text: np.ndarray, config: Config, step: int, mesh: Mesh) -> jax.Array:
    """Random rows ``[batch, seq + 1]``; each process reads those of its own devices only."""
    rng = np.random.default_rng((config.seed, step))  # the same in all processes
    starts = rng.integers(len(text) - config.seq, size=config.batch)

    def part(index: tuple[slice, slice]) -> np.ndarray:
        return text[starts[index[0], None] + np.arange(config.seq + 1)[index[1]]]

    shape = (config.batch, config.seq + 1)
    return jax.make_array_from_callback(shape, NamedSharding(mesh, ROWS), part)


def train(
    config: Config, mesh: Mesh, text: np.ndarray, say: Callable[[str], None]
) -> tuple[np.ndarray, float]:
    """Trains on a mesh; returns the loss of every step, and the median tokens per second."""
    graphdef, shapes = jax.eval_shape(lambda: train_lm.init(config))
    shardings = jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, spec_of(path, leaf)), shapes
    )
    say(describe_parts(shapes.params, shardings.params))
    # Each device makes its own parts: nothing is ever whole on one of them.
    state = jax.jit(lambda: train_lm.init(config)[1], out_shardings=shardings)()
    update = jax.jit(
        partial(train_lm.update, graphdef, config),
        donate_argnums=0,
        out_shardings=(shardings, NamedSharding(mesh, P())),
    )
    losses, rates = [], []
    for step in range(1, config.steps + 1):
        start = time.perf_counter()
        state, loss = update(state, rows_of_step(text, config, step, mesh))
        losses.append(float(loss))
        rates.append(config.batch * config.seq / (time.perf_counter() - start))
        say(f"step {step}: loss {losses[-1]:.6f}, {rates[-1]:,.0f} tokens/s")
    return np.array(losses), float(np.median(rates[1:]))


def describe_parts(params: Any, shardings: Any) -> str:
    """One line for each parameter: its shape, how it is split, and the shape on each device."""
    lines = ["parameters:"]
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        part = sharding.shard_shape(leaf.shape)
        lines.append(f"  {name:32} {leaf.shape!s:20} {tuple(sharding.spec)!s:38} {part}")
    return "\n".join(lines)


def start_jax(args: argparse.Namespace) -> None:
    """Says how many CPU devices there are and meets the other processes: both come first."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    if args.distributed or args.coordinator:
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)


def parse_mesh(text: str) -> dict[str, int]:
    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in sizes or not size.isdecimal() or int(size) == 0:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not an axis of {', '.join(AXES)} and its size, as in fsdp=2"
            )
        sizes[axis] = int(size)
    return sizes


def parse_args(argv: Sequence[str] | None) -> tuple[Config, argparse.Namespace]:
    """Starts JAX on the way: the defaults depend on the devices."""
    launch = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    launch.add_argument("--cpu-devices", type=int, default=8, help="of each process without a GPU")
    launch.add_argument("--coordinator", help="host:port of process 0")
    launch.add_argument("--num-processes", type=int)
    launch.add_argument("--process-id", type=int)
    launch.add_argument(
        "--distributed", action="store_true", help="let JAX find the other processes"
    )
    start_jax(launch.parse_known_args(argv)[0])

    parser = argparse.ArgumentParser(
        description="Train the language model of train_lm.py on a mesh of devices.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        parents=[launch],
    )
    parser.add_argument(
        "--mesh",
        type=parse_mesh,
        default=f"fsdp={jax.device_count()}",
        help=f"sizes of the axes {', '.join(AXES)}, 1 where left out",
    )
    parser.add_argument(
        "--check", action="store_true", help="train on one device too, and compare the losses"
    )
    train_lm.add_options(parser)
    args = parser.parse_args(argv)
    config = train_lm.config_of(parser, args)
    if math.prod(args.mesh.values()) != jax.device_count():
        parser.error(f"--mesh must have as many devices as there are: {jax.device_count()}")
    data, fsdp, tensor = args.mesh.values()
    for name, size, parts in (
        ("--batch", config.batch, data * fsdp),
        ("--hidden", config.hidden, fsdp),
        ("--heads", config.heads, tensor),
        ("--intermediate", config.intermediate, tensor),
        ("the vocabulary", train_lm.VOCAB, tensor * fsdp),
    ):
        if size % parts:
            parser.error(f"{name} is split in {parts} by the mesh, which does not divide {size}")
    return config, args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example; returns 0 if the losses are those of one device, or were not compared."""
    config, args = parse_args(argv)
    first = jax.process_index() == 0

    def say(line: str) -> None:
        if first:
            print(line, flush=True)

    auto = (AxisType.Auto,) * len(AXES)
    mesh = jax.make_mesh(tuple(args.mesh.values()), AXES, axis_types=auto)
    say(train_lm.describe(config, ["swiglu"]))
    say(f"mesh: {dict(mesh.shape)}, {jax.process_count()} processes")
    text, _ = train_lm.load_text()
    with jax.set_mesh(mesh):
        losses, rate = train(config, mesh, text, say)
    say(f"{rate:,.0f} tokens/s; loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    if not (args.check and first):
        return 0
    # Nothing of this needs the other processes.
    single = Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1, 1), AXES, axis_types=auto)
    say("the same on one device:")
    with jax.set_mesh(single):
        alone, _ = train(config, single, text, say)
    agree, statement = train_lm.compare("the mesh and one device", losses, alone, config)
    say(f"{'PASS' if agree else 'FAIL'}: {statement}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
