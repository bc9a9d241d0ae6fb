"""Python in processes of its own, each with a log."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def start(
    command: Sequence[str], log: Path, cwd: Path, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts Python, which finds what this process does; `env` is added to the environment.

    Where the package is installed, that is what it finds.
    """
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=cwd,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(ROOT)]),
                **env,
            },
        )
