"""Python in processes of its own, each with a log."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def start(
    command: Sequence[str], log: Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts Python, which finds what this process does; `env` is added to the environment."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=cwd,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
                **(env or {}),
            },
        )
