"""PyTorch CUDA extensions: the LLTM and LSTM layers, sigmoid, relu, straight-through round and GEMM."""

import torch

from lltm_ext._record import check as _check

# Before any module is loaded: a torch that does not fit gives a readable ImportError.
__version__: str = _check(torch)["version"]

from lltm_ext.gemm import GemmFunction, Linear, gemm
from lltm_ext.lltm import LLTM, LLTMCell, LLTMFunction, lltm, lltm_algorithm, lltm_cell
from lltm_ext.lstm import LSTM, lstm, lstm_algorithm
from lltm_ext.relu import ReLU, ReLUFunction, relu
from lltm_ext.round import BinarizeFunction, Round, RoundFunction, binarize, round
from lltm_ext.sigmoid import Sigmoid, SigmoidFunction, sigmoid

__all__ = [
    "LLTM",
    "LSTM",
    "BinarizeFunction",
    "GemmFunction",
    "LLTMCell",
    "LLTMFunction",
    "Linear",
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
    "lltm_algorithm",
    "lltm_cell",
    "lstm",
    "lstm_algorithm",
    "relu",
    "round",
    "sigmoid",
]
