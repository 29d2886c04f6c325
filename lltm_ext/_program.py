"""Cells as text, which is how the dispatcher's ops take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lltm_ext._formula.instructions import rounding
from lltm_ext._formula.text import program_text

if TYPE_CHECKING:
    from lltm_ext._formula.emit import Struct
    from lltm_ext._to_initial import ResetsToInitial
    from lltm_ext.recurrence import RecurrentCell

CELLS: dict[str, RecurrentCell | ResetsToInitial] = {}  # keyed by their programs, for second derivatives


ROUNDED = {torch.float16: "float16", torch.bfloat16: "bfloat16"}  # by an instruction on the CPU


def compiled(cell: RecurrentCell) -> RecurrentCell:
    """A cell whose kernels are compiled with the package (src/<its name>): its name is its program."""
    cell.is_compiled = True
    cell.program = cell.__name__
    cell.programs = dict.fromkeys(cell.programs, cell.program)
    CELLS[cell.program] = cell
    return cell


def program_for(cell: RecurrentCell | ResetsToInitial, dtype: torch.dtype) -> str:
    """The program for an input of a dtype; for a dtype that no op takes any."""
    return cell.programs.get(dtype, cell.program)


def serialize(cell: RecurrentCell | ResetsToInitial) -> dict[torch.dtype, str]:
    """The cell as text, by the dtype of the input."""
    programs = dict.fromkeys((torch.float32, torch.float64), program_of(cell, cell.derived.struct))
    for dtype, name in ROUNDED.items():
        struct = cell.derived.half_struct
        if struct.instructions:
            forward, backward = struct.instructions
            struct = struct._replace(instructions=(rounding(forward, name), backward))
        programs[dtype] = program_of(cell, struct)
    return programs


def program_of(cell: RecurrentCell | ResetsToInitial, struct: Struct) -> str:
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
    program = program_text((cell.__name__, ",".join(map(str, numbers)), struct.source, *struct.instructions))
    CELLS[program] = cell
    return program
