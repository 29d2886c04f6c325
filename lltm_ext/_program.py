"""Cells as text, which is how the dispatcher's ops take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lltm_ext._formula.text import program_text

if TYPE_CHECKING:
    from lltm_ext._formula.emit import Struct
    from lltm_ext._to_initial import ResetsToInitial
    from lltm_ext.recurrence import RecurrentCell

CELLS: dict[str, RecurrentCell | ResetsToInitial] = {}  # keyed by their programs, for second derivatives


def compiled(cell: RecurrentCell) -> RecurrentCell:
    """Marks a cell as compiled with the package (src/<its name>): its name is its program."""
    cell.is_compiled = True
    cell.program = cell.half_program = cell.__name__
    CELLS[cell.program] = cell
    return cell


def program_for(cell: RecurrentCell | ResetsToInitial, dtype: torch.dtype) -> str:
    """The program for an input of a dtype."""
    return cell.half_program if dtype.itemsize == 2 else cell.program


def serialize_both(cell: RecurrentCell | ResetsToInitial) -> tuple[str, str]:
    """Returns the cell as two texts: for float32 and float64, and for half types."""
    return serialize(cell, cell.derived.struct), serialize(cell, cell.derived.half_struct)


def serialize(cell: RecurrentCell | ResetsToInitial, struct: Struct) -> str:
    declared, derived = cell.declared, cell.derived
    numbers = (
        declared.gates,
        len(declared.states),
        struct.saved,
        len(declared.parameters),
        len(declared.inputs),
        int(declared.recurrent),
        int(declared.separate),
        int(derived.reads_h),
        declared.output_state,
        int(derived.zeros_stay),
        int(struct.wide_projections),
    )
    program = program_text((cell.__name__, ",".join(map(str, numbers)), struct.source))
    CELLS[program] = cell
    return program
