"""Turns a cell with resets to the initial states into one without resets: kernels reset to zeros only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from lltm_ext._arguments import SequenceCall, at_next_step
from lltm_ext._loop import Step, apply_reset
from lltm_ext._program import serialize_both

if TYPE_CHECKING:
    from lltm_ext._formula.emit import Struct
    from lltm_ext.recurrence import RecurrentCell

# src/recurrence/to_initial.h
SOURCE = """\
namespace own {{
{source}
}}
using Cell = ResetsToInitial<own::Cell>;
"""


class Derived(NamedTuple):
    """What kernels know about a cell (:class:`lltm_ext._formula.derive.Derived`)."""

    reads_h: bool
    zeros_stay: bool
    struct: Struct
    half_struct: Struct


def around(own: Struct) -> Struct:
    return own._replace(source=SOURCE.format(source=own.source))


class ResetsToInitial:
    """A cell whose steps hand on what the row's next step starts from.

    That is their result, or at a reset the initial h and states. So no step has to reset what it gets, and
    the product sees the h that the next step starts from.

    The states are the cell's, then the output of the step, which no step reads, then the initial h and
    states, which do not change and collect their gradients. The step inputs are the cell's and then the next
    step's reset.

    It has the attributes of a :class:`~lltm_ext.RecurrentCell` that kernels and loop use.
    """

    def __init__(self, cell: RecurrentCell):
        self.cell, self.__name__ = cell, cell.__name__
        self.gates, self.separate = cell.gates, cell.separate
        states = (*cell.states, "_output", "_h0", *(f"_{name}0" for name in cell.states))  # none is a user's
        inputs = (*cell.inputs, "_reset")
        self.declared = cell.declared._replace(states=states, inputs=inputs, output="_output")
        own = cell.derived
        structs = (around(struct) for struct in (own.struct, own.half_struct))
        self.derived = Derived(own.reads_h, own.zeros_stay, *structs)
        self.program, self.half_program = serialize_both(self)

    def step_like(self, x: Tensor) -> Step:
        """A step on whole tensors, like :meth:`lltm_ext.RecurrentCell.step_like`."""
        step, count = self.cell.step_like(x), len(self.cell.states)

        def with_reset(values: Mapping[str, Sequence[Tensor]]) -> list[Tensor]:
            own, initial = values["s"][:count], values["s"][count + 1 :]
            *of_cell, reset = values["u"]
            new = step({**values, "s": own, "u": of_cell})
            output = new[self.cell.declared.output_state + 1]
            return [
                *(apply_reset(y, reset, y0) for y, y0 in zip(new, initial, strict=True)),
                output,
                *initial,
            ]

        return with_reset


def resets_as_inputs(cell: RecurrentCell, call: SequenceCall) -> tuple[ResetsToInitial, SequenceCall]:
    """Turns a call with resets to its initial states into one of the other cell without resets.

    The first final states are the cell's, because no reset follows a row's last step.
    """
    states = call.states
    output = states[0].detach()  # any values do: nothing reads it before the first step
    later = at_next_step(call.reset, call.batch_sizes, call.is_reverse)
    return cell.to_initial, call._replace(
        states=[*states, output, *states], inputs=[*call.inputs, later], reset=None
    )
