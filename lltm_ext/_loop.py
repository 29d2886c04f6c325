"""A user's cell in PyTorch's ops: one product for the input of all steps, then a loop over the steps.

It serves derivatives of second order, tangents and exports to ONNX, and every other implementation is
compared with it. Half types are only storage: the arithmetic is in float32. Of the states only h is rounded
at each step, and not in a cell that is affine in its states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from lltm_ext._arguments import SequenceCall, at_next_step, one_bias

if TYPE_CHECKING:
    from lltm_ext.recurrence import RecurrentCell

# The values x, r, h, s, p, u and w of a cell's function, as sequences -> [new h, *new states]
Step = Callable[[Mapping[str, Sequence[Tensor]]], list[Tensor]]
Product = Callable[["Tensor | None", Tensor], Tensor]  # (planes, h) -> planes + h W^T


def run_loop(
    cell: RecurrentCell, call: SequenceCall, to_initial: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Does what :func:`lltm_ext.recurrence.run` does, for arguments that it has checked.

    Args:
        to_initial: whether ``reset`` leads to the initial states instead of to zeros.
    """
    input, states, weight_ih, weight_hh, _, parameters, inputs, reset, batch_sizes, is_reverse, _ = call
    compute = compute_dtype(input.dtype)

    def of_steps(x: Tensor) -> Sequence[Tensor]:
        """Splits x into [rows, width] of each step."""
        x = x if x.dim() == input.dim() else x.unsqueeze(-1)
        return x.unbind(0) if batch_sizes is None else x.split(batch_sizes)

    planes_of_steps = of_steps(planes_of(call))
    inputs_of_steps = [of_steps(x.to(compute)) for x in inputs]
    reset_of_steps = None if reset is None else of_steps(reset)

    current = [x.to(compute) for x in states]
    step = step_of(cell, call, to_initial)
    outputs: list[Tensor] = []
    order = range(len(planes_of_steps))
    for t in reversed(order) if is_reverse else order:
        of_step = [u[t] for u in inputs_of_steps]
        reset_of_step = None if reset_of_steps is None else reset_of_steps[t]
        output, new = step(planes_of_steps[t], current, of_step, reset_of_step)
        outputs.append(output)
        current = [with_first_rows(old, s) for old, s in zip(current, new, strict=True)]

    final = [x.to(s.dtype) for x, s in zip(current, states, strict=True)]
    if not outputs:
        used = (input, weight_ih, weight_hh, one_bias(call.bias, call.bias_hh), *parameters)
        return no_steps(input, len(cell.declared.outputs) * states[0].shape[1], used), final
    outputs = outputs[::-1] if is_reverse else outputs
    return torch.stack(outputs) if batch_sizes is None else torch.cat(outputs), final


def planes_of(call: SequenceCall) -> Tensor:
    """The product of the input of all steps with weight_ih, if there is one, plus the bias."""
    compute, bias = compute_dtype(call.input.dtype), one_bias(call.bias, call.bias_hh)
    wide_bias = None if bias is None else bias.to(compute)
    if call.weight_ih is None:
        planes = call.input.to(compute)
        return planes if wide_bias is None else planes + wide_bias
    return F.linear(call.input.to(compute), call.weight_ih.to(compute), wide_bias)


