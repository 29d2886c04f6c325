"""A user's cell on CUDA: the ops of src/custom_cell, and their rules under torch.func.

The argument ``program`` of the dispatcher ops ``lltm_ext::custom_cell*`` is the cell as text, so that
torch.compile and torch.export trace a call as one op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lltm_ext._C import custom_cell as _C  # noqa: F401  registers the ops
from lltm_ext._library import (
    differentiable_gradients,
    differentiable_tangents,
    has_tangents,
    implement,
    ops,
    transforms_active,
    vmap_rows,
)
from lltm_ext._loop import compute_dtype, run_loop, zero_state
from lltm_ext._program import CELLS, program_for

if TYPE_CHECKING:
    from lltm_ext._to_initial import ToInitial
    from lltm_ext.recurrence import RecurrentCell


def run_kernels(
    cell: RecurrentCell | ToInitial,
    input: Tensor,
    states: Sequence[Tensor | None],
    weight_ih: Tensor,
    weight_hh: Tensor | None,
    bias: Tensor | None,
    parameters: Sequence[Tensor],
    inputs: Sequence[Tensor],
    reset: Tensor | None,
    batch_sizes: list[int] | None,
    is_reverse: bool,
    algorithm: str,
) -> tuple[Tensor, list[Tensor]]:
    """As :func:`lltm_ext.recurrence.run`, for arguments that it has checked, on CUDA."""
    arguments = op_arguments(cell, input, states, weight_ih, weight_hh, bias, parameters, inputs, reset)
    options = (batch_sizes, is_reverse, algorithm, program_for(cell, input.dtype))
    function = CustomCellFunction.apply if transforms_active() or has_tangents() else ops.custom_cell
    output, h_n, states_n, *_ = function(*arguments, *options)
    if len(states) == 1:  # torch.export saves no program that unbinds nothing
        return output, [h_n]
    others = zip(states_n.unbind(0), states[1:], strict=True)
    return output, [h_n, *(y if x is None else y.to(x.dtype) for y, x in others)]


def algorithm_of(
    cell: RecurrentCell | ToInitial,
    input: Tensor,
    states: Sequence[Tensor],
    weight_ih: Tensor,
    weight_hh: Tensor | None,
    bias: Tensor | None,
    parameters: Sequence[Tensor],
    inputs: Sequence[Tensor],
    reset: Tensor | None,
    algorithm: str,
    backward: bool,
) -> str:
    """The algorithm of a call of :func:`run_kernels` on padded input."""
    arguments = op_arguments(cell, input, states, weight_ih, weight_hh, bias, parameters, inputs, reset)
    program = program_for(cell, input.dtype)
    return ops.custom_cell_algorithm(*arguments, None, False, algorithm, program, backward)


def op_arguments(
    cell: RecurrentCell | ToInitial,
    input: Tensor,
    states: Sequence[Tensor | None],
    weight_ih: Tensor,
    weight_hh: Tensor | None,
    bias: Tensor | None,
    parameters: Sequence[Tensor],
    inputs: Sequence[Tensor],
    reset: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The tensors that the dispatcher ops take, in their order."""
    h0, compute = states[0], compute_dtype(input.dtype)
    others = [x for x in states[1:] if x is not None]
    if any(x.dtype != others[0].dtype for x in others[1:]):
        others = [x.to(compute) for x in others]
    hidden = weight_ih.shape[0] // cell.gates
    return (
        input,
        h0,
        stacked(others) if others else None,
        weight_ih,
        None if weight_hh is None else dense(weight_hh, hidden),
        bias,
        stacked(parameters) if parameters else None,
        torch.cat([planes(x, input, hidden) for x in inputs], -1) if inputs else None,
        reset if reset is None or reset.dtype == torch.bool else reset.detach().to(compute),
    )


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)) if len(tensors) > 1 else tensors[0].unsqueeze(0)


