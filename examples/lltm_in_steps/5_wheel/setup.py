"""Step 5, a wheel: adds a package that pip builds, with the op of step 4 and the kernel of step 3.

    pip wheel --no-build-isolation --no-deps .    # where torch, setuptools, wheel and ninja are installed

The mistakes that people make here:
    ImportError: libc10.so: cannot open shared object file   (formerly: undefined symbol: THPVariableClass)
Cause: the module was imported before torch, whose libraries it needs. Cure: __init__.py imports torch first.
    ModuleNotFoundError: No module named 'torch', or later ImportError: ... undefined symbol: _ZN3c10...
Cause: without --no-build-isolation pip builds without torch, or, if pyproject.toml lists it, with the newest.
    ImportError: cannot import name '_C'
Cause: Python found this folder instead of the installed package. Cure: leave the folder.
    IndexError: list index out of range
Cause: no GPU says what to compile for. Cure: name the architectures, as TORCH_CUDA_ARCH_LIST="8.0;9.0".
"""

import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

# Not torch.cuda.is_available(): a machine that builds wheels often has no GPU.
with_cuda = torch.version.cuda is not None and CUDA_HOME is not None
cpu = {"name": "lltm_wheel._C", "sources": ["csrc/lltm.cpp"]}
# lltm_kernel.cu and not lltm.cu: setuptools would make lltm.o of both files.
cuda = {**cpu, "sources": [*cpu["sources"], "csrc/lltm_kernel.cu"], "define_macros": [("WITH_CUDA", None)]}

setup(
    name="lltm_wheel",
    version="1.0",
    packages=["lltm_wheel"],
    ext_modules=[CUDAExtension(**cuda) if with_cuda else CppExtension(**cpu)],
    cmdclass={"build_ext": BuildExtension},
    install_requires=["torch"],
)
