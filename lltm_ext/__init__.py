"""PyTorch CUDA extensions: LLTM and LSTM layers, sigmoid, relu, straight-through steps, quantizers, GEMM."""

from lltm_ext import _portable
from lltm_ext._launch import is_program

if not is_program():  # the doctor must run where torch does not import
    import torch

    from lltm_ext._record import provide as _provide

    # Before any module is loaded: a torch that does not fit gives a readable ImportError, or a JIT build.
    __version__: str = _provide(torch)["version"]

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

    if _portable.in_use:  # which lacks the others, and says so when they are asked for
        from lltm_ext import _portable_rules as _portable_rules
    else:
        from lltm_ext.elementwise import elementwise
        from lltm_ext.fake_quantize import FakeQuantize, FakeQuantizeFunction, fake_quantize
        from lltm_ext.stochastic_round import StochasticRound, StochasticRoundFunction, stochastic_round

__all__ = [
    "LLTM",
    "LSTM",
    "Binarize",
    "BinarizeFunction",
    "Ceil",
    "CeilFunction",
    "FakeQuantize",
    "FakeQuantizeFunction",
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
    "StochasticRound",
    "StochasticRoundFunction",
    "Trunc",
    "TruncFunction",
    "__version__",
    "binarize",
    "binarize_",
    "ceil",
    "ceil_",
    "elementwise",
    "fake_quantize",
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
    "stochastic_round",
    "trunc",
    "trunc_",
]

if _portable.in_use:
    __all__ = [name for name in __all__ if name in globals()]  # so that `import *` asks for no other
