"""Cells as text, which is how the dispatcher's ops take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lltm_ext._formula.instructions import rounding
from lltm_ext._formula.text import SourceCell, program_text

if TYPE_CHECKING:
    from lltm_ext._formula.emit import Struct
    from lltm_ext.recurrence import RecurrentCell

# Cells by their programs, for second derivatives, and whether these reset to the initial states.
CELLS: dict[str, tuple[RecurrentCell, bool]] = {}

# Of a block of a persistent kernel (recurrence/persistent/variants.h), and bits of kBlockDiagonal.
MOST_UNITS, MOST_PRODUCTS = 128, 32

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


def numbers_of_products(cell: RecurrentCell) -> list[int]:
    """What a program says of the products with a cell's own weights (src/custom_cell/program.h)."""
    derived = cell.derived
    if isinstance(derived, SourceCell) or not derived.products:
        return []
    units, blocks = diagonal_blocks(cell)
    of_h, *sizes = derived.sizes_of_calls()
    found = [len(derived.leaves["w"]), of_h, *sizes, units, *derived.sizes_of_calls(blocks)[1:]]
    for x in derived.products:
        found += [x.block, derived.fed.index(x.value), x.stage, x.back_stage, int(x.block in blocks)]
    return found


def diagonal_blocks(cell: RecurrentCell) -> tuple[int, frozenset[int]]:
    """The units of a head in the block-diagonal weights of the cell's own, and the blocks of these weights.

    (0, none) if the heads of weights differ or are larger than a block of units: kernels then gain nothing.
    """
    sizes, derived = set(cell.units_of_heads) - {0}, cell.derived
    if len(sizes) != 1 or max(sizes) > MOST_UNITS:
        return 0, frozenset()
    if isinstance(derived, SourceCell) or len(derived.products) > MOST_PRODUCTS:
        return 0, frozenset()
    first, found = 0, set[int]()
    for units, (rows, columns) in zip(cell.units_of_heads, cell.weights.values(), strict=True):
        found |= set(range(first, first + rows)) if units else set()
        first += rows * columns
    return max(sizes), frozenset(found)


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
        int(derived.bounded),
        *numbers_of_products(cell),
    )
    program = program_text((cell.__name__, ",".join(map(str, numbers)), struct.source, *struct.instructions))
    CELLS[program] = cell, to_initial
    return program