def dense(weight: Tensor, hidden: int) -> Tensor:
    """[G*H, H] of a block-diagonal [G*H, H/heads]."""
    size = weight.shape[1]
    if size == hidden:
        return weight
    heads = hidden // size
    blocks = weight.view(-1, heads, size, 1, size)
    return (blocks * torch.eye(heads, device=weight.device, dtype=weight.dtype)[:, None, :, None]).reshape(
        -1, hidden
    )


def planes(x: Tensor, input: Tensor, hidden: int) -> Tensor:
    """An input of the steps for each unit."""
    x = x.detach().to(input.dtype)
    return x if x.dim() == input.dim() else x.unsqueeze(-1).expand(*x.shape, hidden)


class CustomCellFunction(torch.autograd.Function):
    """The op under torch.func's transforms and with tangents, which can't enter its C++ autograd function.

    ``(output, h_n, states_n, gates, extra, h)``, the last three for backward, of the dispatcher op's
    arguments. h of every step is empty if it is the output.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return ops.custom_cell_forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        y, _, _, gates, extra, h = output
        ctx.options = inputs[9:]
        ctx.mark_non_differentiable(gates, extra, h)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:9], y if CELLS[inputs[-1]].declared.output == "h" else h, gates, extra)
        ctx.save_for_forward(*inputs[:9])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[:9]
        found = differentiable_tangents(
            lambda *x: by_loop(*x, *inputs[7:], *ctx.options), inputs[:7], tangents[:7]
        )
        return (*found, None, None, None)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
        *inputs, h, gates, extra = ctx.saved_tensors
        grads, nothing = grad_outputs[:3], (None,) * 6  # of step_inputs, reset and the options
        if all(g is None for g in grads):
            return (None,) * 13
        if torch.is_grad_enabled():
            found = differentiable_gradients(
                lambda *x: by_loop(*x, *inputs[7:], *ctx.options), inputs[:7], grads
            )
            return (*found, *nothing)
        needs_input, needs_bias = ctx.needs_input_grad[0], ctx.needs_input_grad[5]
        found = ops.custom_cell_backward(
            *grads, h, gates, extra, *inputs, *ctx.options, needs_input, needs_bias
        )
        needed = zip(found, ctx.needs_input_grad, strict=False)
        return (*(g if is_needed else None for g, is_needed in needed), *nothing)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        row = 1 if args[9] is None else 0  # without batch_sizes the length is the first dimension
        places = {0: row, 1: 0, 2: 1, 7: row, 8: row}
        rows = {i: dim for i, dim in places.items() if args[i] is not None}
        rule = vmap_rows(CustomCellFunction.apply, rows, (row, 0, 1, row, row, row), counts=9)
        return rule(info, in_dims, *args)


def by_loop(
    input: Tensor,
    h0: Tensor | None,
    states: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor | None,
    bias: Tensor | None,
    parameters: Tensor | None,
    step_inputs: Tensor | None,
    reset: Tensor | None,
    batch_sizes: list[int] | None,
    reverse: bool,
    algorithm: str,
    program: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The dispatcher op by the loop of torch's ops."""
    cell = CELLS[program]
    if h0 is None:
        h0 = zero_state(input, weight_ih.shape[0] // cell.gates, batch_sizes)
    if states is None:
        states = h0.new_zeros((len(cell.declared.states), *h0.shape))
    weights = (weight_ih, weight_hh, bias)
    of_cell = [] if parameters is None else list(parameters.unbind(0))
    of_steps = [] if step_inputs is None else list(step_inputs.chunk(len(cell.declared.inputs), -1))
    output, final = run_loop(
        cell, input, [h0, *states.unbind(0)], *weights, of_cell, of_steps, reset, batch_sizes, reverse
    )
    return output, final[0], torch.stack(final[1:]) if final[1:] else states


implement("custom_cell_by_loop", by_loop, "CompositeImplicitAutograd")
