"""Prints, as CMake variables, the CUDA compiler and options of setup.py; cuda.cmake runs it.

    python cmake/toolchain.py <folder of torch> <CMAKE_CUDA_COMPILER> <CMAKE_CUDA_ARCHITECTURES>

The last two are the user's choice, or empty.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import lltm_ext_cli

lltm_ext_cli.find_package()
from lltm_ext._install import toolchain  # noqa: E402


def torch_cuda(folder: Path) -> str:
    """The CUDA version that the torch in `folder` was built with: '13.0'."""
    if (folder / "version.py").is_file():  # a Python package
        return runpy.run_path(str(folder / "version.py"))["cuda"]
    cu = re.search(r"\+cu(\d+)(\d)", (folder / "build-version").read_text())  # a libtorch archive
    assert cu, f"{folder} names no CUDA version"
    return f"{cu[1]}.{cu[2]}"


def to_torch(listed: str) -> str:
    """'9.0+PTX' of CMake's '90', '9.0' of '90-real'; what is neither ('native') stays as it is."""
    found = re.fullmatch(r"(\d+)(\d[af]?)(-real)?", listed)
    return f"{found[1]}.{found[2]}" + ("" if found[3] else "+PTX") if found else listed


def to_cmake(listed: str) -> str:
    found = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", listed)
    return found[1] + found[2] + ("" if found[3] else "-real") if found else listed


def main(folder: str, compiler: str, chosen: str) -> None:
    if compiler:
        nvcc = Path(compiler)
    else:  # PyPI's is next to PyPI's torch
        path = [str(Path(folder).parent), *sys.path]
        nvcc = toolchain.find_cuda(torch_cuda(Path(folder)), sys_path=path).nvcc
    listed = map(to_torch, chosen.split(";")) if chosen else toolchain.architectures(nvcc)
    compiled = dict.fromkeys(map(to_cmake, toolchain.compiled_for(list(listed))))
    # Into the cache: what was chosen stays when CMake runs again.
    print(f'set(CMAKE_CUDA_COMPILER "{nvcc}" CACHE FILEPATH "" FORCE)')
    print(f'set(CMAKE_CUDA_ARCHITECTURES "{";".join(compiled)}" CACHE STRING "" FORCE)')
    print(f'set(smallest_code "{";".join(toolchain.smallest_code(nvcc))}")')


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except toolchain.ToolchainError as error:
        raise SystemExit(f"lltm_ext: {error}") from error
