"""GRU and RNN as cells of :func:`lltm_ext.recurrence`, in the place of torch.nn.GRU and torch.nn.RNN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lltm_ext import cells
from lltm_ext._layers import Steps, TorchLayer
from lltm_ext._library import transforms_active
from lltm_ext.recurrence import RecurrentCell, autocast_dtype, recurrence

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


class LayerOfTorch(TorchLayer):
    """A layer of torch that a cell runs; on the CPU torch's own op does, with half types in float32."""

    _torch_op: Callable[..., tuple[Tensor, Tensor]]

    def _weights_of(self, layer: int, direction: int) -> tuple[Any, ...]:
        weight_ih, weight_hh, bias, bias_hh, parameters = super()._weights_of(layer, direction)
        if bias_hh is not None:
            parameters = bias_hh.view(-1, self.hidden_size)
        return weight_ih, weight_hh, bias, None, parameters

    def _run(
        self,
        input: Tensor,
        states: Sequence[Tensor] | None,
        batch: int,
        batch_sizes: list[int] | None,
        steps: Steps,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        casts_to = autocast_dtype(input)
        dtypes = (input.dtype,) if casts_to is None else (torch.float32, torch.float16, torch.bfloat16)
        given = (input, *(states or ()), *self._flat_weights)
        fits = all(x is None or (x.is_cpu and x.dtype in dtypes) for x in given)  # errors name what does not
        is_special = steps.resets[0] is not None or transforms_active()  # torch's op has no vmap rule
        if is_special or not fits or input.numel() == 0:
            return super()._run(input, states, batch, batch_sizes, steps)
        h0 = states[0] if states else input.new_zeros((self._slices, batch, self.hidden_size))
        weights = self._flat_weights
        if input.dtype in (torch.float32, torch.float64) and casts_to is None:
            return self._by_torch(input, h0, weights, batch_sizes)
        weights = [x if x is None else x.float() for x in weights]
        with torch.autocast("cpu", enabled=False):
            output, (h_n,) = self._by_torch(input.float(), h0.float(), weights, batch_sizes)
        dtype = casts_to or input.dtype
        return output.to(dtype), (h_n.to(dtype),)

    def _by_torch(
        self, input: Tensor, h0: Tensor, weights: list[Any], batch_sizes: list[int] | None
    ) -> tuple[Tensor, tuple[Tensor]]:
        sizes = [] if batch_sizes is None else [torch.tensor(batch_sizes, device="cpu")]
        options = (self.bias, self.num_layers, self.dropout, self.training, self.bidirectional)
        batch_first = [False] if batch_sizes is None else []
        output, h_n = self._torch_op(input, *sizes, h0, weights, *options, *batch_first)
        return output, (h_n,)


class GRU(LayerOfTorch, nn.GRU):
    """Replaces :class:`torch.nn.GRU`: the same arguments, parameters, state_dict and results.

    Its documentation gives arguments, shapes and attributes; docs/dropin.md the few differences. A call also
    takes ``reset=`` and ``reset_to=``, as :class:`lltm_ext.Recurrent` does. Float32 on CUDA follows nn.GRU's
    own switches too, ``torch.backends.cudnn.allow_tf32``, by default True, and
    ``torch.backends.cudnn.rnn.fp32_precision``. On the CPU float32 and float64 take as long as nn.GRU. Half
    types are computed in float32 there, and resets run in a loop of torch's ops, which is slower.
    torch.compile refuses any nn.GRU in fullgraph mode, including this one, unless
    ``torch._dynamo.config.allow_rnn`` is set.
    """

    _torch_class = nn.GRU
    _torch_op = staticmethod(torch.gru)

    @property
    def _cell(self) -> RecurrentCell:  # type: ignore[override]
        return gru if self.bias else gru_without_bias


class RNN(LayerOfTorch, nn.RNN):
    """Replaces :class:`torch.nn.RNN`: the same arguments, parameters, state_dict and results.

    Its documentation gives arguments, shapes and attributes; docs/dropin.md the few differences. A call also
    takes ``reset=`` and ``reset_to=``, as :class:`lltm_ext.Recurrent` does. Float32 on CUDA follows nn.RNN's
    own switches too, ``torch.backends.cudnn.allow_tf32``, by default True, and
    ``torch.backends.cudnn.rnn.fp32_precision``. On the CPU float32 and float64 take as long as nn.RNN. Half
    types are computed in float32 there, and resets run in a loop of torch's ops, which is slower.
    torch.compile refuses any nn.RNN in fullgraph mode, including this one, unless
    ``torch._dynamo.config.allow_rnn`` is set.
    """

    _torch_class = nn.RNN

    @property
    def _cell(self) -> RecurrentCell:  # type: ignore[override]
        if self.bias:
            return rnn_relu if self.mode == "RNN_RELU" else rnn_tanh
        return cells.rnn_relu if self.mode == "RNN_RELU" else cells.rnn_tanh

    @property
    def _torch_op(self) -> Callable[..., tuple[Tensor, Tensor]]:  # type: ignore[override]
        return torch.rnn_relu if self.mode == "RNN_RELU" else torch.rnn_tanh
