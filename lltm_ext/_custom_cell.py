"""Cells over sequences by kernels: the ops of src/custom_cell, and their rules under torch.func.

The argument ``program`` of the dispatcher ops ``lltm_ext::custom_cell*`` is the cell as text, so that
torch.compile and torch.export trace a call as one op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lltm_ext._arguments import SequenceCall, hidden_of, units_of
from lltm_ext._C import custom_cell as _C  # noqa: F401  registers the ops
from lltm_ext._library import (
    differentiable_gradients,
    differentiable_tangents,
    has_tangents,
    implement,
    ops,
    under_transforms,
    vmap_loop,
    vmap_rows,
)
from lltm_ext._loop import compute_dtype, run_loop, zero_state
from lltm_ext._program import CELLS, program_for

if TYPE_CHECKING:
    from lltm_ext.recurrence import RecurrentCell

unsafe_view: Callable[..., Tensor] = torch.ops.aten._unsafe_view.default
tracing_state: Callable[[], Any] = torch._C._get_tracing_state  # None unless torch.jit.trace runs
Found = tuple[Tensor, list[Tensor]]  # the output, and the final states


def run_kernels(
    cell: RecurrentCell,
    call: SequenceCall,
    algorithm: str,
    dtype: torch.dtype,
    to_initial: bool = False,
) -> Found:
    """Does what :func:`lltm_ext.recurrence.run` does, for arguments that the ops check.

    Args:
        dtype: the dtype of the computation, which autocast may give.
        to_initial: whether resets lead to the initial states, which are all given, instead of to zeros.
    """
    program = program_for(cell, dtype, to_initial)
    op = ops.custom_cell if forward_ad._current_level < 0 or not has_tangents() else transformed
    how = (call.batch_sizes, call.is_reverse, algorithm, program, call.bias_hh)
    output, h_n, states_n = op(*op_arguments(cell, call), *how)
    if len(call.states) == 2 and call.states[1] is not None:
        return output, [h_n, states_n]
    return output, [h_n, *states_of_op(call, h_n, states_n)]


def run_both_by_kernels(
    cell: RecurrentCell, calls: Sequence[SequenceCall], dtype: torch.dtype, to_initial: bool
) -> list[Found]:
    """Like :func:`run_kernels` for both directions of a layer, side by side if the GPU has room for both."""
    directions = ([*op_arguments(cell, call)[1:], call.bias_hh] for call in calls)
    options = (calls[0].batch_sizes, "auto", program_for(cell, dtype, to_initial))
    op = transformed_both if has_tangents() else ops.custom_cell_bidirectional
    y = op(calls[0].input, *directions, *options)
    found = []
    for i, call in enumerate(calls):
        output, h_n, states_n = y[3 * i : 3 * i + 3]
        found.append((output, [h_n, *states_of_op(call, h_n, states_n)]))
    return found


def states_of_op(call: SequenceCall, h_n: Tensor, states_n: Tensor) -> list[Tensor]:
    """The states besides h that the op returns, as a caller of the cell gets them: in their dtypes."""
    given = call.states[1:]
    if not given:  # torch.export saves no program that unbinds nothing
        return []
    if len(given) == 1:  # in place: a view cannot be detached in place, and takes longer
        return [states_n if given[0] is not None else states_n.squeeze_(0)]
    pairs = zip(states_n.unbind(0), given, strict=True)
    return [y if x is None else y.to(x.dtype) for y, x in pairs]


def algorithm_of(
    cell: RecurrentCell,
    call: SequenceCall,
    algorithm: str,
    dtype: torch.dtype,
    to_initial: bool,
    backward: bool,
) -> str:
    """The algorithm of a call of :func:`run_kernels` on padded input."""
    how = (None, call.is_reverse, algorithm, program_for(cell, dtype, to_initial), backward)
    return ops.custom_cell_algorithm(*op_arguments(cell, call), *how)


def op_arguments(cell: RecurrentCell, call: SequenceCall) -> tuple[Tensor | None, ...]:
    """The tensors that the dispatcher ops take, in their order."""
    input, states, weight_ih, weight_hh, bias, parameters, inputs, reset, *_ = call
    if reset is not None and reset.dtype != torch.bool:
        reset = reset.detach().to(compute_dtype(input.dtype))
    own = cell.recurrent_gates
    if weight_hh is not None and not cell.has_own_weights and len(own) < cell.gates:
        weight_hh = expand_gates(weight_hh, own, cell.gates)
    return (
        input,
        states[0],
        (states[1] if len(states) == 2 else states_of(states[1:], input)) if len(states) > 1 else None,
        weight_ih,
        weight_hh,
        bias,
        parameters if isinstance(parameters, Tensor) else stacked(parameters) if parameters else None,
        step_inputs_of(inputs, input, hidden_of(call, cell.gates)) if inputs else None,
        reset,
    )


def states_of(states: Sequence[Tensor | None], input: Tensor) -> Tensor | None:
    """The states besides h as one tensor: a single one as it is."""
    given = [x for x in states if x is not None]
    if len(given) < 2:
        return given[0] if given else None
    if any(x.dtype != given[0].dtype for x in given[1:]):
        given = [x.to(compute_dtype(input.dtype)) for x in given]
    return torch.stack(given)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)) if len(tensors) > 1 else tensors[0].unsqueeze(0)


def expand_gates(weight: Tensor, own: list[int], gates: int) -> Tensor:
    """[G*H, H] of the rows of its ``own`` gates: zeros for the others. torch.jit.script compiles it."""
    blocks = list(weight.chunk(len(own)))
    zeros = torch.zeros_like(blocks[0])
    return torch.cat([blocks[own.index(gate)] if gate in own else zeros for gate in range(gates)])


def expand_blocks(weight: Tensor, heads: int) -> Tensor:
    """[G*H, H] of a block-diagonal [G*H, H/heads]."""
    size = weight.shape[1]
    blocks = weight.view(-1, heads, size, 1, size)
    diagonal = torch.eye(heads, device=weight.device, dtype=weight.dtype)[:, None, :, None]
    return (blocks * diagonal).reshape(-1, heads * size)


def step_inputs_of(inputs: Sequence[Tensor], input: Tensor, hidden: int) -> Tensor:
    """The inputs of the steps: [..., K * H], or [..., K] if all units share each."""
    planes = [
        x if x.dtype == input.dtype and not x.requires_grad else x.detach().to(input.dtype) for x in inputs
    ]
    if all(x.dim() < input.dim() for x in planes):
        return planes[0].unsqueeze(-1) if len(planes) == 1 else torch.stack(planes, -1)
    return torch.cat([of_each_unit(x, input, hidden) for x in planes], -1)


def of_each_unit(x: Tensor, input: Tensor, hidden: int) -> Tensor:
    """An input of the steps as [..., H]."""
    return x if x.dim() == input.dim() else x.unsqueeze(-1).expand(*x.shape, hidden)


def h_of_steps(output: Tensor, h: Tensor) -> Tensor:
    """h of every step, from the results of an op that saves them for backward."""
    return h if h.shape[-1] > 0 else output


class CustomCellFunction(torch.autograd.Function):
    """The op under torch.func's transforms and with tangents, which can't enter its C++ autograd function.

    It returns ``(output, h_n, states_n, gates, extra, h)`` for the dispatcher op's arguments. The last three
    are for backward; h of every step is empty if it is the output.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return ops.custom_cell_forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        y, _, _, gates, extra, h = output
        *tensors, batch_sizes, reverse, algorithm, program, bias_hh = inputs
        ctx.options = (batch_sizes, reverse, algorithm, program)
        ctx.mark_non_differentiable(gates, extra, h)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, bias_hh, h_of_steps(y, h), gates, extra)
        ctx.save_for_forward(*tensors, bias_hh)

    @staticmethod
    def composed(
        options: tuple[Any, ...], tensors: Sequence[Tensor | None]
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Returns the op by the loop as a function of its differentiable arguments, and these arguments."""
        *_, step_inputs, reset, bias_hh = tensors
        differentiable = [*tensors[:7], bias_hh]
        fixed = (step_inputs, reset, *options)

        def function(*x: Any) -> Any:
            return by_loop(*x[:7], *fixed, x[7])  # type: ignore[call-arg]

        return function, differentiable

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        function, inputs = CustomCellFunction.composed(ctx.options, ctx.saved_tensors[:10])
        found = differentiable_tangents(function, inputs, (*tangents[:7], tangents[13]))
        return (*found, None, None, None)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
        *tensors, bias_hh, h, gates, extra = ctx.saved_tensors
        grads, nothing = grad_outputs[:3], (None,) * 6  # none for step_inputs, reset and options
        if all(g is None for g in grads):
            return (None,) * 14
        if torch.is_grad_enabled():
            function, inputs = CustomCellFunction.composed(ctx.options, [*tensors, bias_hh])
            *found, of_second = differentiable_gradients(function, inputs, grads)
            return (*found, *nothing, of_second)
        needed = ctx.needs_input_grad
        how = (*ctx.options, needed[0], needed[5] or needed[13])
        computed = ops.custom_cell_backward(*grads, h, gates, extra, *tensors, *how)
        first = [g if is_needed else None for g, is_needed in zip(computed, needed, strict=False)]
        return (*first, *nothing, computed[5].clone() if needed[13] else None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        row = 1 if args[9] is None else 0  # without batch_sizes the length is the first dimension
        states = 1 if args[2] is None else args[2].dim() - (in_dims[2] is not None) - 2
        places = {0: row, 1: 0, 2: states, 7: row, 8: row}
        rows = {i: dim for i, dim in places.items() if args[i] is not None}
        rule = vmap_rows(CustomCellFunction.apply, rows, (row, 0, states, row, row, row), counts=9)
        return rule(info, in_dims, *args)


def transformed(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the op under transforms and with tangents."""
    return CustomCellFunction.apply(*args, *[None] * (14 - len(args)))[:3]


def transformed_both(
    input: Tensor,
    forward: Sequence[Any],
    reverse: Sequence[Any],
    batch_sizes: Any,
    *how: Any,
    op: Callable[..., tuple[Tensor, ...]] = transformed,
) -> list[Tensor]:
    """Runs the op of both directions under transforms, or as another function does, as two calls."""
    both = ((forward, False), (reverse, True))
    return [
        y
        for (*tensors, bias_hh), is_reverse in both
        for y in op(input, *tensors, batch_sizes, is_reverse, *how, bias_hh)
    ]


def transformed_both_backward(
    grads: Sequence[Any],
    input: Tensor,
    forward: Sequence[Any],
    reverse: Sequence[Any],
    saved: Sequence[Tensor],
    batch_sizes: Any,
    algorithm: str,
    program: str,
    *needed: bool,
) -> list[Tensor]:
    found = []
    for i, direction in enumerate((forward, reverse)):
        own, how = slice(3 * i, 3 * i + 3), (batch_sizes, i == 1, algorithm, program)
        given = (*grads[own], *saved[own], input, *direction[:8], *how)
        found.append(ops.custom_cell_backward(*given, *needed))
    (first, *of_forward), (second, *of_reverse) = found
    return [first + second, *of_forward, *of_reverse]


def by_loop(
    input: Tensor,
    h0: Tensor | None,
    states: Tensor | None,
    weight_ih: Tensor | None,
    weight_hh: Tensor | None,
    bias: Tensor | None,
    parameters: Tensor | None,
    step_inputs: Tensor | None,
    reset: Tensor | None,
    batch_sizes: list[int] | None,
    reverse: bool,
    algorithm: str,
    program: str,
    bias_hh: Tensor | None = None,
    *,
    run: Callable[[Any, SequenceCall, bool], Found] = run_loop,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the dispatcher op by the loop of torch's ops, or by another function like :func:`run_loop`."""
    cell, to_initial = CELLS[program]
    declared = cell.declared
    if h0 is None:
        h0 = zero_state(input, units_of(input, weight_ih, cell.gates), batch_sizes)
    is_one = states is not None and states.dim() == 2
    if states is None:
        states = h0.new_zeros((len(declared.states), *h0.shape))
    others = [states] if is_one else list(states.unbind(0))
    of_cell = [] if parameters is None else list(parameters.view(len(declared.parameters), -1).unbind(0))
    of_steps = [] if step_inputs is None else list(step_inputs.chunk(len(declared.inputs), -1))
    weights, how = (weight_ih, weight_hh, bias), (reset, batch_sizes, reverse, bias_hh)
    call = SequenceCall(input, [h0, *others], *weights, of_cell, of_steps, *how)  # type: ignore[arg-type]
    output, (h_n, *final) = run(cell, call, to_initial)
    return output, h_n, final[0] if is_one else torch.stack(final) if final else states


implement("custom_cell_by_loop", by_loop, "CompositeImplicitAutograd")
under_transforms("custom_cell", transformed)
under_transforms("custom_cell_bidirectional", transformed_both)
under_transforms("custom_cell_bidirectional_backward", transformed_both_backward)
# is_grads_batched=True of torch.autograd has its own vmap, which does not know ops that return lists.
implement("custom_cell_bidirectional_backward", transformed_both_backward, "Batched")
implement("custom_cell_backward", lambda *args: list(ops.custom_cell_gradients(*args)), "Batched")
torch.library.register_vmap("lltm_ext::custom_cell_backward", vmap_loop(ops.custom_cell_backward))
