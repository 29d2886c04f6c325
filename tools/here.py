"""Prints the variable that makes a build for this machine: for its GPUs, or without one the CPU modules only.

Where the user has set one of the variables, it prints nothing. `make demo` and `make test` build so, because
kernels for all GPUs take ten minutes.
"""

import os

import torch

if not {"LLTM_EXT_CUDA", "TORCH_CUDA_ARCH_LIST"} & os.environ.keys():
    capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    listed = ";".join(f"{major}.{minor}" for major, minor in sorted(capabilities))
    print(f"TORCH_CUDA_ARCH_LIST={listed}" if listed else "LLTM_EXT_CUDA=0")
