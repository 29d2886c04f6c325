"""Own cells without a GPU: the C++ that runs them on tensors, step by step, on the CPU.

src/custom_cell/custom_cell.cpp is compiled with steps that are plain loops over units. It registers its ops
under another name, torch.ops.lltm_ext_on_cpu. lltm_ext._custom_cell calls these instead of those for CUDA,
and is compared with the loop of torch's ops.
"""

import functools
import importlib
import os
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from cell_examples import (
    SURROGATES,
    TEXTS,
    WITH_OUTPUT,
    WITH_WEIGHTS,
    Example,
    everything,
    without_product,
)
from op_suite import (
    BACKWARD,
    DOUBLE,
    FORWARD,
    Call,
    Make,
    OpSuite,
    added_units,
    assert_all_near,
    assert_same_bits,
    cotangents,
    forward_and_gradients,
    sum_of_squares,
)
from sequence_suite import no_tensor, of_dtype, of_shape
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode

import lltm_ext
from lltm_ext import _custom_cell, _layers, cells
from lltm_ext._arguments import SequenceCall
from lltm_ext._custom_cell import CustomCellFunction, op_arguments
from lltm_ext._formula.text import LINE, SEPARATOR
from lltm_ext._loop import compute_dtype, run_loop
from lltm_ext._program import program_for

pytestmark = pytest.mark.compiles

SOURCES = Path(__file__).parents[1] / "src"
PACKED = [20, 20, 13, 9, 2, 1]

# ---- cells of every shape


@lltm_ext.recurrence(gates=3, states=("c",))
def nothing_saved(x, s):
    return 0.5 * x[2] - x[0], (0.95 * s.c + x[1],)


@lltm_ext.recurrence(gates=2, separate=True, recurrent=True)
def unused_projection(x, r):
    return torch.tanh(r[0]) * r[1] + x[1]


@lltm_ext.recurrence(gates=2, states=("y",), inputs=("mask",), output="y")
def unread_output(x, u):
    y = torch.sigmoid(x[0]) * torch.tanh(x[1])
    return u.mask * y, (y,)


# As cells of a user: those of the package have kernels for the CPU.
lltm, lstm = (
    lltm_ext.recurrence(gates=cell.gates, states=cell.states)(cell.function)
    for cell in (cells.lltm, cells.lstm)
)
OWN = (lltm, lstm, everything, without_product, nothing_saved, unused_projection)
OWN += (*WITH_OUTPUT.values(), *WITH_WEIGHTS.values())
CELLS = {name: getattr(cells, name) for name in cells.__all__} | {cell.__name__: cell for cell in OWN}
CELLS = {name: cell for name, cell in CELLS.items() if not cell.derived.over_units}  # no step of one unit
COMPILED = [*CELLS.values(), unread_output]
FEW = [cells.gru, cells.slstm, *OWN]
WITH_EPISODES = [cells.rnn_tanh, *FEW]  # that are compiled with resets to initial states
TO_INITIAL = [*WITH_EPISODES, *TEXTS.values()]
EVERY_RESET = [(cell, "zeros") for cell in CELLS.values()] + [(cell, "initial") for cell in WITH_EPISODES]
MANY_RESETS = [(cell, reset_to) for cell in FEW for reset_to in ("zeros", "initial")]
every_cell = pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
DIFFERENTIABLE = [name for name in CELLS if name not in SURROGATES]
of_many_shapes, with_episodes = (
    pytest.mark.parametrize("cell", chosen, ids=lambda c: c.__name__) for chosen in (FEW, WITH_EPISODES)
)
with_every_reset, with_many_resets = (
    pytest.mark.parametrize("cell,reset_to", chosen, ids=lambda x: getattr(x, "__name__", x))
    for chosen in (EVERY_RESET, MANY_RESETS)
)

# ---- the ops on the CPU

