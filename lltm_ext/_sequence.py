"""What the sequence ops share in Python: a whole sequence, under torch.func's transforms too, and the layers.

Outside transforms a call goes straight to the op, whose autograd is C++. Inside, where nothing enters a C++
autograd function, it takes a ``torch.autograd.Function`` of the op's own forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lltm_ext._library import (
    State,
    check_hx,
    check_tensor,
    differentiable_gradients,
    ops,
    transforms_active,
    vmap_rows,
)

Reference = Callable[[Tensor, State, Tensor, Tensor, Tensor | None], tuple[Tensor, State]]
Outputs = tuple[Tensor, Tensor, Tensor]
Direction = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]  # h0, c0, weight_ih, weight_hh, bias


def _stack(states: list[Tensor]) -> Tensor:
    return states[0].unsqueeze(0) if len(states) == 1 else torch.stack(states)  # the one without a copy


def sequence_function(name: str, reference: Reference) -> type[torch.autograd.Function]:
    """The Function of the op ``lltm_ext::<name>``, with its arguments.

    ``reference`` is the op in pure PyTorch, which second derivatives under torch.func are those of. Composed
    of it, the sequence is the Function's ``composed``.
    """
    forward_op, backward_op = getattr(ops, f"{name}_forward"), getattr(ops, f"{name}_backward")

    def by_reference(
        input: Tensor,
        h0: Tensor,
        c0: Tensor,
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias: Tensor | None,
        batch_sizes: list[int] | None,
        reverse: bool,
    ) -> Outputs:
        """By the reference: all steps at once, or one by one where the rows differ."""
        weights = (weight_ih, weight_hh, bias)
        if batch_sizes is None:
            output, (h_n, c_n) = reference(input.flip(0) if reverse else input, (h0, c0), *weights)
            return output.flip(0) if reverse else output, h_n, c_n
        order = slice(None, None, -1 if reverse else 1)
        outputs = []
        for step in input.split(batch_sizes)[order]:
            n = len(step)
            rows, (h, c) = reference(step[None], (h0[:n], c0[:n]), *weights)
            h0, c0 = torch.cat([h, h0[n:]]), torch.cat([c, c0[n:]])
            outputs.append(rows[0])
        return torch.cat(outputs[order]) if outputs else input.new_zeros(0, h0.shape[1]), h0, c0

    class SequenceFunction(torch.autograd.Function):
        """``(output, h_n, c_n, gates, extra)``, of which the last two are for backward."""

        composed = staticmethod(by_reference)

        @staticmethod
        def forward(*args: Any) -> tuple[Tensor, ...]:
            return forward_op(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            y, _, _, gates, extra = output
            *tensors, ctx.batch_sizes, ctx.reverse, ctx.algorithm = inputs
            ctx.mark_non_differentiable(gates, extra)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*tensors, y, gates, extra)

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
            *inputs, output, gates, extra = ctx.saved_tensors
            grads = grad_outputs[:3]
            if all(g is None for g in grads):
                return (None,) * 9
            how: list[Any] = [ctx.batch_sizes, ctx.reverse]
            if torch.is_grad_enabled():
                found = differentiable_gradients(lambda *x: by_reference(*x, *how), inputs, grads)
                return (*found, None, None, None)
            saved = (*inputs[:5], output, gates, extra)
            of_input, of_bias = ctx.needs_input_grad[0], ctx.needs_input_grad[5]
            first, *others, last = backward_op(*grads, *saved, *how, ctx.algorithm, of_input, of_bias)
            return (first if of_input else None, *others, last if of_bias else None, None, None, None)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
            return vmap_rows(SequenceFunction.apply, {0: 1, 1: 0, 2: 0}, (1, 0, 0, 1, 1))(
                info, in_dims, *args
            )

    return SequenceFunction


def sequence_op(name: str, function: type[torch.autograd.Function]) -> Callable[..., Outputs]:
    """The op ``lltm_ext::<name>`` with its arguments, through ``function`` under transforms."""
    op = getattr(ops, name)

    def run(
        input: Tensor,
        h0: Tensor,
        c0: Tensor,
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias: Tensor | None,
        batch_sizes: list[int] | None = None,
        reverse: bool = False,
        algorithm: str = "auto",
    ) -> Outputs:
        if not transforms_active():
            return op(input, h0, c0, weight_ih, weight_hh, bias, batch_sizes, reverse, algorithm)
        if batch_sizes is not None:
            raise RuntimeError(
                f"{name.upper()}: expected a padded input under torch.func transforms, got a PackedSequence"
            )
        steps = input.flip(0) if reverse else input
        tensors = (steps, h0, c0, weight_ih, weight_hh, bias)
        output, h_n, c_n, *_ = function.apply(*tensors, None, False, algorithm)
        return output.flip(0) if reverse else output, h_n, c_n

    torch.library.register_vmap(f"lltm_ext::{name}", vmap_rows(op, {0: 1, 1: 0, 2: 0}, (1, 0, 0)))
    return run


def both_directions(name: str, sequence: Callable[..., Outputs]) -> Callable[..., list[Outputs]]:
    """The op ``lltm_ext::<name>_bidirectional``, two ``sequence`` calls in one: onward and in reverse.

    They run side by side where the GPU has room for both. Under transforms it is the two calls.
    """
    op = getattr(ops, f"{name}_bidirectional")

    def run(
        input: Tensor, onward: Direction, reverse: Direction, batch_sizes: list[int] | None = None
    ) -> list[Outputs]:
        if transforms_active():
            return [
                sequence(input, *onward, batch_sizes, False),
                sequence(input, *reverse, batch_sizes, True),
            ]
        given = ([x for x in direction if x is not None] for direction in (onward, reverse))
        outputs = op(input, *given, batch_sizes)
        return [tuple(outputs[:3]), tuple(outputs[3:])]

    return run


class SequenceLayer(nn.Module):
    """A layer with nn.LSTM's options and call, whose class gives the op and the parameters."""

    input_size: int
    hidden_size: int
    num_layers: int
    batch_first: bool
    dropout: float
    bidirectional: bool

    _sequence: Callable[..., Outputs]  # of sequence_op
    _both: Callable[..., list[Outputs]]  # of both_directions

    def _parameters_of(self, layer: int, direction: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """(weight_ih, weight_hh, bias)"""
        raise NotImplementedError

    def _check_input(self, input: Tensor, dims: tuple[int, ...]) -> None:
        """Raises for an input that has not one of these numbers of dimensions, or another width."""
        raise NotImplementedError

    def forward(
        self, input: Tensor | PackedSequence, hx: State | None = None
    ) -> tuple[Tensor | PackedSequence, State]:
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx)
        check_tensor(self._name, "input", input)
        self._check_input(input, dims=(2, 3))
        if input.dim() == 2:
            if hx is not None:
                h0, c0 = check_hx(self._name, hx, (self._states, self.hidden_size))
                hx = (h0.unsqueeze(1), c0.unsqueeze(1))
            output, h_n, c_n = self._run(input.unsqueeze(1), hx, None)
            return output.squeeze(1), (h_n.squeeze(1), c_n.squeeze(1))
        output, h_n, c_n = self._run(input.transpose(0, 1) if self.batch_first else input, hx, None)
        return output.transpose(0, 1) if self.batch_first else output, (h_n, c_n)

    def _forward_packed(self, input: PackedSequence, hx: State | None) -> tuple[PackedSequence, State]:
        data, batch_sizes, sorted_indices, unsorted_indices = input
        self._check_input(data, dims=(2,))
        if hx is not None and sorted_indices is not None:
            h0, c0 = check_hx(self._name, hx, (self._states, int(batch_sizes[0]), self.hidden_size))
            hx = (h0.index_select(1, sorted_indices), c0.index_select(1, sorted_indices))
        output, h_n, c_n = self._run(data, hx, batch_sizes.tolist())
        if unsorted_indices is not None:
            h_n, c_n = h_n.index_select(1, unsorted_indices), c_n.index_select(1, unsorted_indices)
        return PackedSequence(output, batch_sizes, sorted_indices, unsorted_indices), (h_n, c_n)

    def _run(self, input: Tensor, hx: State | None, batch_sizes: list[int] | None) -> Outputs:
        """All layers and directions over [T, B, I], or over packed rows [N, I] with their ``batch_sizes``."""
        batch = input.shape[1] if batch_sizes is None else batch_sizes[0]
        shape = (self._states, batch, self.hidden_size)
        if hx is None:
            zeros = input.new_zeros(shape)
            hx = (zeros, zeros)
        h0, c0 = check_hx(self._name, hx, shape)
        h_n: list[Tensor] = []
        c_n: list[Tensor] = []
        for layer in range(self.num_layers):
            directions = [
                (h0[len(h_n) + i], c0[len(h_n) + i], *self._parameters_of(layer, i))
                for i in range(self._directions)
            ]
            if self.bidirectional:
                found = self._both(input, *directions, batch_sizes)
                input = torch.cat([output for output, _, _ in found], dim=-1)
            else:
                found = [self._sequence(input, *directions[0], batch_sizes)]
                input = found[0][0]
            h_n += [h for _, h, _ in found]
            c_n += [c for _, _, c in found]
            if self.dropout > 0 and layer < self.num_layers - 1:
                input = F.dropout(input, self.dropout, self.training)
        return input, _stack(h_n), _stack(c_n)

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def _states(self) -> int:
        return self.num_layers * self._directions