def step_of(
    cell: RecurrentCell, call: SequenceCall, to_initial: bool = False
) -> Callable[[Tensor, Sequence[Tensor], Sequence[Tensor], Tensor | None], tuple[Tensor, list[Tensor]]]:
    """Returns a step of a call: (planes, states, step inputs, reset) -> (output, new states)."""
    compute = compute_dtype(call.input.dtype)
    hidden = call.states[0].shape[1]
    weight_hh, blocks = call.weight_hh, ()
    if cell.has_own_weights and weight_hh is not None:
        weight_hh, own = weight_hh.tensor_split((cell.gates * hidden,))
        blocks = own.to(compute).unflatten(0, (-1, hidden)).unbind(0)
    product = None if weight_hh is None else product_with(weight_hh.to(compute), hidden)
    parameters = [x.to(compute) for x in call.parameters]
    initial = [x.to(compute) for x in call.states]
    step = cell.step_like(initial[0])

    def run_step(
        planes: Tensor, states: Sequence[Tensor], inputs: Sequence[Tensor], reset: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        products = None
        h, *others = (first_rows(x, planes.shape[0]) for x in states)
        if reset is not None:
            reset_to = [first_rows(x, planes.shape[0]) if to_initial else None for x in initial]
            h, *others = (apply_reset(x, reset, x0) for x, x0 in zip((h, *others), reset_to, strict=True))
        if product is not None and cell.separate:
            products = product(None, h)
        elif product is not None:
            planes = product(planes, h)
        x, r = (
            () if y is None else y.unflatten(1, (cell.gates, hidden)).unbind(1) for y in (planes, products)
        )
        values = {"x": x, "r": r, "h": [h], "s": others, "p": parameters, "u": inputs, "w": blocks}
        new_h, *new_states = step(values)
        stored = compute if cell.derived.runs_in_parallel else call.input.dtype
        new = [like(new_h, h).to(stored), *(like(s, h) for s in new_states)]
        outputs = [new[state + 1] for state in cell.declared.output_states]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        return output.to(call.input.dtype), [s.to(compute) for s in new]

    return run_step


def reference(
    cell: RecurrentCell,
    input: Tensor,
    hx: Sequence[Tensor],
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    reset: Tensor | None,
    reset_to: str,
    reverse: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Runs a cell over a sequence in pure PyTorch, without any checks."""
    if reverse and reset is not None:
        reset = at_next_step(reset, None)
    call = SequenceCall(input, hx, weight_ih, weight_hh, bias, reset=reset, is_reverse=reverse)
    output, final = run_loop(cell, call, to_initial=reset is not None and reset_to == "initial")
    return output, tuple(final)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_with(weight: Tensor, hidden: int) -> Product:
    """The product with ``weight``, [G*H, H], or block-diagonal [G*H, H/heads]."""
    size = weight.shape[1]
    if size == hidden:
        transposed = weight.t()
        return lambda planes, h: h @ transposed if planes is None else torch.addmm(planes, h, transposed)

    by_head = weight.unflatten(0, (-1, hidden // size, size))  # [G, heads, H/heads, H/heads]
    blocks = by_head.permute(1, 3, 0, 2).flatten(2)

    def product(planes: Tensor | None, h: Tensor) -> Tensor:
        found = torch.bmm(h.unflatten(1, (-1, size)).transpose(0, 1), blocks)  # [heads, rows, G*H/heads]
        found = found.unflatten(2, (-1, size)).permute(1, 2, 0, 3).flatten(1)
        return found if planes is None else planes + found

    return product


def apply_reset(x: Tensor, reset: Tensor, initial: Tensor | None = None) -> Tensor:
    """Returns a state after ``reset`` [rows, 1] to ``initial``, by default zeros.

    True and 1 also replace NaN and infinities.
    """
    if reset.dtype == torch.bool:
        return x.masked_fill(reset, 0) if initial is None else torch.where(reset, initial, x)
    share = reset.to(x.dtype)
    old = scale_by_mask(x, 1 - share)
    return old if initial is None else old + scale_by_mask(initial, share)


def scale_by_mask(x: Tensor, share: Tensor) -> Tensor:
    """Returns ``x * share``, but 0 where share is 0, even for NaN and infinities."""
    return (x * share).masked_fill(share == 0, 0)


def zero_state(input: Tensor, hidden_size: int, batch_sizes: list[int] | None) -> Tensor:
    """An initial state of zeros [B, H] for a sequence of [T, B, I], or of packed rows."""
    batch = input.shape[1] if batch_sizes is None else batch_sizes[0] if batch_sizes else 0
    return input.new_zeros((batch, hidden_size))


def first_rows(x: Tensor, rows: int) -> Tensor:
    return x if x.shape[0] == rows else x[:rows]


def like(x: Tensor, h: Tensor) -> Tensor:
    """Expands a value that the cell computed, which may be the same for all rows."""
    return x if x.shape == h.shape else x.expand_as(h)


def with_first_rows(old: Tensor, new: Tensor) -> Tensor:
    rows = new.shape[0]
    return new if rows == old.shape[0] else torch.cat([new, old[rows:]])


def no_steps(input: Tensor, width: int, used: Sequence[Tensor | None]) -> Tensor:
    """The output of no steps, whose gradients with respect to the arguments used are zeros."""
    zero = sum(x.flatten()[:0].sum().to(input.dtype) for x in used if x is not None)
    return input.new_zeros(*input.shape[:-1], width) + zero
