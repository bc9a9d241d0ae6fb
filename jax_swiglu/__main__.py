"""`python -m jax_swiglu`: versions, devices, the cuDNN found, and what would run."""

import importlib.metadata
import platform

import jax
import numpy as np

import jax_swiglu
from jax_swiglu import _load


def main() -> None:
    """Prints the report."""
    print(f"jax_swiglu {jax_swiglu.__version__}, Python {platform.python_version()}")
    packages = ("jax", "jaxlib", "numpy")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages))
    for device in jax.devices():
        capability = getattr(device, "compute_capability", None)
        suffix = f", compute capability {capability}" if capability else ""
        print(f"device {device.id}: {device.device_kind}{suffix}")
    status = _load.cudnn_status()
    print(f"cuDNN: {'usable' if status.usable else 'not usable'}: {status.reason}")
    for dtype in (jax.numpy.bfloat16, np.float16, np.float32):
        x, w = jax.ShapeDtypeStruct((16, 64), dtype), jax.ShapeDtypeStruct((64, 64), dtype)
        print(jax_swiglu.explain(x, w, w, w).summary())


if __name__ == "__main__":
    main()
