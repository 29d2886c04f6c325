"""What the sequence ops share in Python: a whole sequence, under torch.func's transforms too.

Outside them a call goes straight to the op, whose autograd is C++. Inside, where nothing enters a C++
autograd function, it takes a ``torch.autograd.Function`` of the op's own forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lltm_ext._library import State, differentiable_gradients, ops, transforms_active, vmap_rows

Reference = Callable[[Tensor, State, Tensor, Tensor, Tensor | None], tuple[Tensor, State]]
Outputs = tuple[Tensor, Tensor, Tensor]


def sequence_function(name: str, reference: Reference) -> type[torch.autograd.Function]:
    """The Function of the op ``lltm_ext::<name>``: (input, h0, c0, weight_ih, weight_hh, bias, algorithm).

    ``reference`` is the op in pure PyTorch, which second derivatives under torch.func are those of.
    """
    forward_op, backward_op = getattr(ops, f"{name}_forward"), getattr(ops, f"{name}_backward")

    def composed(
        input: Tensor, h0: Tensor, c0: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias: Tensor | None
    ) -> Outputs:
        output, (h_n, c_n) = reference(input, (h0, c0), weight_ih, weight_hh, bias)
        return output, h_n, c_n

    class SequenceFunction(torch.autograd.Function):
        """``(output, h_n, c_n, gates, extra)``, of which the last two are for backward."""

        @staticmethod
        def forward(*args: Any) -> tuple[Tensor, ...]:
            *tensors, algorithm = args
            return forward_op(*tensors, None, False, algorithm)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            y, _, _, gates, extra = output
            *tensors, ctx.algorithm = inputs
            ctx.mark_non_differentiable(gates, extra)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*tensors, y, gates, extra)

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
            *inputs, output, gates, extra = ctx.saved_tensors
            grads = grad_outputs[:3]
            if all(g is None for g in grads):
                return (None,) * 7
            if torch.is_grad_enabled():
                return (*differentiable_gradients(composed, inputs, grads), None)
            *states_and_weights, bias = inputs
            saved = (*states_and_weights, output, gates, extra)
            gradients = backward_op(*grads, *saved, None, False, ctx.algorithm, True, bias is not None)
            return (*gradients[:5], None if bias is None else gradients[5], None)

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
        output, h_n, c_n, *_ = function.apply(steps, h0, c0, weight_ih, weight_hh, bias, algorithm)
        return output.flip(0) if reverse else output, h_n, c_n

    torch.library.register_vmap(f"lltm_ext::{name}", vmap_rows(op, {0: 1, 1: 0, 2: 0}, (1, 0, 0)))
    return run