# Replaces src/custom_cell/kernels.h.
KERNELS = """
#pragma once

#include <map>
#include <string>

#include "common/dispatch.h"
#include "common/math.h"
#include "custom_cell/program.h"
#include "recurrence/persistent/launch.h"
#include "recurrence/stepwise/single_step.h"
#include "recurrence/stepwise/step.h"

namespace lltm_ext {

template <class Cell, typename T>
void run_unit(const StepForwardArguments<T>& step, int64_t b, int64_t j) {
  step_unit<Cell, ExactMath>(step, b, j);
}
template <class Cell, typename T>
void run_unit(const StepBackwardArguments<T>& step, int64_t b, int64_t j) {
  CellGradients<Cell, acc_t<T>> grads;
  step_unit<Cell, ExactMath>(step, b, j, grads, step.grad_old_states);
  store_gradients<Cell>(step, b, j, grads);
}

// A stage that ends in products with the cell's own weights, or the step.
template <class Cell, int kStage = 0, template <typename...> class Arguments, typename T, typename... Rest>
void run_stage(const Arguments<T, Rest...>& step, int stage, int stages) {
  constexpr int kMostStages = kProductsOf<Cell> == 0 ? 0 : 5;
  if constexpr (kStage < kMostStages) {
    if (stage < stages && stage > kStage) return run_stage<Cell, kStage + 1>(step, stage, stages);
  }
  for (int64_t b = 0; b < step.batch; ++b) {
    for (int64_t j = 0; j < step.hidden; ++j) {
      if (stage == stages) {
        run_unit<Cell>(step, b, j);
      } else if constexpr (kStage < kMostStages) {
        CellInputs<Cell, acc_t<T>> in;
        feed_unit<Cell, ExactMath, kStage>(step, b, j, in);
      }
    }
  }
}

// The steps of all cells, by their sources, and of those that reset to the initial states, with a suffix.
constexpr const char* kToInitial = "// to initial";
template <class Step>
using Steps = std::map<std::string, void (*)(const Step&, int stage, int stages)>;
template <class Step>
Steps<Step>& steps() {
  static Steps<Step> of_cells;
  return of_cells;
}

template <class Cell, typename T>
void add_steps(const std::string& source) {
  const auto run = [](const auto& step, int stage, int stages) { run_stage<Cell>(step, stage, stages); };
  steps<StepForwardArguments<T>>()[source] = run;
  steps<StepBackwardArguments<T>>()[source] = run;
}

template <class Cell>
bool add_cell(const std::string& source) {
  add_steps<Cell, float>(source);
  add_steps<Cell, double>(source);
  add_steps<Cell, at::Half>(source);
  add_steps<Cell, at::BFloat16>(source);
  return true;
}

class CellOp {
 public:
  CellOp(const CellProgram& program, bool, bool) : program_(program) {}

  std::string name() const { return program_.name; }
  CellShape shape() const { return program_.shape; }
  static const char* states_name() { return "states"; }
  static bool is_compiled(const char*) { return false; }
  static bool runs_in_float32(const at::Tensor&) { return false; }  // as on CUDA
  // Units are added here too, as for the kernels of CUDA.
  static constexpr bool needs_multiple_of_8(const at::Tensor&) { return true; }
  bool zeros_stay() const { return program_.zeros_stay; }
  void check_device(const at::Tensor&) const {}
  template <class Sequences>
  cudaError_t launch(const Sequences& sequences, const Plan& plan, cudaStream_t stream) const;

  const std::vector<CellProduct>& products() const { return program_.products; }
  int stages(bool backward) const { return program_.stages(backward); }

  template <typename T>
  void step(const StepForwardArguments<T>& step, int stage) const {
    run(step, stage, stages(/*backward=*/false));
  }
  template <typename T>
  void step(const StepBackwardArguments<T>& step, int stage) const {
    run(step, stage, stages(/*backward=*/true));
  }

 private:
  template <class Step>
  void run(const Step& step, int stage, int stages) const {
    steps<Step>().at(program_.code + (shape().resets_to_initial ? kToInitial : ""))(step, stage, stages);
  }

  const CellProgram& program_;
};

}  // namespace lltm_ext
"""
OPS = """
#define lltm_ext lltm_ext_on_cpu  // the namespace of the functions, and of the ops
#undef TORCH_EXTENSION_NAME       // no Python module
#include "custom_cell/formula.cpp"
#include "custom_cell/program.cpp"
#include "custom_cell/check.cpp"
#include "custom_cell/forward.cpp"
#include "custom_cell/backward.cpp"
"""
CELL = """
namespace lltm_ext::cell_{number} {{
{source}
}}
template <>
constexpr bool lltm_ext::kResetsToInitial<lltm_ext::cell_{number}::Cell> = {11};
namespace lltm_ext::cell_{number} {{
const bool added = add_cell<Cell>(R"source({source})source" + std::string({11} ? kToInitial : ""));
constexpr CellShape shape = kCellShape<Cell>;
static_assert(shape.gates == {0} && shape.states == {1} && shape.saved == {2} && shape.parameters == {3});
static_assert(shape.step_inputs == {4} && shape.recurrent == {5} && shape.separate == {6});
static_assert(shape.reads_h == {7} && shape.outputs_h == {outputs_h} && shape.outputs == {outputs});
}}  // namespace lltm_ext::cell_{number}
"""


