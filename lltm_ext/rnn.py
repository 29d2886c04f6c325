"""GRU and RNN as cells of :func:`lltm_ext.recurrence`, in the place of torch.nn.GRU and torch.nn.RNN."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lltm_ext import cells
from lltm_ext._sequence import Steps, TorchLayer
from lltm_ext.recurrence import RecurrentCell, autocast_dtype
from lltm_ext.recurrent import RecurrentLayer

__all__ = ["GRU", "RNN"]


class LayerOfTorch(RecurrentLayer, TorchLayer):
    """A layer of torch by a cell. On the CPU torch's own op runs it where the results are as exact."""

    _torch_op: Callable[..., tuple[Tensor, Tensor]]

    def _run_layer(
        self,
        layer: int,
        input: Tensor,
        states: list[tuple[Tensor, ...]],
        batch_sizes: list[int] | None,
        steps: Steps,
    ) -> Sequence[tuple[Tensor, ...]]:
        exact = input.dtype in (torch.float32, torch.float64) and autocast_dtype(input) is None
        if not input.is_cpu or input.numel() == 0 or not exact or steps.resets[0] is not None:
            return super()._run_layer(layer, input, states, batch_sizes, steps)
        weights = [w for i in range(self._directions) for w in self._own_parameters_of(layer, i)]
        h0 = torch.stack([h for (h,) in states])
        if any(not x.is_cpu or x.dtype != input.dtype for x in (h0, *weights)):  # to be named
            return super()._run_layer(layer, input, states, batch_sizes, steps)
        sizes = [] if batch_sizes is None else [torch.tensor(batch_sizes)]
        options = (len(weights) > 2 * self._directions, 1, 0.0, self.training, self.bidirectional)
        batch_first = [False] if batch_sizes is None else []
        output, h_n = self._torch_op(input, *sizes, h0, weights, *options, *batch_first)
        return list(zip(output.chunk(self._directions, -1), h_n.unbind(0), strict=True))


class GRU(LayerOfTorch, nn.GRU):
    """Replaces :class:`torch.nn.GRU`: the same arguments, parameters, state_dict and results.

    Its documentation gives arguments, shapes and attributes. A call also takes ``reset=`` and
    ``reset_to=``, as :class:`lltm_ext.Recurrent` does. Float32 on CUDA follows nn.GRU's own switches too,
    ``torch.backends.cudnn.allow_tf32``, by default True, and ``torch.backends.cudnn.rnn.fp32_precision``. On
    the CPU float32 and float64 take as long as nn.GRU; resets and half types run in a loop of torch's ops,
    which is slower. torch.compile refuses any nn.GRU in fullgraph mode, including this one, unless
    ``torch._dynamo.config.allow_rnn`` is set.
    """

    cell = cells.gru
    _torch_op = staticmethod(torch.gru)

    def _parameters_of(self, layer: int, direction: int) -> tuple[Tensor | None, ...]:
        weight_ih, weight_hh, *biases = self._own_parameters_of(layer, direction)
        if not biases:
            return weight_ih, weight_hh, None, weight_ih.new_zeros(self.hidden_size)
        # The candidate's second bias is inside the product with the reset gate.
        bias_ih, bias_hh = (bias.split([2 * self.hidden_size, self.hidden_size]) for bias in biases)
        return weight_ih, weight_hh, torch.cat([bias_ih[0] + bias_hh[0], bias_ih[1]]), bias_hh[1]


class RNN(LayerOfTorch, nn.RNN):
    """Replaces :class:`torch.nn.RNN`: the same arguments, parameters, state_dict and results.

    Its documentation gives arguments, shapes and attributes. A call also takes ``reset=`` and
    ``reset_to=``, as :class:`lltm_ext.Recurrent` does. Float32 on CUDA follows nn.RNN's own switches too,
    ``torch.backends.cudnn.allow_tf32``, by default True, and ``torch.backends.cudnn.rnn.fp32_precision``. On
    the CPU float32 and float64 take as long as nn.RNN; resets and half types run in a loop of torch's ops,
    which is slower. torch.compile refuses any nn.RNN in fullgraph mode, including this one, unless
    ``torch._dynamo.config.allow_rnn`` is set.
    """

    @property
    def cell(self) -> RecurrentCell:  # type: ignore[override]
        return cells.rnn_relu if self.nonlinearity == "relu" else cells.rnn_tanh

    @property
    def _torch_op(self) -> Callable[..., tuple[Tensor, Tensor]]:  # type: ignore[override]
        return torch.rnn_relu if self.nonlinearity == "relu" else torch.rnn_tanh
