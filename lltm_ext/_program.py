"""Cells as text, which is how the dispatcher's ops take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lltm_ext._text import SEPARATOR

if TYPE_CHECKING:
    from lltm_ext._to_initial import ToInitial
    from lltm_ext.recurrence import RecurrentCell

CELLS: dict[str, RecurrentCell | ToInitial] = {}  # by their programs, for derivatives of second order


def program_of(cell: RecurrentCell | ToInitial) -> str:
    """The cell as text."""
    declared, derived = cell.declared, cell.derived
    numbers = (
        declared.gates,
        len(declared.states),
        len(derived.saved),
        len(declared.parameters),
        len(declared.inputs),
        int(declared.recurrent),
        int(declared.separate),
        int(derived.reads_h),
        declared.output_state,
        int(derived.zeros_stay),
    )
    program = SEPARATOR.join((cell.__name__, ",".join(map(str, numbers)), derived.source))
    CELLS[program] = cell
    return program
