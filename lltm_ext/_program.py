"""Cells as text, which is how the dispatcher's ops take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lltm_ext._formula.derive import Derived
from lltm_ext._formula.instructions import rounding
from lltm_ext._formula.text import SourceCell, program_text

if TYPE_CHECKING:
    from lltm_ext._formula.emit import Struct
    from lltm_ext.recurrence import RecurrentCell

# Cells by their programs, for second derivatives, and whether these reset to the initial states.
CELLS: dict[str, tuple[RecurrentCell, bool]] = {}

ROUNDED = {torch.float16: "float16", torch.bfloat16: "bfloat16"}  # by an instruction on the CPU


def compiled(cell: RecurrentCell) -> RecurrentCell:
    """A cell whose kernels are compiled with the package (src/<its name>): its name is its program."""
    cell.is_compiled = True
    cell.program = cell.__name__
    cell.programs = dict.fromkeys(cell.programs, cell.program)
    CELLS[cell.program] = cell, False
    return cell


def program_for(cell: RecurrentCell, dtype: torch.dtype, to_initial: bool = False) -> str:
    """The program for an input of a dtype; for a dtype that no op takes any."""
    programs = cell.programs_to_initial if to_initial else cell.programs
    return programs.get(dtype, programs[torch.float32])


def serialize(cell: RecurrentCell, to_initial: bool = False) -> dict[torch.dtype, str]:
    """The cell as text, by the dtype of the input.

    Args:
        to_initial: whether resets lead to the initial states instead of to zeros.
    """
    wide = program_of(cell, cell.derived.struct, to_initial)
    programs = dict.fromkeys((torch.float32, torch.float64), wide)
    for dtype, name in ROUNDED.items():
        struct = cell.derived.half_struct
        if struct.instructions and not cell.derived.runs_in_parallel:
            forward, backward = struct.instructions
            struct = struct._replace(instructions=(rounding(forward, name), backward))
        programs[dtype] = program_of(cell, struct, to_initial)
    return programs


def numbers_of_products(derived: Derived | SourceCell) -> list[int]:
    """What a program says of the products with a cell's own weights (src/custom_cell/program.h)."""
    if isinstance(derived, SourceCell) or not derived.products:
        return []
    fed = derived.fed
    products = ((x.block, fed.index(x.value), x.stage, x.back_stage) for x in derived.products)
    sizes = (len(derived.leaves["w"]), *derived.sizes_of_calls)
    return [*sizes, *(number for product in products for number in product)]


def program_of(cell: RecurrentCell, struct: Struct, to_initial: bool) -> str:
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
        " ".join(map(str, declared.output_states)),
        int(derived.zeros_stay),
        int(struct.wide_projections),
        int(to_initial),
        int(derived.runs_in_parallel),
        int(derived.over_units),
        *numbers_of_products(derived),
    )
    program = program_text((cell.__name__, ",".join(map(str, numbers)), struct.source, *struct.instructions))
    CELLS[program] = cell, to_initial
    return program
