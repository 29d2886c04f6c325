"""Fast recurrent layers for PyTorch (LSTM, GRU, RNN, LLTM, own cells), scans, GEMM and quantizers in CUDA."""

# The __all__ of each module lists its public names.
# ruff: noqa: F403
from lltm_ext import _portable
from lltm_ext._install import loader as _loader

if not _loader.is_module_run():  # the doctor must run where torch does not import
    import torch

    # This comes before any module is loaded, so that a torch that does not fit gives a readable ImportError.
    __version__: str = _loader.provide(torch)["version"]

    from lltm_ext import _flops as _flops
    from lltm_ext import _onnx as _onnx
    from lltm_ext import _tracing as _tracing
    from lltm_ext import cells as cells
    from lltm_ext.convert import *
    from lltm_ext.elementwise import *
    from lltm_ext.fake_quantize import *
    from lltm_ext.gemm import *
    from lltm_ext.lltm import *
    from lltm_ext.lstm import *
    from lltm_ext.recurrence import *
    from lltm_ext.recurrent import *
    from lltm_ext.relu import *
    from lltm_ext.rnn import *
    from lltm_ext.round import *
    from lltm_ext.scan import *
    from lltm_ext.sigmoid import *
    from lltm_ext.spike import *
    from lltm_ext.stochastic_round import *

    if _portable.in_use:  # it registers rules of the ops, so it comes after them
        from lltm_ext import _portable_rules as _portable_rules

    __all__ = sorted(
        ["__version__", "cells"]
        + [
            name
            for name, value in globals().items()
            if not name.startswith("_") and getattr(value, "__module__", "").startswith("lltm_ext.")
        ]
    )
