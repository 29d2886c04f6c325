"""GRU and RNN as cells of :func:`lltm_ext.recurrence`, in the place of torch.nn.GRU and torch.nn.RNN."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lltm_ext import cells
from lltm_ext._sequence import TorchLayer
from lltm_ext.recurrence import RecurrentCell
from lltm_ext.recurrent import RecurrentLayer

__all__ = ["GRU", "RNN"]


class GRU(RecurrentLayer, TorchLayer, nn.GRU):
    """Replaces :class:`torch.nn.GRU`: the same arguments, parameters, state_dict and results.

    Its documentation gives arguments, shapes and attributes. A call also takes ``reset=``, as
    :class:`lltm_ext.Recurrent` does. On the CPU the steps run in a loop of torch's ops, which is slower than
    nn.GRU. torch.compile refuses any nn.GRU in fullgraph mode, including this one, unless
    ``torch._dynamo.config.allow_rnn`` is set.
    """

    cell = cells.gru

    def _parameters_of(self, layer: int, direction: int) -> tuple[Tensor | None, ...]:
        weight_ih, weight_hh, *biases = self._own_parameters_of(layer, direction)
        if not biases:
            return weight_ih, weight_hh, None, weight_ih.new_zeros(self.hidden_size)
        # The candidate's second bias is inside the product with the reset gate.
        bias_ih, bias_hh = (bias.split([2 * self.hidden_size, self.hidden_size]) for bias in biases)
        return weight_ih, weight_hh, torch.cat([bias_ih[0] + bias_hh[0], bias_ih[1]]), bias_hh[1]


class RNN(RecurrentLayer, TorchLayer, nn.RNN):
    """Replaces :class:`torch.nn.RNN`: the same arguments, parameters, state_dict and results.

    Its documentation gives arguments, shapes and attributes. A call also takes ``reset=``, as
    :class:`lltm_ext.Recurrent` does. On the CPU the steps run in a loop of torch's ops, which is slower than
    nn.RNN. torch.compile refuses any nn.RNN in fullgraph mode, including this one, unless
    ``torch._dynamo.config.allow_rnn`` is set.
    """

    @property
    def cell(self) -> RecurrentCell:  # type: ignore[override]
        return cells.rnn_relu if self.nonlinearity == "relu" else cells.rnn_tanh
