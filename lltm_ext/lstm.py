"""LSTM on the engine of the LLTM: torch.nn.LSTM's parameters and results, all steps in one kernel.

With gates in the order input, forget, cell, output::

    i, f, g, o = split(x W_ih^T + b_ih + h W_hh^T + b_hh)
    c' = sigmoid(f) * c + sigmoid(i) * tanh(g)
    h' = sigmoid(o) * tanh(c')

Source: Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997, in the form of torch.nn.LSTM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lltm_ext import cells
from lltm_ext._arguments import State
from lltm_ext._C import lstm as _C  # noqa: F401  registers the ops, and the kernels of cells.lstm
from lltm_ext._layers import TorchLayer
from lltm_ext._library import decompose_under_transforms
from lltm_ext._loop import reference

__all__ = ["LSTM", "lstm", "lstm_algorithm"]

decompose_under_transforms("lstm")


def lstm(
    input: Tensor,
    hx: State,
    weight_ih: Tensor | None,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    *,
    reset: Tensor | None = None,
    reset_to: str = "zeros",
    reverse: bool = False,
    algorithm: str = "auto",
) -> tuple[Tensor, State]:
    """A whole sequence of the LSTM cell; arguments, results and errors as for :func:`lltm_ext.lltm`.

    Args:
        input: [T, B, I], on CPU or CUDA; float16, bfloat16, float32 or float64.
        hx: ``(h0, c0)``, each [B, H]; c0 in the dtype of ``input``, for half types also in float32.
        weight_ih: [4*H, I]; None for an input [T, B, 4*H] that is taken as it is, as the product with it.
        weight_hh: [4*H, H].
        bias: [4*H], the sum of nn.LSTM's two, or None.
        reset: [T, B], where an episode starts.
        reset_to: "zeros" or "initial": what the states of the row become there.
        reverse: whether the last step is computed first.
        algorithm: "auto", "stepwise", "cluster" or "grid" (H up to 512 in float32, 1024 in TF32).

    Products of float32 on CUDA are TF32 where nn.LSTM's are: where ``torch.backends.cudnn.allow_tf32``, by
    default True, or ``torch.backends.cudnn.rnn.fp32_precision`` says so.

    Returns:
        ``(output, (h_n, c_n))``: output [T, B, H] holds h of every step, h_n and c_n [B, H] the last state.
    """
    options: Any = {"reset": reset, "reset_to": reset_to, "reverse": reverse, "algorithm": algorithm}
    return cells.lstm(input, hx, weight_ih, weight_hh, bias, **options)


lstm.__script_unsupported = (  # type: ignore[attr-defined]  # an attribute that torch.jit.script reads
    "lstm has options by keyword; a script can have a layer lltm_ext.LSTM, or torch.ops.lltm_ext.lstm"
)


def lstm_algorithm(
    input: Tensor,
    hx: State,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    *,
    algorithm: str = "auto",
    backward: bool = False,
) -> str:
    """The algorithm of :func:`lstm` for these arguments: "stepwise", "cluster" or "grid".

    Args:
        backward: True for the algorithm of the backward pass, which may differ from the forward's.

    The other arguments and all errors are those of :func:`lstm`.
    """
    return cells.lstm.algorithm(input, hx, weight_ih, weight_hh, bias, algorithm=algorithm, backward=backward)


def lstm_reference(
    input: Tensor,
    hx: State,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    *,
    reset: Tensor | None = None,
    reset_to: str = "zeros",
    reverse: bool = False,
) -> tuple[Tensor, State]:
    """:func:`lstm` in pure PyTorch."""
    output, (h_n, c_n) = reference(
        cells.lstm, input, hx, weight_ih, weight_hh, bias, reset, reset_to, reverse
    )
    return output, (h_n, c_n)


class LSTM(TorchLayer, nn.LSTM):
    """Replaces :class:`torch.nn.LSTM`: the same arguments, parameters, state_dict and results.

    Its documentation gives arguments, shapes and attributes; docs/dropin.md the few differences. With a
    ``proj_size`` torch's own LSTM runs. A call also takes ``reset=``, where an episode starts, and
    ``reset_to=``, as :class:`lltm_ext.LLTM` does. Float32 on CUDA follows nn.LSTM's own switches too,
    ``torch.backends.cudnn.allow_tf32``, by default True, and ``torch.backends.cudnn.rnn.fp32_precision``.

    Raises:
        TypeError: for a wrong dtype, also a ValueError; for an hx that is no pair, also a RuntimeError.
        ValueError: for a ``reset`` with a ``proj_size``.
    """

    _cell = cells.lstm
    _torch_class = nn.LSTM

    def _run(self, input: Tensor, *arguments: Any) -> tuple[Tensor, Sequence[Tensor]]:
        output, (h_n, c_n) = super()._run(input, *arguments)
        if c_n.dtype != h_n.dtype and torch.is_autocast_enabled(input.device.type):
            c_n = c_n.to(h_n.dtype)  # cuDNN returns this dtype; c was float32 until the last step
        return output, (h_n, c_n)
