"""Builds the wheel; lltm_ext/_build.py says how the modules in it are compiled.

All that does not depend on torch stands in pyproject.toml.
"""

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import setuptools
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import PlatformError

if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit('setuptools is older than 77. Run: python -m pip install --upgrade "setuptools<82"')

ROOT = Path(__file__).resolve().parent
SRC = Path("src")  # relative, as an sdist's list of files wants it

# A package of its path alone: lltm_ext/__init__.py loads the modules, which are yet to be built.
package = sys.modules["lltm_ext"] = types.ModuleType("lltm_ext")
package.__path__ = [str(ROOT / "lltm_ext")]
from lltm_ext import _build, _build_portable, _toolchain  # noqa: E402
from lltm_ext._version import __version__ as VERSION  # noqa: E402


def without_modules(why):
    """The arguments of setup() for an sdist or metadata, without modules. Asked for one, it says why not."""

    class Refuse(build_ext):
        def run(self):
            raise PlatformError(f"lltm_ext: {why}")

    return {
        "version": VERSION,
        "install_requires": ["torch>=2.11"],
        "ext_modules": [
            setuptools.Extension(f"lltm_ext._C.{op}", _build.sources(SRC, op, cuda=False))
            for op in _build.ops(SRC)
        ],
        "cmdclass": {"build_ext": Refuse},
    }


def arguments():
    if "sdist" in sys.argv:
        return without_modules("an sdist is for no torch in particular. Run: python setup.py bdist_wheel")
    try:
        import torch
    except ImportError as error:
        needed = 'torch ninja "cuda-toolkit[nvcc,crt,nvvm,cccl]"'
        return without_modules(f"the build needs torch ({error}). Run: python -m pip install {needed}")
    portable = os.environ.get("LLTM_EXT_PORTABLE") == "1"
    try:
        return (_build_portable if portable else _build).against(torch, SRC)
    except _toolchain.ToolchainError as error:
        return without_modules(str(error))


class Build(build):
    def run(self):
        # What an earlier call left, a module of an op since removed, must not get into the wheel.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        # For a build at run time. An editable install has them where they are.
        shutil.copytree(SRC, Path(self.build_lib, "lltm_ext/_src"))


class Develop(setuptools.Command):
    """`setup.py develop` against the torch that is installed: setuptools >= 80 itself builds in isolation."""

    user_options = []
    initialize_options = finalize_options = lambda self: None

    def run(self):
        pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "-e", str(ROOT)]
        subprocess.run(pip, check=True)


chosen = arguments()
chosen["cmdclass"].update(build=Build, develop=Develop)
setuptools.setup(
    # Named: discovery would take src/ for a src-layout.
    packages=["lltm_ext", "lltm_ext._C", "lltm_ext.benchmarks"],
    package_dir={"lltm_ext.benchmarks": "benchmarks"},  # for `python -m lltm_ext bench`
    package_data={"lltm_ext": ["py.typed"], "lltm_ext._C": ["*.pyi"]},
    include_package_data=False,
    **chosen,
)
