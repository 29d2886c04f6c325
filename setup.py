"""Builds the wheel. lltm_ext/_install compiles its modules; pyproject.toml has what no torch changes."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import PlatformError

if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit('setuptools is older than 77. Run: python -m pip install --upgrade "setuptools<82"')

ROOT = Path(__file__).resolve().parent
SRC = Path("src")  # the file list of an sdist requires relative paths

sys.path.insert(0, str(ROOT))
import lltm_ext_cli  # noqa: E402

lltm_ext_cli.find_package()  # its __init__ loads the modules, which are yet to be built
from lltm_ext import _version  # noqa: E402
from lltm_ext._install import build_native, build_portable, toolchain  # noqa: E402


def without_modules(why):
    """The arguments of setup() for an sdist or metadata. A build of modules fails and says why."""

    class Refuse(build_ext):
        def run(self):
            raise PlatformError(f"lltm_ext: {why}")

    return {
        "version": _version.__version__,
        "install_requires": ["torch>=2.11"],
        "ext_modules": [setuptools.Extension("lltm_ext._C", [])],
        "cmdclass": {"build_ext": Refuse},
    }


def arguments():
    if "sdist" in sys.argv:
        return without_modules("an sdist is built for no torch. Run: python setup.py bdist_wheel")
    try:
        import torch
    except ImportError as error:
        needed = f'torch ninja "{_version.TOOLKIT}"'
        return without_modules(f"the build needs torch ({error}). Run: python -m pip install {needed}")
    portable = os.environ.get("LLTM_EXT_PORTABLE") == "1"
    try:
        return (build_portable if portable else build_native).against(torch, SRC)
    except toolchain.ToolchainError as error:
        return without_modules(str(error))


class Build(build):
    def run(self):
        # A module of a removed op, left by an earlier build, must not get into the wheel.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        # JIT builds need the sources. An editable install has them in place.
        shutil.copytree(SRC, Path(self.build_lib, "lltm_ext/_src"))
        if sysconfig.get_platform().endswith(os.uname().machine):  # a cross-build can not be tried
            try:
                build_native.try_modules(os.path.abspath(self.build_lib))
            except toolchain.ToolchainError as error:
                raise PlatformError(f"lltm_ext: {error}") from error


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
    # They are named because discovery would take src/ for a src-layout.
    packages=["lltm_ext", "lltm_ext._C", "lltm_ext._formula", "lltm_ext._install", "lltm_ext.benchmarks"],
    package_dir={"lltm_ext.benchmarks": "benchmarks"},  # `python -m lltm_ext bench` runs them
    package_data={"lltm_ext": ["py.typed"], "lltm_ext._C": ["*.pyi"]},
    py_modules=["lltm_ext_cli"],
    include_package_data=False,
    **chosen,
)
