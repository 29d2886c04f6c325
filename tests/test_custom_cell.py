"""Own cells on CUDA: their kernels against the loop of torch's ops, by every algorithm."""

import functools

import pytest
import torch
import torch.utils._pytree as pytree
from cell_examples import (
    CELLS,
    SURROGATES,
    TEXTS,
    WITH_OUTPUT,
    WITH_WEIGHTS,
    WITHOUT_PRODUCT,
    Example,
    norms_between_products,
)
from op_suite import (
    BACKWARD,
    DOUBLE,
    FORWARD,
    Call,
    Make,
    assert_all_near,
    assert_same_bits,
    cotangents,
    forward_and_gradients,
    kernels_of,
    needs_cuda,
)

import lltm_ext
from lltm_ext import _custom_cell, _portable, cells
from lltm_ext._arguments import SequenceCall
from lltm_ext._C import custom_cell as _C
from lltm_ext._formula.text import LINE
from lltm_ext.recurrence import resets_to_states

pytestmark = pytest.mark.compiles

TYPES = (torch.float32, torch.float16, torch.bfloat16)
every_cell = pytest.mark.parametrize("name", CELLS)
every_text = pytest.mark.parametrize("name", TEXTS)
every_algorithm = pytest.mark.parametrize("algorithm", ["stepwise", "cluster", "grid"])
both_resets = pytest.mark.parametrize("reset_to", ["zeros", "initial"])
RESETS = {"": {}, "to zeros": {"reset": True}, "to initial": {"reset": True, "reset_to": "initial"}}
with_resets = pytest.mark.parametrize("resets", RESETS.values(), ids=RESETS)


def example_of(name, dtype, length, batch, hidden, input_size=24, **options):
    """Of the cell or of the text of one."""
    cell = CELLS[name] if isinstance(name, str) else name
    return Example(cell, dtype, length, batch, hidden, input_size, device="cuda", **options)


def algorithm_of(example, algorithm="auto"):
    call = SequenceCall(*example.call.args, example.inputs, example.reset, example.sizes)
    to_states = resets_to_states(call, example.reset_to)
    return _custom_cell.algorithm_of(example.cell, call, algorithm, example.dtype, to_states, False)


def reads_units(cell):
    """Whether a step of a unit depends on more of other units than its product with h."""
    return bool(cell.weights) or cell.derived.over_units


def skip_unless_possible(example, algorithm):
    if algorithm == "stepwise":
        return
    if not example.cell.recurrent:
        pytest.skip("a cell without a product of h runs stepwise")
    if example.sizes and reads_units(example.cell):
        pytest.skip("packed rows of a cell that reads other units run stepwise")
    needed = (9, 0) if algorithm == "cluster" else (8, 0)
    if torch.cuda.get_device_capability() < needed:
        pytest.skip(f"{algorithm} needs compute capability {needed}")


@needs_cuda
@every_cell
@every_algorithm
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_algorithm_equals_the_loop(name, algorithm, dtype):
    hidden = 64 if dtype == torch.float32 else 136
    example = example_of(name, dtype, 7, 5, hidden)
    skip_unless_possible(example, algorithm)
    assert algorithm_of(example, algorithm) == algorithm
    example.check(algorithm=algorithm)


@needs_cuda
@every_cell
@both_resets
@pytest.mark.parametrize("sizes", [None, [11, 11, 9, 4, 1]], ids=["dense", "packed"])
def test_steps_of_small_batch_and_of_more_equal_the_loop(name, reset_to, sizes):
    for batch, hidden in ((1, 260), (5, 100), (11, 68), (17, 68)) if sizes is None else ((11, 132),):
        for reset in (False, True):
            example = example_of(
                name, torch.float32, 5, batch, hidden, sizes=sizes, reset=reset, reset_to=reset_to
            )
            example.check(algorithm="stepwise")


