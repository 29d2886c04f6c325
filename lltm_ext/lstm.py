"""LSTM on the engine of the LLTM: torch.nn.LSTM's parameters and results, all steps in one kernel.

With gates in the order input, forget, cell, output::

    i, f, g, o = split(x W_ih^T + b_ih + h W_hh^T + b_hh)
    c' = sigmoid(f) * c + sigmoid(i) * tanh(g)
    h' = sigmoid(o) * tanh(c')

Source: Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997, in the form of torch.nn.LSTM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from lltm_ext._C import lstm as _C  # noqa: F401  registers the ops
from lltm_ext._library import State, check_hx, check_pair, check_tensor, ops
from lltm_ext._sequence import sequence_function, sequence_op


def lstm_reference(
    input: Tensor, hx: State, weight_ih: Tensor, weight_hh: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, State]:
    """:func:`lstm` in pure PyTorch: a Python loop over the steps."""
    h, c = hx
    projection = input @ weight_ih.t()
    if bias is not None:
        projection = projection + bias
    outputs = []
    for step in projection.unbind(0):
        i, f, g, o = (step + h @ weight_hh.t()).chunk(4, dim=-1)
        c = (torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)).to(c.dtype)
        h = (torch.sigmoid(o) * torch.tanh(c)).to(h.dtype)
        outputs.append(h)
    output = torch.stack(outputs) if outputs else input.new_zeros(0, *h.shape)
    return output, (h, c)


_SequenceFunction = sequence_function("lstm", lstm_reference)
_sequence = sequence_op("lstm", _SequenceFunction)


def lstm(
    input: Tensor,
    hx: State,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    *,
    algorithm: str = "auto",
) -> tuple[Tensor, State]:
    """A whole sequence of the LSTM cell; arguments, results and errors as :func:`lltm_ext.lltm` has them.

    Args:
        input: [T, B, I], on CPU or CUDA; float16, bfloat16, float32 or float64.
        hx: ``(h0, c0)``, each [B, H]; c0 in the dtype of ``input``, for half types also in float32.
        weight_ih: [4*H, I].
        weight_hh: [4*H, H].
        bias: [4*H], the sum of nn.LSTM's two, or None.
        algorithm: "auto", "stepwise", "cluster" or "grid" (which in float32 takes H up to 512).

    Returns:
        ``(output, (h_n, c_n))``: output [T, B, H] holds h of every step, h_n and c_n [B, H] the last state.
    """
    check_tensor("lstm", "input", input)
    h0, c0 = check_pair("lstm", hx)
    output, h_n, c_n = _sequence(input, h0, c0, weight_ih, weight_hh, bias, algorithm=algorithm)
    return output, (h_n, c_n)


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
    """The algorithm that :func:`lstm` takes for these arguments; see :func:`lltm_ext.lltm_algorithm`."""
    check_tensor("lstm_algorithm", "input", input)
    h0, _ = check_pair("lstm_algorithm", hx)
    return ops.lstm_algorithm(input, h0, algorithm=algorithm, backward=backward)


class LSTM(nn.LSTM):
    """Takes the place of :class:`torch.nn.LSTM`: the same arguments, parameters, state_dict and results.

    An ``nn.LSTM`` in all but speed, and but for ``proj_size``, which must be 0. Arguments, shapes and
    attributes are those of its documentation. As torch.compile refuses every nn.LSTM in fullgraph mode, so
    it does this one, unless ``torch._dynamo.config.allow_rnn`` is set.

    Raises:
        ValueError: for a ``proj_size`` other than 0.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.proj_size != 0:
            raise ValueError(f"LSTM: expected proj_size to be 0, got {self.proj_size}")

    def forward(
        self, input: Tensor | PackedSequence, hx: State | None = None
    ) -> tuple[Tensor | PackedSequence, State]:
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx)
        check_tensor("LSTM", "input", input)
        if input.dim() not in (2, 3):
            raise ValueError(f"LSTM: expected input of 2 or 3 dimensions, got {list(input.shape)}")
        self._check_width(input)
        batched = input.dim() == 3
        steps = input.unsqueeze(1) if not batched else input.transpose(0, 1) if self.batch_first else input
        if hx is not None and not batched:
            h0, c0 = check_hx("LSTM", hx, (self._states, self.hidden_size))
            hx = (h0.unsqueeze(1), c0.unsqueeze(1))
        output, h_n, c_n = self._run(steps, hx, None)
        if not batched:
            return output.squeeze(1), (h_n.squeeze(1), c_n.squeeze(1))
        return output.transpose(0, 1) if self.batch_first else output, (h_n, c_n)

    def _forward_packed(self, input: PackedSequence, hx: State | None) -> tuple[PackedSequence, State]:
        data, batch_sizes, sorted_indices, unsorted_indices = input
        self._check_width(data)
        if hx is not None:
            hx = self.permute_hidden(check_pair("LSTM", hx), sorted_indices)
        output, h_n, c_n = self._run(data, hx, batch_sizes)
        return PackedSequence(output, batch_sizes, sorted_indices, unsorted_indices), self.permute_hidden(
            (h_n, c_n), unsorted_indices
        )

    def _run(
        self, input: Tensor, hx: State | None, batch_sizes: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All layers and directions over [T, B, I], or over packed rows [N, I] with their ``batch_sizes``."""
        directions = 2 if self.bidirectional else 1
        batch = input.shape[1] if batch_sizes is None else int(batch_sizes[0])
        shape = (self._states, batch, self.hidden_size)
        if hx is None:
            zeros = input.new_zeros(shape)
            hx = (zeros, zeros)
        h0, c0 = check_hx("LSTM", hx, shape)
        sizes = None if batch_sizes is None else batch_sizes.tolist()
        h_n, c_n = [], []
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(directions):
                index = layer * directions + direction
                output, h, c = _sequence(
                    input, h0[index], c0[index], *self._weights_of(index), sizes, direction == 1
                )
                outputs.append(output)
                h_n.append(h)
                c_n.append(c)
            input = outputs[0] if directions == 1 else torch.cat(outputs, dim=-1)
            if self.dropout > 0 and layer < self.num_layers - 1:
                input = F.dropout(input, self.dropout, self.training)
        return input, torch.stack(h_n), torch.stack(c_n)

    @property
    def _states(self) -> int:
        return self.num_layers * (2 if self.bidirectional else 1)

    def _check_width(self, input: Tensor) -> None:
        if input.shape[-1] != self.input_size:
            raise RuntimeError(
                f"LSTM: expected input of input_size = {self.input_size} features, got {list(input.shape)}"
            )

    def _weights_of(self, index: int) -> tuple[Tensor, Tensor, Tensor | None]:
        weight_ih, weight_hh, *biases = (getattr(self, name) for name in self._all_weights[index])
        return weight_ih, weight_hh, biases[0] + biases[1] if biases else None