def text_of(number, struct):
    numbers, source = (text.replace(LINE, "\n") for text in struct)
    sizes = numbers.split(",")
    outputs = sizes[8].split()
    of_outputs = {"outputs": len(outputs), "outputs_h": int(outputs == ["-1"])}
    return CELL.format(*sizes, number=number, source=source, **of_outputs)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        pytest.skip(f"needs {compiler} to compile the ops for the CPU")
    folder = tmp_path_factory.mktemp("steps")
    (folder / "custom_cell").mkdir()
    (folder / "custom_cell/kernels.h").write_text(KERNELS)
    files = [SOURCES / f"custom_cell/{name}.cpp" for name in ("custom_cell", "custom_cell_autograd")]
    ops = "\n".join(file.read_text() for file in files).replace('"lltm_ext::', '"lltm_ext_on_cpu::')
    programs = [x for cell in COMPILED for x in cell.programs.values()]
    programs += [x for cell in TO_INITIAL for x in cell.programs_to_initial.values()]
    programs = (x.split(SEPARATOR) for x in programs)
    sources = dict.fromkeys((numbers, source) for _, numbers, source, *_ in programs)
    (folder / "ops.cpp").write_text(OPS + ops + "".join(text_of(*x) for x in enumerate(sources)))
    start = time.perf_counter()
    cpp_extension.load(
        "lltm_ext_on_cpu",
        [str(folder / "ops.cpp")],
        extra_cflags=[
            "-O1",
            "-g0",
            "-fvisibility=hidden",
            "-D_GLIBCXX_ASSERTIONS",
            "-DAT_PER_OPERATOR_HEADERS",
        ],
        extra_include_paths=[str(folder), str(SOURCES)],  # its kernels.h comes first
        build_directory=str(folder),
        is_python_module=False,
    )
    print(f"\nbuilt the ops for the CPU in {time.perf_counter() - start:.0f} s")
    library = torch.library.Library("lltm_ext_on_cpu", "FRAGMENT")
    library.impl("custom_cell_by_loop", _custom_cell.by_loop, "CompositeImplicitAutograd")
    library.impl("custom_cell", _custom_cell.transformed, "FuncTorchDynamicLayerFrontMode")
    yield torch.ops.lltm_ext_on_cpu


recurrence = importlib.import_module("lltm_ext.recurrence")


def by_loop(cell, call, algorithm, reset_to):
    """As recurrence.run, in the loop of torch's ops."""
    return run_loop(cell, recurrence.with_states(cell, call), reset_to == "initial")


def both_by_loop(cell, calls, reset_to):
    return [by_loop(cell, call, "auto", reset_to) for call in calls]


@pytest.fixture(autouse=True)
def ops(compiled, monkeypatch):
    """Kernels run the calls, as on CUDA."""
    monkeypatch.setattr(_custom_cell, "ops", compiled)
    return compiled


def op_arguments_of(example):
    """Those of lltm_ext_on_cpu::custom_cell."""
    tensors = op_arguments(example.cell, SequenceCall(*example.call.args, example.inputs, example.reset))
    return Call(*tensors, example.sizes, False, "auto", program_for(example.cell, example.dtype))


reverse = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])

# ---- values and gradients


@every_cell
def test_values_and_gradients_equal_the_loop(cell, dtype):
    Example(cell, dtype, length=7, batch=5, hidden=33).check()


@every_cell
@reverse
def test_packed_rows(cell, dtype, reverse):
    Example(cell, dtype, hidden=9, sizes=PACKED).check(reverse=reverse)