@needs_cuda
@every_cell
def test_float64_and_odd_sizes_run_stepwise(name):
    for length, batch, hidden in ((1, 1, 1), (3, 5, 63), (4, 21, 7)):
        example = example_of(name, DOUBLE, length, batch, hidden, input_size=5)
        assert algorithm_of(example) == "stepwise"
        example.check()


@needs_cuda
@every_cell
@both_resets
@pytest.mark.parametrize("sizes", [None, [20] * 9 + [4, 1]], ids=["dense", "packed"])
def test_hidden_sizes_that_are_no_multiple_of_8(name, reset_to, sizes):
    """Blocks of one row take 5 units as they are. Units are added to 100 of a cell whose zeros stay zeros.

    The portable library adds none.
    """
    for hidden in (5, 100):
        for reset in (False, True):
            example = example_of(
                name, torch.float16, 11, 20, hidden, sizes=sizes, reset=reset, reset_to=reset_to
            )
            if example.cell.recurrent and sizes is None:
                runs_steps = hidden == 100 and (_portable.in_use or not example.cell.derived.zeros_stay)
                runs_steps = runs_steps or reads_units(example.cell)
                assert (algorithm_of(example) == "stepwise") == runs_steps
            example.check()


@needs_cuda
@every_cell
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("batch,hidden,input_size", [(1, 64, 64), (3, 50, 13), (5, 40, 8), (17, 136, 72)])
def test_a_single_step(name, dtype, batch, hidden, input_size, profiler_sees_kernels):
    """A cell with one product, whose output is h and which reads no other units, is one launch."""
    example = example_of(name, dtype, 1, batch, hidden, input_size)
    example.check()
    cell = example.cell
    if cell.recurrent and cell.output == "h" and not reads_units(cell):
        with torch.no_grad():
            (kernels,) = kernels_of([lambda: example.call.run(example.ours)])
        ours = [k for k in kernels if "custom_cell_kernel" in k or "recurrence_single_step_kernel" in k]
        assert len(ours) == 1 and not any("gemm" in kernel for kernel in kernels)


# Not IndRNN in float32: of so many values some round to the other side of relu's kink.
independent_units = pytest.mark.parametrize(
    "name,dtype",
    [(name, dtype) for name in WITHOUT_PRODUCT for dtype in (*TYPES, DOUBLE)]
    + [("indrnn", dtype) for dtype in (torch.float16, torch.bfloat16, DOUBLE)],
    ids=str,
)


@needs_cuda
@independent_units
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_sequences_of_independent_units(name, dtype, reverse):
    """Shorter and longer than the steps that a thread loads ahead; several chunks of the backward."""
    for length, batch, hidden in ((1, 1, 1), (7, 5, 63), (7, 16, 512), (300, 3, 17), (300, 33, 66)):
        for resets in RESETS.values():
            example_of(name, dtype, length, batch, hidden, **resets).check(reverse=reverse)


@needs_cuda
@independent_units
@pytest.mark.parametrize("reset", [False, True], ids=["", "reset"])
def test_packed_rows_of_independent_units(name, dtype, reset):
    sizes = [300] * 20 + [299] * 9 + [40] * 30 + [1] * 10
    for hidden in (7, 64):
        for reverse in (False, True):
            example = example_of(name, dtype, len(sizes), 300, hidden, sizes=sizes, reset=reset)
            example.check(reverse=reverse)


@needs_cuda
def test_all_steps_of_independent_units_are_one_kernel(profiler_sees_kernels):
    example = example_of("indrnn", torch.bfloat16, 9, 5, 64, reset=True)
    call = example.call.leaves()
    outputs = call.run(example.ours)
    backward = functools.partial(
        torch.autograd.grad, outputs, call.tensors, cotangents(outputs), retain_graph=True
    )
    backward()  # compiles
    for kernels in kernels_of([lambda: call.run(example.ours), backward]):
        assert kernels.count("custom_cell_kernel") == 1


