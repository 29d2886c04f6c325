"""The recurrence kernels that run many steps, without a GPU: tests/emulation runs them on the CPU."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cell_examples import CELLS as EXAMPLES
from cell_examples import MIXING, SURROGATES, WITH_WEIGHTS, growing, leaky_rnn, many_levels, signs

from lltm_ext._program import diagonal_blocks

pytestmark = pytest.mark.compiles

ROOT = Path(__file__).parents[1]
EMULATION = ROOT / "tests" / "emulation"
PROGRAM = "persistent_kernels"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
# No strict aliasing: the kernels read a uint4 as floats and as half types.
# -Og: with less optimization the program takes longer to run, and with more the compiler does. A fortified
# longjmp would refuse the stack of another fiber.
FLAGS = ("-std=c++17", "-Og", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")

# A surrogate's slope, which the backward saves, changes up to 50 times as much as the state that it is of. No
# bound on the rounding of other cells' saved values fits it.
# Cells that differ from minGRU, LSTM, GRU or RNN in their formulas only, and not in how their steps run.
AS_MINGRU = {"minlstm", "rg_lru"}
AS_SRU = {"qrnn"}  # whose output is no value that steps hand on
# layer_norm_lstm: a norm of products with an h of zeros, as at first, multiplies rounding errors by 300.
AS_OTHERS = {"cifg", "janet", "layer_norm_lstm", "lltm", "lstm", "peephole_lstm", "rnn_relu", "ugrnn"}
AS_MANY_LEVELS = {"dreamer_gru"}
FROM_PYTHON = {
    name: cell
    for name, cell in EXAMPLES.items()
    if name not in {*SURROGATES, *AS_MINGRU, *AS_SRU, *AS_OTHERS, *AS_MANY_LEVELS}
}
FROM_PYTHON |= MIXING | WITH_WEIGHTS
FROM_PYTHON |= {cell.__name__: cell for cell in (growing, leaky_rnn, many_levels, signs)}
# The package's own cells are written by hand.
WRITTEN = {"LltmCell": "lltm/lltm_cell.h", "LstmCell": "lstm/lstm_cell.h"}
TO_INITIAL = {
    f"{name}_to_initial": FROM_PYTHON[name]
    for name in ("gru_with_recurrent_dropout", "smoothed_lstm", "lstm_of_both_states", "without_product")
}
# Heads of eight units in some weights of the cells' own.
OWN_HEADS = {"dreamer_block_gru": (8, 0, 8), "gru_with_reset_first": (8,), "mogrified": (0, 8, 0)}
WITH_HEADS = {f"{name}_with_heads": FROM_PYTHON[name].with_heads(units) for name, units in OWN_HEADS.items()}
DERIVED = FROM_PYTHON | TO_INITIAL | WITH_HEADS
CELLS = [*WRITTEN, *DERIVED]


def struct_of(name):
    """The C++ name of a cell's struct."""
    return f"lltm_ext::{name}" if name in WRITTEN else f"lltm_ext::cell_{name}::Cell"


def header(names):
    """cells.h: the structs of these cells, and a macro that lists them."""
    lines = ["#pragma once"]
    for name in names:
        if name in WRITTEN:
            lines.append(f'#include "{WRITTEN[name]}"')
        else:
            lines.append('#include "common/math.h"\n#include "recurrence/over_units.h"')
            lines.append(f"namespace lltm_ext::cell_{name} {{\n{DERIVED[name].derived.struct.source}\n}}")
        if name in DERIVED and DERIVED[name].derived.runs_in_parallel:
            lines.append(f"template <> constexpr bool lltm_ext::kIsAffine<{struct_of(name)}> = true;")
        if name in WITH_HEADS:
            units, blocks = diagonal_blocks(DERIVED[name])
            products = enumerate(DERIVED[name].derived.products)
            mask = sum(1 << i for i, product in products if product.block in blocks)
            lines.append(f"template <> constexpr int lltm_ext::kHeadUnits<{struct_of(name)}> = {units};")
            lines.append(
                f"template <> constexpr unsigned lltm_ext::kBlockDiagonal<{struct_of(name)}> = {mask};"
            )
        if name in TO_INITIAL:
            lines.append(f"template <> constexpr bool lltm_ext::kResetsToInitial<{struct_of(name)}> = true;")
    lines.append("#define FOR_ALL_CELLS(F) " + " ".join(f'F("{name}", {struct_of(name)})' for name in names))
    return "\n".join(lines) + "\n"


def start_compiler(folder, names):
    """Starts to compile the program of these cells."""
    folder.mkdir()
    (folder / "cells.h").write_text(header(names))
    # The emulation first: it replaces some of the sources' headers.
    includes = [f"-I{path}" for path in (EMULATION, ROOT / "src", folder)]
    return subprocess.Popen(
        [COMPILER, *FLAGS, *includes, EMULATION / f"{PROGRAM}.cpp", "-o", folder / PROGRAM]
    )


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """The program of each cell. Two have half of the cells each, and are compiled side by side."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp(PROGRAM)
    halves = {folder / "0": CELLS[::2], folder / "1": CELLS[1::2]}
    compilers = [start_compiler(*half) for half in halves.items()]
    assert [compiler.wait() for compiler in compilers] == [0, 0]
    return {name: half / PROGRAM for half, names in halves.items() for name in names}


@pytest.mark.parametrize("cell", CELLS)
def test_the_kernels_compute_what_a_loop_over_the_steps_does(programs, cell):
    done = subprocess.run([programs[cell], cell], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