@with_every_reset
@reverse
@pytest.mark.parametrize("reset", [torch.bool, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [None, PACKED], ids=["padded", "packed"])
def test_resets(cell, reset_to, sizes, reset, reverse):
    Example(cell, length=6, sizes=sizes, reset=reset, reset_to=reset_to).check(reverse=reverse)


@with_every_reset
def test_resets_in_every_dtype(cell, reset_to, dtype):
    for reset in (torch.bool, torch.float32) if reset_to == "initial" else (torch.float32,):
        example = Example(cell, dtype, length=9, batch=6, hidden=16, reset=reset, reset_to=reset_to)
        example.check()
        input, (h0, *states), *others = example.call.args
        if states and reset_to == "initial":
            example.check(Call(input, [h0, *(x.to(compute_dtype(dtype)) for x in states)], *others))


class HiddenSizes(TorchDispatchMode):
    """Of the sequences that run."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "custom_cell_forward" in str(function):
            self.found.append(args[1].shape[1])
        return function(*args, **(kwargs or {}))


@added_units
@pytest.mark.parametrize(
    "cell,dtype,length,expected",
    [
        (cells.gru, torch.float32, 8, 16),
        (cells.gru, torch.bfloat16, 8, 16),
        (cells.gru, torch.float32, 7, 9),  # copies of the weights would take longer
        (cells.gru, DOUBLE, 8, 9),
        (cells.slstm, torch.float32, 8, 9),  # whose n grows from zero
        (without_product, torch.float32, 8, 9),
    ],
)
def test_units_of_zeros_are_added(cell, dtype, length, expected):
    example = Example(cell, dtype, length, hidden=9)
    with HiddenSizes() as sizes:
        example.call.leaves().run(example.ours)
    assert sizes.found == [expected]


@added_units
@every_cell
@reverse
@pytest.mark.parametrize("sizes", [None, [4] * 7 + [2, 1]], ids=["dense", "packed"])
@pytest.mark.parametrize("reset", [None, torch.bool, torch.float32], ids=str)
def test_units_of_zeros_change_nothing(cell, sizes, reset, reverse):
    for hidden in (1, 13):
        example = Example(cell, torch.float32, 9, hidden=hidden, sizes=sizes, reset=reset)
        example.check(reverse=reverse)
        with torch.no_grad():
            assert all(x.is_contiguous() for x in example.call.run(example.ours))


@added_units
@with_episodes
def test_units_of_zeros_change_nothing_with_resets_to_the_initial_states(cell):
    Example(cell, torch.float32, 9, hidden=5, reset=torch.bool, reset_to="initial").check()


@every_cell
def test_no_bias(cell):
    Example(cell, bias=False).check()


@every_cell
@pytest.mark.parametrize("length, batch, hidden, input_size", [(1, 1, 1, 1), (3, 5, 63, 2)])
def test_odd_sizes(cell, length, batch, hidden, input_size):
    Example(cell, DOUBLE, length, batch, hidden, input_size).check()


@every_cell
@reverse
@pytest.mark.parametrize("reset", [None, torch.bool], ids=["", "reset"])
def test_several_chunks_of_the_backward(cell, reset, reverse):
    """8192 rows or a few more, and the others."""
    Example(cell, length=45, batch=300, hidden=3, reset=reset).check(reverse=reverse)
    sizes = [900] * 5 + [899] * 5 + [450] * 5 + [7, 1, 1]
    Example(cell, sizes=sizes, hidden=3, reset=reset).check(reverse=reverse)


@of_many_shapes
def test_several_chunks_in_every_dtype(cell, dtype):
    Example(cell, dtype, length=45, batch=300, hidden=8).check()


@every_cell
def test_half_types_take_states_of_float32(cell):
    """Those that are not h, one by one and together."""
    for dtype in (torch.float16, torch.bfloat16):
        example = Example(cell, dtype)
        input, states, *others = example.call.args
        for wide in [{i} for i in range(1, len(states))] + [set(range(1, len(states)))]:
            mixed = [x.float() if i in wide else x for i, x in enumerate(states)]
            example.check(Call(input, mixed, *others))


def test_states_of_two_dtypes_come_back_as_they_were():
    example = Example(everything, torch.float16, length=0)
    input, (h0, c0, n0), *others = example.call.args
    states = [h0, c0.float() / 3, n0]
    assert_same_bits(example.ours(input, states, *others)[1:], states)


@of_many_shapes
def test_block_diagonal_weights(cell):
    if not cell.recurrent or cell.weights:
        pytest.skip("without a product of h there is no weight; one with others has dense blocks by now")
    example = Example(cell, hidden=6)
    input, states, weight_ih, _, bias, parameters = example.call.args
    blocks = Make(DOUBLE, seed=5)(cell.gates * 6, 2)
    example.check(Call(input, states, weight_ih, blocks, bias, parameters))


@with_every_reset
@pytest.mark.parametrize("length, batch", [(0, 3), (5, 0), (0, 0), (1, 2)])
def test_no_steps_or_rows(cell, reset_to, length, batch):
    Example(cell, length=length, batch=batch, reset=reset_to == "initial", reset_to=reset_to).check()


@with_many_resets
@reverse
def test_no_packed_rows(cell, reset_to, reverse):
    example = Example(cell, length=0, batch=4, reset=reset_to == "initial", reset_to=reset_to)
    input, *others = example.call.args
    example.sizes, example.inputs = [], [u.flatten(0, 1) for u in example.inputs]
    example.reset = None if example.reset is None else example.reset.flatten()
    example.check(Call(input[:, 0], *others), reverse=reverse)


@with_many_resets
@pytest.mark.parametrize("reset", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("differentiable", [False, True], ids=["once", "twice"])
def test_a_reset_clears_nan(cell, reset_to, reset, differentiable):
    """From the values, and from the gradients, also from those that can be differentiated again."""
    example = Example(cell, reset_to=reset_to)
    example.reset = torch.zeros(5, 3, dtype=reset)
    example.reset[2] = 1
    input, *others = example.call.args
    broken = input.clone()
    broken[1] = torch.nan
    for function in (example.ours, example.loop):
        found = []
        for first in (input[:2], broken[:2]):
            rest = input[2:].clone().requires_grad_()
            output, *final = function(torch.cat([first, rest]), *others)
            found.append([output[2:], *final])
            found[-1] += torch.autograd.grad(sum_of_squares(found[-1]), rest, create_graph=differentiable)
        assert output[1].isnan().any()
        assert_same_bits(*found)


# ---- resets to the initial states


@of_many_shapes
def test_vmap_of_episodes(cell):
    """Over inputs and resets."""
    examples = [Example(cell, reset=torch.bool, reset_to="initial") for _ in range(3)]
    example, resets = examples[0], torch.stack([e.reset for e in examples])
    inputs = torch.stack([e.call.args[0] for e in examples])
    _, *others = example.call.args

    def loss(input, reset):
        example.reset = reset
        return sum_of_squares(example.ours(input, *others))

    found = torch.vmap(torch.func.grad(loss))(inputs, resets)
    expected = [torch.func.grad(loss)(x, reset) for x, reset in zip(inputs, resets, strict=True)]
    assert_all_near([found], [torch.stack(expected)], BACKWARD[DOUBLE])


@pytest.mark.parametrize("name", TEXTS)
def test_episodes_of_a_text_are_those_of_its_function(name, monkeypatch):
    monkeypatch.setattr(recurrence, "check_call", lambda *_: None)  # which refuses the CPU
    Example(TEXTS[name], reset=torch.float32, reset_to="initial").check()


# ---- which gradients


@reverse
@pytest.mark.parametrize("sizes", [None, PACKED], ids=["padded", "packed"])
def test_an_output_that_no_step_reads(sizes, reverse):
    """Its first value gets no gradient."""
    example = Example(unread_output, sizes=sizes, reset=torch.float32)
    call = example.call.leaves()
    found = []
    for function in (example.ours, example.loop):
        outputs = call.run(functools.partial(function, reverse=reverse))
        grads = torch.autograd.grad(sum_of_squares(outputs), call.tensors, materialize_grads=True)
        found.append([y.detach() for y in outputs] + list(grads))
    assert_all_near(*found, BACKWARD[DOUBLE])


class OpOfCell(OpSuite):
    """The tests that every op must pass, of the call of an example."""

    def __init__(self, example):
        self.example, self.function, self.reference = example, example.ours, example.loop

    def call(self, *_):
        return self.example.call


@every_cell
@pytest.mark.parametrize(
    "test",
    [
        OpSuite.test_an_output_not_used_has_no_part_in_the_gradient,
        OpSuite.test_each_gradient_alone_equals_all_together,
        OpSuite.test_backward_runs_twice_on_a_retained_graph,
    ],
    ids=lambda test: test.__name__,
)
def test_gradients_like_those_of_every_op(cell, test):
    example = Example(cell, reset=torch.bool)
    test(OpOfCell(example), example.call)


@every_cell
def test_without_gradients_nothing_is_saved_and_the_values_are_the_same(cell):
    example = Example(cell, reset=torch.bool)
    with torch.no_grad():
        outputs = example.call.leaves().run(example.ours)
    assert not any(y.requires_grad for y in outputs)
    assert_same_bits(outputs, [y.detach() for y in example.call.leaves().run(example.ours)])


@every_cell
@reverse
@pytest.mark.parametrize("sizes", [None, PACKED], ids=["padded", "packed"])
@pytest.mark.parametrize("reset", [None, torch.bool, torch.float32], ids=str)
def test_gradients_that_can_be_differentiated_again_are_the_same(cell, sizes, reset, reverse):
    example = Example(cell, sizes=sizes, reset=reset)
    call = example.call.leaves()
    outputs = call.run(functools.partial(example.ours, reverse=reverse))
    once, twice = (
        torch.autograd.grad(outputs, call.tensors, cotangents(outputs), retain_graph=True, create_graph=again)
        for again in (False, True)
    )
    assert_all_near(twice, once, BACKWARD[DOUBLE], "gradient")


@pytest.mark.parametrize("cell", [CELLS[name] for name in DIFFERENTIABLE], ids=DIFFERENTIABLE)
def test_second_derivatives(cell):
    example = Example(cell, length=2, batch=2, hidden=3, input_size=2, reset=torch.bool)
    call = example.call.leaves()
    assert torch.autograd.gradgradcheck(call.bind(example.ours), call.tensors)


OF_SECOND_DERIVATIVES = {
    "packed rows": ({"sizes": [2, 1]}, True),
    "episodes": ({"length": 3, "batch": 1, "reset_to": "initial"}, False),
    "episodes in reverse": ({"length": 3, "batch": 1, "reset_to": "initial"}, True),
}


@of_many_shapes
@pytest.mark.parametrize("options,reverse", OF_SECOND_DERIVATIVES.values(), ids=OF_SECOND_DERIVATIVES)
def test_second_derivatives_with_resets(cell, options, reverse):
    example = Example(cell, hidden=2, input_size=2, reset=torch.float64, **options)
    call = example.call.leaves()
    function = call.bind(functools.partial(example.ours, reverse=reverse))
    assert torch.autograd.gradgradcheck(function, call.tensors)


@of_many_shapes
def test_vmap_and_functional_gradients(cell):
    examples = [Example(cell) for _ in range(3)]
    for i, example in enumerate(examples):
        example.call = example.call.map(lambda x, i=i: x + 0.1 * i)

    def loss(*tensors):
        return sum_of_squares(examples[0].call.with_tensors(tensors).run(examples[0].ours))

    argnums = tuple(range(len(examples[0].call.tensors)))
    stacked = [torch.stack(xs) for xs in zip(*(e.call.tensors for e in examples), strict=True)]
    together = torch.vmap(torch.func.grad(loss, argnums))(*stacked)
    one_by_one = [torch.func.grad(loss, argnums)(*e.call.tensors) for e in examples]
    assert_all_near(together, [torch.stack(gs) for gs in zip(*one_by_one, strict=True)], BACKWARD[DOUBLE])


# ---- layouts and checks of the ops

layouts = pytest.mark.parametrize("layout", OpSuite.layouts.values(), ids=OpSuite.layouts)


@every_cell
@layouts
def test_other_layouts(cell, layout):
    example = Example(cell, reset=torch.float32)
    example.inputs = [layout(u) for u in example.inputs]
    example.reset = layout(example.reset)
    example.check(example.call.map(layout))


def differentiable(arguments):
    """The arguments of the op, and those of them that have gradients."""
    first, others = arguments.args[:7], arguments.args[7:]
    return Call(*first), lambda *tensors: CustomCellFunction.apply(*tensors, *others, None)[:3]


@every_cell
@layouts
@pytest.mark.parametrize("sizes", [None, PACKED], ids=["padded", "packed"])
def test_other_layouts_of_the_ops_arguments_and_gradients(cell, layout, sizes):
    """Of the arguments that Python stacks, too."""
    example = Example(cell, sizes=sizes, reset=torch.float32)
    changed = op_arguments_of(example).map(layout)
    call, function = differentiable(changed)
    plain_call, plain_function = differentiable(changed.map(torch.Tensor.contiguous))
    grads = [layout(g) for g in cotangents(call.run(function))]
    outputs, gradients = forward_and_gradients(function, call, grads)
    expected, expected_gradients = forward_and_gradients(
        plain_function, plain_call, [g.contiguous() for g in grads]
    )
    assert_all_near(outputs, expected, FORWARD[DOUBLE], "output")
    assert_all_near(gradients, expected_gradients, BACKWARD[DOUBLE], "gradient")


@every_cell
def test_a_gradient_of_one_number_expanded(cell):
    example = Example(cell)
    call = example.call.leaves()
    gradients, expected = (
        torch.autograd.grad(sum(y.sum() for y in call.run(f)), call.tensors, materialize_grads=True)
        for f in (example.ours, example.loop)
    )
    assert_all_near(gradients, expected, BACKWARD[DOUBLE], "gradient")


@of_many_shapes
def test_arguments_are_left_as_they_came(cell):
    example = Example(cell, reset=torch.bool)
    before = op_arguments_of(example).map(torch.clone)
    forward_and_gradients(example.ours, example.call)
    assert_same_bits(op_arguments_of(example).tensors, before.tensors)


@of_many_shapes
@pytest.mark.parametrize("dtype", [torch.float16, DOUBLE], ids=str)
@pytest.mark.parametrize("sizes", [None, PACKED], ids=["padded", "packed"])
def test_opcheck(cell, dtype, sizes, ops):
    """Tracing sees the shapes, dtypes and strides of the outputs."""
    arguments = op_arguments_of(Example(cell, dtype, sizes=sizes, reset=torch.bool))
    outputs = ops.custom_cell_forward(*arguments.args)
    h = outputs[0 if cell.output == "h" else 5]
    everything_needed = (*outputs[:3], h, *outputs[3:5], *arguments.args, True, True)
    for op, args in (
        (ops.custom_cell, arguments.args),
        (ops.custom_cell_forward, arguments.args),
        (ops.custom_cell_backward, everything_needed),
        (ops.custom_cell_backward, (*everything_needed[:-2], False, False)),
    ):
        slow = () if cell is not everything else ("test_autograd_registration", "test_aot_dispatch_dynamic")
        torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor", *slow))


ARGUMENTS = (
    "input h0 states weight_ih weight_hh bias parameters step_inputs reset batch_sizes is_reverse algorithm"
)
ARGUMENTS = [*ARGUMENTS.split(), "program"]
ROWS, OF_INPUTS = "rows of all steps, input_size", "..., step inputs * hidden_size"
WRONG = {
    "states": of_shape("states", lambda x: x[:1], "states, batch, hidden_size", [1, 3, 6], [2, 3, 6]),
    "states of another dtype": of_dtype("states", torch.Tensor.float, "float32", "float64"),
    "no weight_hh": no_tensor("weight_hh", None, "None"),
    "parameters": of_shape("parameters", lambda x: x[:1], "parameters, hidden_size", [1, 6], [2, 6]),
    "no parameters": no_tensor("parameters", None, "None"),
    "step_inputs": of_shape("step_inputs", lambda x: x[..., :6], OF_INPUTS, [5, 3, 6], [5, 3, 12]),
    "no step_inputs": no_tensor("step_inputs", None, "None"),
    "reset": of_shape("reset", lambda x: x[1:], "length, batch", [4, 3], [5, 3]),
    "reset of another dtype": of_dtype("reset", torch.Tensor.int, "int32", "float64"),
    "batch_sizes": ("batch_sizes", lambda _: [3, 2], RuntimeError, f"input of shape [{ROWS}], got"),
    "algorithm": (
        "algorithm",
        lambda _: "fast",
        ValueError,
        "algorithm to be 'auto', 'stepwise', 'cluster' or",
    ),
    "program": (
        "program",
        lambda _: "everything",
        Exception,
        "a program as lltm_ext.recurrence writes it, got 1",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_named(wrong, ops):
    """Of those that only own cells have. Those of lltm and lstm too are in sequence_suite.py."""
    argument, change, exception, message = WRONG[wrong]
    args = dict(zip(ARGUMENTS, op_arguments_of(Example(everything, reset=torch.bool)).args, strict=True))
    args[argument] = change(args[argument])
    name = "custom_cell" if wrong == "program" else "everything"
    for op in (ops.custom_cell, ops.custom_cell_forward):
        with pytest.raises(exception, match="^" + re.escape(f"{name}: expected {message}")):
            op(*args.values())


@pytest.mark.parametrize("name", ["grad_output", "grad_h_n", "grad_states_n", "output", "gates", "extra"])
def test_wrong_gradients_are_named(name, ops):
    arguments = op_arguments_of(Example(everything)).args
    output, h_n, states_n, gates, extra, _ = ops.custom_cell_forward(*arguments)
    given = {"grad_output": output, "grad_h_n": h_n, "grad_states_n": states_n}
    given |= {"output": output, "gates": gates, "extra": extra}
    given[name] = given[name][1:]
    with pytest.raises(RuntimeError, match=rf"^everything_backward: expected {name} of shape \["):
        ops.custom_cell_backward(*given.values(), *arguments, True, True)


@every_cell
def test_the_cpu_runs_every_call_stepwise(cell, ops):
    arguments = op_arguments_of(Example(cell)).args
    for backward in (False, True):
        assert ops.custom_cell_algorithm(*arguments, backward) == "stepwise"


def test_a_program_without_formulas_refuses_the_cpu():
    """Exported files of version 0.3 have such programs."""
    *arguments, program = op_arguments_of(Example(cells.gru)).args
    without = SEPARATOR.join(program.split(SEPARATOR)[:3])
    with pytest.raises(RuntimeError, match=re.escape("gru: expected input on a CUDA device, got cpu")):
        torch.ops.lltm_ext.custom_cell(*arguments, without)


# ---- layers


@of_many_shapes
@pytest.mark.parametrize("reset_to", ["zeros", "initial"])
def test_layers_equal_those_of_the_loop(cell, reset_to, monkeypatch):
    """Two layers of two directions, over padded and packed sequences, with resets."""
    layer = lltm_ext.Recurrent(cell, 4, 6, num_layers=2, bidirectional=True, dtype=DOUBLE)
    input = torch.randn(5, 3, 4, dtype=DOUBLE)
    h0, *states = (torch.rand(4, 3, 6, dtype=DOUBLE) + 0.1 for _ in cell.state_names)
    hx = (h0, *states) if states else h0
    steps = {name: torch.rand(5, 3) for name in cell.inputs}
    reset = torch.rand(5, 3) < 0.4

    def packed(x):
        return pack_padded_sequence(x, [3, 5, 4], enforce_sorted=False)

    def outputs_and_gradients():
        found = []
        for given, resets, named in (
            (input, reset, steps),
            (packed(input), packed(reset), {name: packed(u) for name, u in steps.items()}),
        ):
            output, final = layer(given, hx, reset=resets, reset_to=reset_to, **named)
            output = output if isinstance(output, torch.Tensor) else output.data
            outputs = [output, *(final if isinstance(final, tuple) else (final,))]
            found += [*outputs, *torch.autograd.grad(sum_of_squares(outputs), list(layer.parameters()))]
        return found

    with monkeypatch.context() as patch:
        patch.setattr(_layers, "run", by_loop)
        patch.setattr(_layers, "run_both", both_by_loop)
        expected = outputs_and_gradients()
    assert_all_near(outputs_and_gradients(), expected, BACKWARD[DOUBLE])


@pytest.mark.parametrize("reset_to", ["zeros", "initial"])
def test_a_layer_compiles_into_one_graph_before_its_first_call(reset_to, fresh_dynamo):
    layer = lltm_ext.Recurrent(cells.gru, 4, 6, bidirectional=True, dtype=DOUBLE)
    input, reset = torch.randn(5, 3, 4, dtype=DOUBLE), torch.rand(5, 3) < 0.4
    run = functools.partial(layer, reset=reset, reset_to=reset_to)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    found, expected = compiled(input), run(input)
    assert_all_near(found, expected, FORWARD[DOUBLE])
    parameters = list(layer.parameters())
    gradients = (torch.autograd.grad(sum_of_squares(y), parameters) for y in (found, expected))
    assert_all_near(*gradients, BACKWARD[DOUBLE])