@needs_cuda
@every_cell
@pytest.mark.parametrize("algorithm", ["stepwise", "grid"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_packed_rows(name, algorithm, reverse):
    example = example_of(name, torch.float16, 6, 20, 64, sizes=[20, 20, 13, 9, 2, 1])
    skip_unless_possible(example, algorithm)
    example.check(algorithm=algorithm, reverse=reverse)


@needs_cuda
@every_cell
@every_algorithm
@both_resets
def test_resets(name, algorithm, reset_to):
    example = example_of(name, torch.bfloat16, 9, 6, 64, reset=True, reset_to=reset_to)
    skip_unless_possible(example, algorithm)
    assert algorithm_of(example, algorithm) == algorithm
    example.check(algorithm=algorithm)


@needs_cuda
@pytest.mark.parametrize("name", ["gru", "slstm", "lstm", "smoothed_lstm"])
@pytest.mark.parametrize("algorithm", ["stepwise", "grid"])
@both_resets
def test_resets_of_packed_rows_in_reverse(name, algorithm, reset_to):
    sizes = [20, 20, 13, 9, 2, 1]
    example = example_of(name, torch.float16, 6, 20, 64, sizes=sizes, reset=True, reset_to=reset_to)
    example.check(algorithm=algorithm, reverse=True)


@needs_cuda
@every_text
@every_algorithm
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@with_resets
def test_a_cell_given_as_text_equals_the_loop(name, algorithm, dtype, resets):
    example = example_of(TEXTS[name], dtype, 7, 5, 64, **resets)
    skip_unless_possible(example, algorithm)
    assert algorithm_of(example, algorithm) == algorithm
    example.check(algorithm=algorithm)


@needs_cuda
@every_text
def test_a_cell_given_as_text_runs_in_float64_and_in_large_tiles(name):
    example_of(TEXTS[name], DOUBLE, 3, 5, 63, input_size=5).check()
    example_of(TEXTS[name], torch.bfloat16, 5, 256, 1032).check(algorithm="stepwise")


@needs_cuda
@every_text
def test_the_gradients_of_a_text_are_checked(name):
    assert TEXTS[name].gradcheck()


@needs_cuda
@pytest.mark.parametrize(
    "wrong, argument", [("grad_x[0] = 2 * p", "input"), ("grad_bad = 2 * p", "bad"), ("grad_h = 0", "input")]
)
def test_gradcheck_names_the_argument_whose_text_is_wrong(wrong, argument):
    cell = lltm_ext.recurrence(
        name="doubled",
        gates=1,
        parameters=("good", "bad"),
        forward="new_h = tanh(x[0] + good + bad + h);",
        saved=("new_h",),
        backward=f"""
            const T p = grad_new_h * (1 - new_h * new_h);
            grad_x[0] = grad_good = grad_bad = grad_h = p;
            {wrong};
        """,
    )
    with pytest.raises(
        RuntimeError, match=rf"(?s)^doubled: the gradient with respect to {argument} is wrong: .*numerical"
    ):
        cell.gradcheck()


@needs_cuda
def test_a_text_without_backward_needs_no_gradient():
    cell = lltm_ext.recurrence(name="plain", gates=1, forward="new_h = tanh(x[0]);")
    cell.compile(torch.float32, 64, 3)
    layer = lltm_ext.Recurrent(cell, 8, 64, device="cuda")
    input = torch.randn(5, 3, 8, device="cuda")
    with torch.no_grad():
        count = _C.compilations()
        output, _ = layer(input)
        assert _C.compilations() == count
    like = lltm_ext.Recurrent(cells.rnn_tanh, 8, 64, device="cuda")
    like.load_state_dict(layer.state_dict())
    assert_all_near([output], [like(input)[0]], FORWARD[torch.float32])
    with pytest.raises(
        RuntimeError,
        match=r"^plain: a gradient with respect to weight_ih is required, but the cell has no backward "
        r"\(give backward= of lltm_ext.recurrence, or call it under torch.no_grad\(\)\)",
    ):
        layer(input)


@needs_cuda
def test_a_text_has_no_second_derivatives():
    example = example_of(TEXTS["gru"], DOUBLE, 2, 2, 3, input_size=2)
    call = example.call.leaves()
    with pytest.raises(RuntimeError, match=r"gru: its gradient cannot be differentiated again"):
        torch.autograd.grad(call.run(example.ours)[0].sum(), call.tensors, create_graph=True)


@needs_cuda
@pytest.mark.parametrize("name", ["gru", "lstm", "slstm", "peephole_lstm", "rnn_tanh", *WITH_OUTPUT])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_many_rows_and_units(name, dtype):
    """Several row tiles a group, many blocks, and several chunks of the backward."""
    for length, batch, hidden in ((20, 200, 256), (70, 64, 512), (300, 33, 128)):
        example_of(name, dtype, length, batch, hidden).check()


@needs_cuda
@every_algorithm
@pytest.mark.parametrize("name", ["lstm", "peephole_lstm", "cifg", "slstm", "zoneout_lstm"])
def test_half_types_keep_a_long_memory(name, algorithm):
    """With a forget gate near 1: rounded to bfloat16, 0.993 would be 0.992 or 0.996."""
    for dtype in (torch.float16, torch.bfloat16):
        example = example_of(name, dtype, 400, 5, 64)
        skip_unless_possible(example, algorithm)
        forget = 0 if name == "cifg" else 1
        example.call.args[4].view(-1, 64)[forget] += 5
        example.check(algorithm=algorithm)


@needs_cuda
@pytest.mark.parametrize(
    "name", ["gru", "lstm", "slstm", "peephole_lstm", "rnn_tanh", "zoneout_lstm", "cfc", *WITH_OUTPUT]
)
@pytest.mark.parametrize("batch,hidden", [(70, 200), (130, 1024), (256, 1032), (128, 2048)])
@with_resets
def test_steps_of_large_tiles(name, batch, hidden, resets):
    """Fused on Hopper, where the plan has tiles of 64 and of 128 rows, and partial tiles."""
    for dtype in (torch.float16, torch.bfloat16):
        example_of(name, dtype, 5, batch, hidden, **resets).check(algorithm="stepwise")


@needs_cuda
@pytest.mark.parametrize("name", ["gru", "lstm", "slstm", "peephole_lstm", "rnn_tanh", "cfc", *WITH_OUTPUT])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "batch,hidden",
    [
        (256, 1024),
        (130, 1032),
        (33, 1536),
        (100, 1536),
        (250, 1400),
        (50, 1800),
        (100, 1800),
        (600, 768),
        (1100, 512),
    ],
)
@with_resets
def test_large_layers(name, dtype, batch, hidden, resets):
    """By their own kernel on Hopper: every tile, and groups and tiles that are not full."""
    example_of(name, dtype, 9, batch, hidden, **resets).check()


@needs_cuda
@pytest.mark.parametrize("name", [name for name in CELLS if name not in SURROGATES])
@both_resets
def test_second_derivatives(name, reset_to):
    example = example_of(name, DOUBLE, 2, 2, 3, input_size=2, reset=True, reset_to=reset_to)
    call = example.call.leaves()
    assert torch.autograd.gradgradcheck(
        lambda *tensors: call.with_tensors(tensors).run(example.ours), call.tensors
    )


@needs_cuda
def test_block_diagonal_weights_are_those_of_a_dense_matrix_with_zeros():
    example = example_of("slstm", torch.float16, 5, 4, 64)
    input, states, weight_ih, _, bias, parameters = example.call.args
    blocks = Make(torch.float16, "cuda", seed=5)(4 * 64, 16, scale=0.2)
    call = Call(input, states, weight_ih, blocks, bias, parameters)
    example.check(call)


@needs_cuda
@pytest.mark.parametrize("name", ["gru", "indrnn"])
def test_the_same_call_twice_gives_the_same_bits(name):
    example = example_of(name, torch.bfloat16, 50, 40, 256)
    first = [x for found in forward_and_gradients(example.ours, example.call) for x in found]
    again = [x for found in forward_and_gradients(example.ours, example.call) for x in found]
    assert_same_bits(first, again)


@needs_cuda
def test_a_captured_graph_repeats_the_call():
    layer = lltm_ext.GRU(24, 64, device="cuda", dtype=torch.float16)
    input, other = (torch.randn(7, 4, 24, device="cuda", dtype=torch.float16) for _ in range(2))
    with torch.no_grad():
        layer(input)  # compiles
        graph = torch.cuda.CUDAGraph()
        static = input.clone()
        with torch.cuda.graph(graph):
            output, _ = layer(static)
        static.copy_(other)
        graph.replay()
        assert_same_bits([output], [layer(other)[0]])


@needs_cuda
def test_a_cell_is_compiled_once_a_kernel():
    example = example_of("janet", torch.float16, 5, 4, 64)
    forward_and_gradients(example.ours, example.call)
    count = _C.compilations()
    forward_and_gradients(example.ours, example.call)
    assert _C.compilations() == count


@needs_cuda
@with_resets
def test_a_call_after_compile_compiles_nothing(resets):
    example = example_of("zoneout_lstm", torch.bfloat16, 5, 6, 72, **resets)
    example.cell.compile(torch.bfloat16, 72, 6, **resets)
    count = _C.compilations()
    forward_and_gradients(example.ours, example.call)
    assert _C.compilations() == count


def test_compile_needs_a_gpu():
    with pytest.raises(RuntimeError, match=r"^gru: expected device to be a CUDA device, got cpu"):
        cells.gru.compile(torch.float32, 8, 1, device="cpu")


@needs_cuda
def test_a_layer_with_step_inputs_and_resets_trains_under_torch_compile(fresh_dynamo):
    layer = lltm_ext.Recurrent(cells.cfc, 3, 8, device="cuda")
    x, gap = torch.randn(5, 4, 3, device="cuda"), torch.rand(5, 4, device="cuda")
    reset = torch.rand(5, 4, device="cuda") < 0.3

    def gradients(function):
        output, h_n = function(x, time=gap, reset=reset)
        return torch.autograd.grad((torch.tanh(output) * 2 + h_n).square().sum(), list(layer.parameters()))

    expected = gradients(layer)
    assert_all_near(gradients(torch.compile(layer, fullgraph=True)), expected, BACKWARD[torch.float32])


@needs_cuda
@pytest.mark.parametrize("cell", [cells.gru, cells.slstm], ids=["no states", "states"])
def test_an_exported_layer_is_saved_and_loaded(cell, tmp_path):
    layer, x = lltm_ext.Recurrent(cell, 3, 8, device="cuda"), torch.randn(5, 4, 3, device="cuda")
    torch.export.save(torch.export.export(layer, (x,)), tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    assert_all_near(pytree.tree_leaves(loaded(x)), pytree.tree_leaves(layer(x)), FORWARD[torch.float32])


@needs_cuda
def test_torch_compile_traces_a_layer_as_one_op(fresh_dynamo):
    cell = cells.peephole_lstm
    layer = lltm_ext.Recurrent(cell, 24, 64, device="cuda")
    input = torch.randn(7, 4, 24, device="cuda")
    compiled = torch.compile(layer, fullgraph=True)
    assert_all_near(compiled(input)[:1], layer(input)[:1], FORWARD[torch.float32])


# ---- without a GPU

passes = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


def binary(program, dtype, backward, variant=-1, architecture="sm_90", rows=0, reset="", **sizes):
    """A kernel that compiles. Fused steps, those of so many rows, and large layers need Hopper's."""
    architecture = "sm_90a" if rows or "large_tile" in sizes else architecture
    found = _C.compile(program, dtype, backward, variant, architecture, rows, reset, **sizes)
    assert len(found) > 1000
    return found


def compiled_for(names, one, *others):
    """Each cell for Hopper, and one of them for other architectures too."""
    pairs = [(name, "sm_90") for name in names] + [(one, architecture) for architecture in others]
    return pytest.mark.parametrize("name,architecture", pairs)


@compiled_for(CELLS, "slstm", "sm_80")
@passes
def test_every_kind_of_kernel_compiles(name, architecture, backward):
    cell = CELLS[name]
    kinds = [(torch.float16, -1), (torch.float64, -1)]
    if cell.recurrent and not cell.derived.over_units:
        kinds += [(torch.bfloat16, 11), (torch.float32, 22)]  # of several row tiles
        kinds += [(torch.bfloat16, 0), (torch.bfloat16, 2)] if architecture == "sm_90" else []  # in a cluster
    elif cell.recurrent:  # in one block, and in a cluster
        kinds += [(torch.bfloat16, 4), (torch.float32, 17)]
    for dtype, variant in kinds:
        binary(cell.program, dtype, backward, variant, architecture)


@pytest.mark.parametrize("reset", ["", "float"])
@pytest.mark.parametrize("name", ["peephole_lstm", "gru"])
def test_the_kernels_of_large_layers_compile(name, reset):
    for tile in (1, 2, 4, 5, 6, 7):
        for backward in (False, True):
            binary(CELLS[name].program, torch.bfloat16, backward, reset=reset, large_tile=tile)


@every_text
@passes
def test_kernels_of_a_text_compile(name, backward):
    program = TEXTS[name].program
    binary(program, torch.float16, backward, -1, "sm_75")
    binary(program, torch.float64, backward, -1, "sm_80")
    binary(program, torch.float32, backward, 19)
    binary(program, torch.bfloat16, backward, 0)
    binary(program, torch.bfloat16, backward, rows=64)


@lltm_ext.recurrence(gates=2)
def steps_and_curves(x, h):
    smooth = torch.sinh(x[0]) + torch.cosh(h) * torch.atan(x[1])
    whole = torch.floor(smooth) + torch.round(x[0]) * torch.fmod(h, 0.5) + torch.trunc(x[1])
    return whole * smooth + lltm_ext.spike(h - x[1]) + lltm_ext.round(smooth)


@pytest.mark.parametrize("architecture", ["sm_75", "sm_90"])
@passes
@pytest.mark.parametrize("cell", [*WITH_WEIGHTS.values(), norms_between_products], ids=lambda x: x.__name__)
def test_the_stages_of_a_step_with_further_products_compile(cell, backward, architecture):
    last = max(x.back_stage if backward else x.stage for x in cell.derived.products) + 1
    for stage in range(last + 1):
        for dtype in (torch.bfloat16, DOUBLE):
            binary(cell.programs[dtype], dtype, backward, -1, architecture, stage=stage)


@passes
def test_whole_steps_with_further_products_compile(backward):
    """Through L2 and in a cluster, with block-diagonal weights of which blocks have whole heads or not."""
    dense = CELLS["dreamer_block_gru"]
    for cell in (dense, dense.with_heads((32, 0, 32))):
        for dtype, variant in ((torch.bfloat16, 11), (torch.bfloat16, 8), (torch.float32, 17)):
            binary(cell.programs[dtype], dtype, backward, variant)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [*TYPES, DOUBLE])
def test_steps_and_their_gradients_compile(dtype, backward):
    binary(steps_and_curves.program, dtype, backward)


def test_a_text_may_call_the_functions_of_every_math():
    """And of common/math.h, and of CUDA."""
    ours = "sigmoid tanh elu silu gelu gelu_tanh softplus exp expm1 log log1p sqrt rsqrt abs sin cos erf"
    one = " + ".join(f"{function}(x[0])" for function in [*ours.split(), "relu", "sign"])
    two = " + ".join(f"{f}(x[0], h)" for f in ("logaddexp", "pow", "maximum", "minimum", "max", "fmin"))
    cell = lltm_ext.recurrence(name="all", gates=1, forward=f"new_h = {one} + {two} + fabs(h) + erfc(h);")
    for dtype in (*TYPES, DOUBLE):
        binary(cell.program, dtype, False)


@pytest.mark.parametrize(
    "options, what, where",
    [
        ({"forward": "\n  T y = x[0];\n  new_h = y + z;\n"}, "all", 'forward(3): error: identifier "z"'),
        ({"forward": "new_h = x[0] +"}, "all", "forward(2): error: expected an expression"),
        ({"forward": "new_h = r[0];"}, "all", 'forward(1): error: identifier "r" is undefined'),
        ({"forward": "T x = 0; new_h = x;"}, "all", 'forward(1): error: "x" has already been declared'),
        (
            {"backward": "grad_x[0] = 1;\ngrad_h = 0;"},
            "all: backward",
            'backward(2): error: identifier "grad_h"',
        ),
        ({"backward": "grad_x[0] = y;"}, "all: backward", 'backward(1): error: identifier "y" is undefined'),
        ({}, "all: backward", "all has no backward"),
    ],
)
def test_a_compile_error_shows_the_line_of_the_text(options, what, where):
    cell = lltm_ext.recurrence(**{"name": "all", "gates": 1, "forward": "T y = new_h = x[0];", **options})
    with pytest.raises(RuntimeError) as error:
        _C.compile(cell.program, torch.float32, "forward" not in options, -1, "sm_90")
    assert str(error.value).startswith(f"{what} does not compile:\n")
    assert where in str(error.value)


@pytest.mark.parametrize("name", ["gru", "slstm", "lstm", *WITH_OUTPUT])
@passes
def test_kernels_that_take_resets_compile(name, backward):
    program = CELLS[name].program
    for dtype, variant, rows in ((torch.float32, 20, 0), (torch.float16, 11, 0), (torch.float16, -1, 64)):
        plain, of_bools, of_numbers = (
            binary(program, dtype, backward, variant, rows=rows, reset=reset)
            for reset in ("", "bool", "float")
        )
        assert plain != of_bools
        assert (of_bools != of_numbers) == (variant >= 0)  # fused steps ask for the type at run time


@pytest.mark.parametrize("cell", [*map(CELLS.get, ["gru", "slstm", "lstm", *WITH_OUTPUT]), TEXTS["gru"]])
@passes
def test_kernels_that_reset_to_the_initial_states_compile(cell, backward):
    for dtype, variant, rows in ((torch.float32, 22, 0), (torch.float16, 2, 0), (torch.float16, -1, 64)):
        binary(cell.programs_to_initial[torch.float32], dtype, backward, variant, rows=rows)


@pytest.mark.parametrize("architecture", ["sm_75", "sm_120"])
@passes
def test_other_architectures(architecture, backward):
    for dtype in (torch.float16, torch.float64):
        binary(cells.gru.program, dtype, backward, -1, architecture)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_120"])
@passes
def test_persistent_kernels_of_heads_and_of_values_over_units_compile(architecture, backward):
    binary(cells.dreamer_gru.program, torch.float16, backward, 9, architecture)
    binary(cells.slstm.program, torch.float32, backward, 20, architecture, heads=3)
    if architecture == "sm_90":  # has clusters
        binary(cells.dreamer_gru.program, torch.bfloat16, backward, 10, architecture)
        binary(cells.slstm.program, torch.float16, backward, 4, architecture, reset="bool", heads=2)


@compiled_for(["indrnn", *WITHOUT_PRODUCT], "masked_unit", "sm_75", "sm_80", "sm_120")
@passes
def test_kernels_of_independent_units_compile(name, architecture, backward):
    for dtype, units, threads, dense in (
        (torch.float32, 1, 32, False),
        (torch.bfloat16, 2, 32, True),
        (torch.float16, 2, 32, False),
        (DOUBLE, 1, 32, True),
    ):
        how = {"independent_units": units, "block_threads": threads, "dense": dense}
        program = CELLS[name].programs[dtype]
        for narrow in (False, True) if dtype.itemsize == 2 else (False,):
            binary(program, dtype, backward, -1, architecture, narrow=narrow, **how)


@compiled_for(["mingru", *WITHOUT_PRODUCT], "mingru", "sm_75", "sm_120")
@passes
def test_kernels_of_tiles_of_independent_units_compile(name, architecture, backward):
    for dtype, units, threads, dense in (
        (torch.bfloat16, 2, 256, False),
        (torch.float32, 1, 256, True),
        (DOUBLE, 1, 128, True),
    ):
        how = {"independent_units": units, "block_threads": threads, "dense": dense}
        binary(CELLS[name].program, dtype, backward, -1, architecture, **how)


@pytest.mark.parametrize(
    "name", [name for name, cell in CELLS.items() if cell.gates > 0 and not cell.derived.over_units]
)
def test_fused_steps_compile_for_hopper(name):
    cell = CELLS[name]
    for backward, rows in [(False, 64), (True, 64), (True, 128)] + [(False, 128)] * (cell.gates == 3):
        binary(cell.program, torch.bfloat16, backward, rows=rows)


@compiled_for(["gru", "slstm", "lstm", *WITH_OUTPUT], "slstm", "sm_75", "sm_120")
@passes
def test_steps_of_small_batch_compile(name, architecture, backward):
    for rows in (1, 4, 8, 16):
        binary(CELLS[name].program, torch.float32, backward, -1, architecture, small_batch=rows)


@compiled_for(["gru", "slstm"], "gru", "sm_75")
def test_a_single_step_compiles(name, architecture):
    for dtype, rows, on_tensor_cores in (
        (torch.float32, 1, False),
        (torch.bfloat16, 8, False),
        (torch.float16, 8, True),
        (torch.float32, 8, True),
    ):
        how = {"single_step_rows": rows, "on_tensor_cores": on_tensor_cores}
        binary(CELLS[name].program, dtype, False, architecture=architecture, **how)


@pytest.mark.parametrize("gates", [5, 6, 7, 8])
def test_fused_steps_of_many_gates_compile(gates):
    @lltm_ext.recurrence(gates=gates)
    def wide(x):
        return torch.tanh(sum(x))

    binary(wide.program, torch.bfloat16, False, rows=64)


def test_a_program_is_one_line_and_older_ones_with_lines_mean_the_same():
    """torch.compile writes it into a comment of its code. Exported files have the older form."""
    for cell in (cells.gru, cells.slstm, TEXTS["gru"]):
        for program in (*cell.programs.values(), *cell.programs_to_initial.values()):
            assert len(program.splitlines()) == 1
            with_lines = program.replace(LINE, "\n")
            assert len(with_lines.splitlines()) > 9
            assert _C.source(with_lines, torch.float16, True, 3) == _C.source(program, torch.float16, True, 3)


def test_the_source_of_a_kernel_names_its_cell_and_variant():
    arguments = (cells.gru.program, torch.bfloat16, True, 3)
    source = _C.source(*arguments)
    assert "struct Cell" in source
    assert "PersistentConfig<Cell, T, 3, true>" in source
    assert "PersistentConfig<Cell, T, 3, true, bool>" in _C.source(*arguments, reset="bool")
    with pytest.raises(ValueError, match="gru: expected reset to be '', 'bool' or 'float', got 'int'"):
        _C.source(*arguments, reset="int")
    assert cells.gru.source in source
