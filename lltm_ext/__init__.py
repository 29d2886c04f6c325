"""PyTorch CUDA extensions: the LLTM and LSTM layers, sigmoid, relu, straight-through round and GEMM."""

import torch

from lltm_ext._record import check as _check

# Before any module is loaded: a torch that does not fit gives a readable ImportError.
__version__: str = _check(torch)["version"]

from lltm_ext.gemm import GemmFunction, Linear, gemm
from lltm_ext.lltm import LLTM, LLTMCell, LLTMFunction, lltm, lltm_algorithm, lltm_cell
from lltm_ext.lstm import LSTM, lstm, lstm_algorithm
from lltm_ext.relu import ReLU, ReLUFunction, relu, relu_
from lltm_ext.round import (
    Binarize,
    BinarizeFunction,
    Ceil,
    CeilFunction,
    Floor,
    FloorFunction,
    Round,
    RoundFunction,
    Trunc,
    TruncFunction,
    binarize,
    binarize_,
    ceil,
    ceil_,
    floor,
    floor_,
    round,
    round_,
    trunc,
    trunc_,
)
from lltm_ext.sigmoid import Sigmoid, SigmoidFunction, sigmoid, sigmoid_

__all__ = [
    "LLTM",
    "LSTM",
    "Binarize",
    "BinarizeFunction",
    "Ceil",
    "CeilFunction",
    "Floor",
    "FloorFunction",
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
    "Trunc",
    "TruncFunction",
    "__version__",
    "binarize",
    "binarize_",
    "ceil",
    "ceil_",
    "floor",
    "floor_",
    "gemm",
    "lltm",
    "lltm_algorithm",
    "lltm_cell",
    "lstm",
    "lstm_algorithm",
    "relu",
    "relu_",
    "round",
    "round_",
    "sigmoid",
    "sigmoid_",
    "trunc",
    "trunc_",
]
