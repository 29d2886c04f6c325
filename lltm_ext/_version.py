"""The version of this project, and what builds and wheels derive from the versions of torch and CUDA."""

from __future__ import annotations

__version__ = "0.3.0"

# PyPI has CUDA's compiler under this name. Installed next to torch, it is that of torch's CUDA version.
TOOLKIT = "cuda-toolkit[nvcc,crt,nvvm,cccl]"


def major(version: str) -> str:
    """'13' of '13.0'."""
    return version.split(".")[0]


def minor(version: str) -> str:
    """'2.11' of '2.11.0+cu130'."""
    return ".".join(version.split(".")[:2])


def number(version: str) -> tuple[int, ...]:
    """(2, 11) of '2.11', for comparisons."""
    return tuple(map(int, version.split(".")))


def label(torch: str, cuda: str | None) -> str:
    """The local version of a wheel: 'cu130torch2.11', or 'cpu'."""
    return f"cu{cuda.replace('.', '')}torch{minor(torch)}" if cuda else "cpu"
