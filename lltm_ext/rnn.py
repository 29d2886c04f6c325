"""GRU and RNN as cells of :func:`lltm_ext.recurrence`, in the place of torch.nn.GRU and torch.nn.RNN."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lltm_ext import cells
from lltm_ext._layers import TorchLayer
from lltm_ext._library import check_tensor
from lltm_ext.recurrence import RecurrentCell, recurrence

__all__ = ["GRU", "RNN"]


# The cells with the second bias of torch's layers as it is: each of its rows is a parameter.


@recurrence(gates=3, separate=True, parameters=("b_hr", "b_hz", "b_hn"))
def gru(x, r, h, p):
    reset, update = torch.sigmoid(x[0] + r[0] + p.b_hr), torch.sigmoid(x[1] + r[1] + p.b_hz)
    candidate = torch.tanh(x[2] + reset * (r[2] + p.b_hn))
    return (1 - update) * candidate + update * h


@recurrence(gates=3, separate=True)
def gru_without_bias(x, r, h):
    reset, update = torch.sigmoid(x[0] + r[0]), torch.sigmoid(x[1] + r[1])
    return (1 - update) * torch.tanh(x[2] + reset * r[2]) + update * h


@recurrence(gates=1, parameters=("b_hh",))
def rnn_tanh(x, p):
    return torch.tanh(x[0] + p.b_hh)


@recurrence(gates=1, parameters=("b_hh",))
def rnn_relu(x, p):
    return torch.relu(x[0] + p.b_hh)


class SecondBiasLayer(TorchLayer):
    """A layer whose cell takes torch's second bias as parameters."""

    def _weights_of(self, layer: int, direction: int) -> tuple[Any, ...]:
        weight_ih, weight_hh, bias, bias_hh, parameters = super()._weights_of(layer, direction)
        if self.bias and (bias is None or bias_hh is None):  # set to None
            check_tensor(self._name, "both biases", None)
        return weight_ih, weight_hh, bias, None, parameters if bias_hh is None else bias_hh


class GRU(SecondBiasLayer, nn.GRU):
    """Replaces :class:`torch.nn.GRU`: the same arguments, parameters, state_dict and results.

    Its documentation gives arguments, shapes and attributes; docs/dropin.md the few differences. A call also
    takes ``reset=`` and ``reset_to=``, as :class:`lltm_ext.Recurrent` does. Float32 on CUDA follows nn.GRU's
    own switches too, ``torch.backends.cudnn.allow_tf32``, by default True, and
    ``torch.backends.cudnn.rnn.fp32_precision``.
    """

    _torch_class = nn.GRU

    @property
    def _cell(self) -> RecurrentCell:  # type: ignore[override]
        return gru if self.bias else gru_without_bias


class RNN(SecondBiasLayer, nn.RNN):
    """Replaces :class:`torch.nn.RNN`: the same arguments, parameters, state_dict and results.

    Its documentation gives arguments, shapes and attributes; docs/dropin.md the few differences. A call also
    takes ``reset=`` and ``reset_to=``, as :class:`lltm_ext.Recurrent` does. Float32 on CUDA follows nn.RNN's
    own switches too, ``torch.backends.cudnn.allow_tf32``, by default True, and
    ``torch.backends.cudnn.rnn.fp32_precision``.
    """

    _torch_class = nn.RNN

    @property
    def _cell(self) -> RecurrentCell:  # type: ignore[override]
        if self.bias:
            return rnn_relu if self.mode == "RNN_RELU" else rnn_tanh
        return cells.rnn_relu if self.mode == "RNN_RELU" else cells.rnn_tanh
