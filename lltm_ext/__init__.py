"""PyTorch CUDA extensions: the LLTM recurrent layer, sigmoid, relu, straight-through round and GEMM."""

import torch

from lltm_ext._record import check as _check

_check(torch)  # before any module is loaded: a torch that does not fit gives a readable ImportError

from lltm_ext._version import __version__  # noqa: E402
from lltm_ext.gemm import GemmFunction, gemm  # noqa: E402
from lltm_ext.lltm import LLTM, LLTMCell, LLTMFunction, lltm, lltm_cell  # noqa: E402
from lltm_ext.relu import ReLU, ReLUFunction, relu  # noqa: E402
from lltm_ext.round import BinarizeFunction, Round, RoundFunction, binarize, round  # noqa: E402
from lltm_ext.sigmoid import Sigmoid, SigmoidFunction, sigmoid  # noqa: E402

__all__ = [
    "LLTM",
    "BinarizeFunction",
    "GemmFunction",
    "LLTMCell",
    "LLTMFunction",
    "ReLU",
    "ReLUFunction",
    "Round",
    "RoundFunction",
    "Sigmoid",
    "SigmoidFunction",
    "__version__",
    "binarize",
    "gemm",
    "lltm",
    "lltm_cell",
    "relu",
    "round",
    "sigmoid",
]
