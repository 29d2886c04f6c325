"""lltm_ext.recurrence and lltm_ext.Recurrent: cells of a user's own, against a loop over their units."""

import copy
import functools
import pickle
import re
import sys

import pytest
import torch
from cell_examples import (
    WITH_OUTPUT,
    call_of,
    everything,
    gru_with_recurrent_dropout,
    lstm_of_both_states,
    without_product,
)
from op_suite import (
    BACKWARD,
    DOUBLE,
    FLOATING,
    FORWARD,
    Call,
    Make,
    assert_all_near,
    assert_same_bits,
    cotangents,
    forward_and_gradients,
    needs_cuda,
    sum_of_squares,
)
from sequence_suite import assert_values_and_gradients, no_tensor, of_dtype, of_shape
from torch.nn import functional as F

import lltm_ext
from lltm_ext._arguments import SequenceCall
from lltm_ext._custom_cell import op_arguments
from lltm_ext._loop import run_loop
from lltm_ext.cells import gru

# ---- cells -----------------------------------------------------------------------------------------------


@lltm_ext.recurrence(gates=1)
def plain(x):
    return torch.tanh(x[0])


@lltm_ext.recurrence(gates=1, states=("total",))
def accumulator(x, s):
    total = s.total + x[0]
    return torch.tanh(total), (total,)


CELLS = {cell.__name__: cell for cell in (gru, plain, everything, without_product, accumulator)}
CELLS |= WITH_OUTPUT
cells = pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
with_product = pytest.mark.parametrize("cell", [c for c in CELLS.values() if c.recurrent], ids=repr)


def arguments(cell, make, wide=False, length=5, batch=3, hidden=6, **sizes):
    """A call of the cell. `wide`: the inputs of the steps differ from unit to unit."""
    call = call_of(cell, make, length, batch, hidden, **sizes)
    step = (length, batch, hidden) if wide else (length, batch)
    return Call(*call.args, **call.kwargs, **{u: make(*step) for u in cell.inputs})


def by_units(cell, input, hx, weight_ih, weight_hh, bias=None, *, reset=None, **named):
    """The cell by its definition: a loop over steps, rows and units, of numbers in float64."""
    states = [x.unbind(0) for x in (hx if cell.states else (hx,))]
    length, (batch, hidden) = len(input), (hx[0] if cell.states else hx).shape
    block = hidden if weight_hh is None else weight_hh.shape[1]
    rows = [[list(x[b]) for x in states] for b in range(batch)]  # [row][state][unit]
    names = (cell.output,) if isinstance(cell.output, str) else cell.output
    outputs, of_output = [], [("h", *cell.states).index(name) for name in names]
    for t in range(length):
        for b in range(batch):
            old = rows[b]
            if reset is not None:
                old = [[value * (1 - reset[t, b]) for value in state] for state in old]
            h, rows[b] = torch.stack(list(old[0])), [[] for _ in states]
            for unit in range(hidden):
                at = [g * hidden + unit for g in range(cell.gates)]
                x = [weight_ih[i] @ input[t, b] + (0 if bias is None else bias[i]) for i in at]
                head = unit // block * block
                r = [weight_hh[i] @ h[head : head + block] for i in at] if cell.recurrent else []
                if cell.recurrent and not cell.separate:
                    x = [a + b for a, b in zip(x, r, strict=True)]
                of_unit = [old[i][unit] for i in range(1, len(states))]
                p = [named[name][unit] for name in cell.parameters]
                u = [
                    value[t, b] if value.dim() == 2 else value[t, b, unit]
                    for value in map(named.get, cell.inputs)
                ]
                new_h, new = cell.step(x, r, h[unit], of_unit, p, u)
                for state, value in zip(rows[b], (new_h, *new), strict=True):
                    state.append(value)
        of_rows = (torch.stack([value for i in of_output for value in row[i]]) for row in rows)
        outputs.append(torch.stack(list(of_rows)))
    final = [torch.stack([torch.stack(rows[b][i]) for b in range(batch)]) for i in range(len(states))]
    return torch.stack(outputs), tuple(final) if cell.states else final[0]


def without_gradients_of_steps(cell, call):
    """forward_and_gradients wants a gradient of each tensor, which an input of the steps does not have."""
    fixed = {name: call.kwargs[name] for name in (*cell.inputs, "reset") if name in call.kwargs}
    free = {name: x for name, x in call.kwargs.items() if name not in fixed}
    return (
        functools.partial(cell, **fixed),
        functools.partial(by_units, cell, **fixed),
        Call(*call.args, **free),
    )


# ---- values ----------------------------------------------------------------------------------------------

OPTIONS = {
    "": {},
    "heads": {"heads": 3},
    "a head a unit": {"heads": 6},
    "inputs of each unit": {"wide": True},
    "one step": {"length": 1, "batch": 1},
    "reset by bool": {"length": 8, "reset": lambda at: at},
    "reset by int": {"length": 8, "reset": torch.Tensor.int},
    "a part is reset": {"length": 8, "reset": lambda at: 0.25 * at.double()},
}


@cells
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_values_and_gradients_equal_a_loop_over_units(cell, options, device):
    options = dict(options)
    to_reset = options.pop("reset", None)
    function, exact, call = without_gradients_of_steps(cell, arguments(cell, Make(DOUBLE, device), **options))
    if to_reset:
        at = torch.rand(8, 3, generator=torch.Generator().manual_seed(3)) < 0.4
        assert at.any() and not at.all()
        reset = to_reset(at.to(device))
        function, exact = (
            functools.partial(f, reset=r) for f, r in ((function, reset), (exact, reset.double()))
        )
    assert_values_and_gradients(function, exact, call)


@pytest.mark.parametrize("cell", WITH_OUTPUT.values(), ids=WITH_OUTPUT)
def test_the_output_may_be_a_state_or_several(cell, device):
    output, final = cell(*(call := arguments(cell, Make(DOUBLE, device))).args, **call.kwargs)
    names = [cell.output] if isinstance(cell.output, str) else cell.output
    parts = output[-1].chunk(len(names), -1)
    assert_same_bits(parts, [final[cell.state_names.index(f"{name}0")] for name in names])
    assert not torch.equal(parts[0], final[0])


@cells
def test_values_and_gradients_in_every_dtype(cell, dtype, device):
    call = arguments(cell, Make(dtype, device), heads=2)
    function, _, free = without_gradients_of_steps(cell, call)
    in_double, _, _ = without_gradients_of_steps(cell, call.map(torch.Tensor.double))
    outputs, gradients = assert_values_and_gradients(function, in_double, free, dtype)
    assert all(x.dtype == dtype for x in (*outputs, *gradients))


@cells
def test_no_bias_is_a_bias_of_zeros(cell, device):
    call = arguments(cell, Make(DOUBLE, device))
    *args, bias = call.args
    assert_all_near(
        Call(*args, **call.kwargs).run(cell),
        Call(*args, torch.zeros_like(bias), **call.kwargs).run(cell),
        FORWARD[DOUBLE],
    )


def test_each_of_several_states_keeps_its_dtype(device):
    call = call_of(lltm_ext.cells.slstm, Make(torch.float16, device), 5, 2, 4)
    input, (h0, c0, n0, m0), *weights = call.args
    _, final = lltm_ext.cells.slstm(input, (h0, c0, n0.float(), m0.float()), *weights)
    assert [x.dtype for x in final] == [torch.float16, torch.float16, torch.float32, torch.float32]


def test_half_types_keep_states_in_float32_and_round_h(device):
    """At 2048 float16 has steps of 2, so adding 0.25 many times changes nothing if each step rounds."""
    for dtype in (torch.float16, torch.bfloat16):
        zeros = torch.zeros(1, 1, dtype=dtype, device=device)
        start = torch.full_like(zeros, 2048, dtype=torch.float32)
        input = torch.full((512, 1, 1), 0.25, dtype=dtype, device=device)
        output, (h_n, total) = accumulator(input, (zeros, start), torch.ones_like(zeros), zeros)
        assert (output.dtype, h_n.dtype, total.dtype) == (dtype, dtype, torch.float32)
        assert total.item() == 2048 + 512 * 0.25
        final = accumulator(input, (zeros, start.to(dtype)), torch.ones_like(zeros), zeros)[1][1]
        assert final.dtype == dtype

        @lltm_ext.recurrence(gates=1, recurrent=False)
        def bounded(h):
            return torch.clamp(h + 0.25, max=5000.0)

        _, h_n = bounded(input, torch.full_like(zeros, 2048), torch.ones_like(zeros), None)
        assert h_n.item() == 2048


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_cell_affine_in_its_states_keeps_h_in_float32_during_a_call(dtype, device):
    @lltm_ext.recurrence(gates=1, recurrent=False)
    def counter(h):
        return h + 0.25

    input = torch.zeros(512, 1, 1, dtype=dtype, device=device)
    h0, weight = torch.full((1, 1), 2048, dtype=dtype, device=device), input[0]
    assert counter(input, h0, weight, None)[1].item() == 2048 + 512 * 0.25
    assert run_loop(counter, SequenceCall(input, [h0], weight, None))[1][0].item() == 2048 + 512 * 0.25


@cells
@pytest.mark.parametrize("length, batch, hidden", [(0, 3, 6), (5, 0, 6), (0, 0, 6), (5, 3, 0), (0, 0, 0)])
def test_no_steps_rows_or_units(cell, length, batch, hidden, device):
    call = arguments(cell, Make(DOUBLE, device), length=length, batch=batch, hidden=hidden)
    function, _, call = without_gradients_of_steps(cell, call)
    call = call.leaves()
    output, *final = call.run(function)
    assert output.shape == (length, batch, len(cell.declared.outputs) * hidden)
    states = call.args[1] if cell.states else (call.args[1],)
    if length == 0:
        assert_same_bits(final, states)
    gradients = torch.autograd.grad(output.sum(), call.tensors, allow_unused=True, materialize_grads=True)
    assert all((g == 0).all() for g in gradients)
    weights = [x for x in call.tensors if not any(x is s for s in states)]
    assert all(g is not None for g in torch.autograd.grad(call.run(function)[0].sum(), weights))


# ---- heads -----------------------------------------------------------------------------------------------


@with_product
@pytest.mark.parametrize("heads", [2, 3, 6])
def test_heads_equal_a_dense_block_diagonal_weight(cell, heads, device):
    call = arguments(cell, Make(DOUBLE, device), heads=heads)
    input, hx, weight_ih, weight_hh, bias = call.args
    blocks = weight_hh.view(cell.gates, heads, 6 // heads, 6 // heads)
    dense = torch.cat([torch.block_diag(*gate) for gate in blocks])
    expected = Call(input, hx, weight_ih, dense, bias, **call.kwargs).run(cell)
    assert_all_near(call.run(cell), expected, FORWARD[DOUBLE])


# ---- transforms and tracing ------------------------------------------------------------------------------


@cells
def test_gradcheck(cell):
    assert cell.gradcheck()
    call = arguments(cell, Make(torch.float32), length=2, batch=1, input_size=1, hidden=2)
    assert cell.gradcheck(*call.args, **call.kwargs, reset=torch.tensor([[False], [True]]))


def test_gradcheck_names_the_argument_whose_gradient_is_wrong():
    @lltm_ext.recurrence(gates=1, parameters=("good", "bad"))
    def halved(x, p):
        return torch.tanh(x[0] + p.good + p.bad.detach() + 0.5 * (p.bad - p.bad.detach()))

    with pytest.raises(
        RuntimeError, match=r"(?s)^halved: the gradient with respect to bad is wrong: .*numerical"
    ):
        halved.gradcheck()


@cells
def test_second_derivatives(cell):
    call = arguments(cell, Make(DOUBLE), length=3, batch=2, input_size=2, hidden=2)
    function, _, call = without_gradients_of_steps(cell, call)
    call = call.leaves()
    assert torch.autograd.gradgradcheck(call.bind(function), call.tensors)


@cells
def test_vmap_and_functional_gradients(cell):
    """Per-sample gradients, and a batch of weights (an ensemble)."""
    calls = [arguments(cell, Make(DOUBLE, seed=seed)) for seed in range(3)]
    functions = [without_gradients_of_steps(cell, call)[::2] for call in calls]
    function = functions[0][0]  # one set of inputs of the steps for all
    tensors = [call.tensors for _, call in functions]
    template = functions[0][1]

    def loss(*tensors):
        return sum_of_squares(template.with_tensors(tensors).run(function))

    argnums = tuple(range(len(tensors[0])))
    stacked = [torch.stack(xs) for xs in zip(*tensors, strict=True)]
    together = torch.vmap(torch.func.grad(loss, argnums))(*stacked)
    one_by_one = [torch.func.grad(loss, argnums)(*xs) for xs in tensors]
    assert_all_near(together, [torch.stack(gs) for gs in zip(*one_by_one, strict=True)], BACKWARD[DOUBLE])


@cells
def test_forward_mode_derivatives(cell):
    call = arguments(cell, Make(DOUBLE), length=3)
    function, _, call = without_gradients_of_steps(cell, call)
    directions = cotangents(call.tensors)
    _, along = torch.func.jvp(call.bind(function), tuple(call.tensors), tuple(directions))
    outputs, gradients = forward_and_gradients(function, call)
    transposed = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    torch.testing.assert_close(
        sum(
            (a * c).sum()
            for a, c in zip(along if isinstance(along, tuple) else (along,), cotangents(outputs), strict=True)
        ),
        transposed,
    )


@pytest.mark.parametrize("cell", [everything, lstm_of_both_states], ids=repr)
def test_a_call_compiles_into_one_graph(cell, fresh_dynamo):
    function, _, call = without_gradients_of_steps(cell, arguments(cell, Make(DOUBLE)))
    compiled = torch.compile(cell.__call__, fullgraph=True, backend="aot_eager")
    ours, exact = (
        forward_and_gradients(f, call) for f in (functools.partial(compiled, **function.keywords), function)
    )
    assert_all_near([*ours[0], *ours[1]], [*exact[0], *exact[1]], FORWARD[DOUBLE])


@pytest.mark.parametrize("reset_to", ["zeros", "initial"])
def test_opcheck_of_several_outputs(reset_to, device):
    cell, make = lstm_of_both_states, Make(DOUBLE, device)
    tensors = Call(make(3, 2, 4), (make(2, 6), make(2, 6)), make(24, 4), make(24, 6))
    reset = make(3, 2) > 0.5
    programs = cell.programs if reset_to == "zeros" else cell.programs_to_initial
    args, leaves = (
        (*op_arguments(cell, SequenceCall(*call.args, reset=reset)), None, False, "auto", programs[DOUBLE])
        for call in (tensors, tensors.leaves())
    )
    torch.library.opcheck(torch.ops.lltm_ext.custom_cell.default, leaves)
    torch.library.opcheck(torch.ops.lltm_ext.custom_cell_forward.default, args)
    output, h_n, c_n, gates, extra, h = torch.ops.lltm_ext.custom_cell_forward(*args)
    backward = (output, h_n, c_n, h, gates, extra, *args, True, True)
    torch.library.opcheck(torch.ops.lltm_ext.custom_cell_backward.default, backward)


@cells
def test_autocast_lowers_all_but_the_states(cell):
    call = arguments(cell, Make(torch.float32))
    function, _, call = without_gradients_of_steps(cell, call)
    with torch.autocast("cpu", torch.bfloat16):
        outputs, gradients = forward_and_gradients(function, call)
    states = [torch.float32] * len(cell.states)
    assert [y.dtype for y in outputs] == [torch.bfloat16, torch.bfloat16, *states]
    assert all(g.dtype == torch.float32 for g in gradients)
    rounded = call.map(lambda x: x.bfloat16().float())
    exact, exact_gradients = forward_and_gradients(function, rounded, cotangents(outputs))
    assert_all_near(outputs, exact, FORWARD[torch.bfloat16])
    assert_all_near(gradients, exact_gradients, BACKWARD[torch.bfloat16])
    with torch.autocast("cpu", torch.bfloat16):
        plain = call.map(torch.Tensor.double).run(function)
    assert all(y.dtype == DOUBLE for y in plain)


def test_no_graph_is_recorded_without_need():
    call = arguments(everything, Make(DOUBLE))
    assert not any(y.requires_grad for y in call.run(everything))
    with torch.no_grad():
        assert not any(y.requires_grad for y in call.leaves().run(everything))


SCALE = 0.5
CALLS = []


@lltm_ext.recurrence(gates=1)
def scaled_by_a_global(x, h):
    CALLS.append(SCALE)
    return torch.tanh(x[0] * SCALE + h)


def test_a_global_number_keeps_its_value_of_the_declaration(monkeypatch):
    """In calls, their first and second derivatives, and the kernels' source. The function is not called."""
    call = Call(*(Make(DOUBLE)(*shape) for shape in ((4, 2, 3), (2, 5), (5, 3), (5, 5)))).leaves()

    def outputs_and_derivatives():
        output, h_n = scaled_by_a_global(*call.args)
        first = torch.autograd.grad(sum_of_squares((output, h_n)), call.tensors, create_graph=True)
        return [output, h_n, *first, *torch.autograd.grad(sum_of_squares(first), call.tensors)]

    before, calls = outputs_and_derivatives(), len(CALLS)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert_same_bits(outputs_and_derivatives(), before)
    assert "0.5" in scaled_by_a_global.source
    assert len(CALLS) == calls


def test_the_derivative_of_softplus_at_0_is_a_half():
    @lltm_ext.recurrence(gates=1)
    def softplus(x):
        return F.softplus(x[0])

    x = torch.zeros(1, 1, 1, dtype=DOUBLE, requires_grad=True)
    zeros, one = torch.zeros(1, 1, dtype=DOUBLE), torch.ones(1, 1, dtype=DOUBLE)
    output, _ = softplus(x, zeros, one, zeros)
    (first,) = torch.autograd.grad(output, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert (first.item(), second.item()) == (0.5, 0.25)


# ---- the object ------------------------------------------------------------------------------------------


def test_a_cell_says_what_it_is():
    assert repr(everything).startswith(
        "<lltm_ext.recurrence everything(u, p, s, r, x, h), 2 gates, separate products, states: c, n, "
        "parameters: a, b, inputs: gap, mask, saved for backward: "
    )
    assert repr(without_product) == (
        "<lltm_ext.recurrence without_product(x, h, s, p, u), 2 gates, no recurrent product, "
        "states: fast, slow, parameters: rate, inputs: gap, saved for backward: "
        f"{', '.join(without_product.derived.saved_names)}, affine in its states>"
    )
    assert repr(plain).startswith(
        "<lltm_ext.recurrence plain(x), 1 gate, states: none, parameters: none, inputs: none, saved for "
    )
    assert repr(gru_with_recurrent_dropout).endswith(", output: y>")
    assert repr(lstm_of_both_states).endswith(", output: c, h>")
    of_one = lltm_ext.recurrence(gates=1, output=["h"])(plain.function)
    given = (gru, gru_with_recurrent_dropout, lstm_of_both_states, of_one)
    assert [cell.output for cell in given] == ["h", "y", ("c", "h"), "h"]
    assert (everything.__name__, everything.__module__) == ("everything", "cell_examples")
    assert everything.__doc__ == "Every value, in an order of its own."
    assert isinstance(everything, lltm_ext.RecurrentCell)


def test_a_cell_is_copied_as_a_function_is():
    assert copy.deepcopy(gru) is gru
    assert pickle.loads(pickle.dumps(gru)) is gru


@cells
def test_the_algorithm_of_a_call(cell):
    call = arguments(cell, Make())
    for algorithm in ("auto", "stepwise"):
        assert cell.algorithm(*call.args, **call.kwargs, algorithm=algorithm, backward=True) == "stepwise"
        assert_same_bits(call.run(functools.partial(cell, algorithm=algorithm)), call.run(cell))
    with torch.autocast("cpu", torch.bfloat16):
        assert cell.algorithm(*call.args, **call.kwargs) == "stepwise"


def declare(**options):
    def function(x):
        return torch.tanh(x[0])

    return lltm_ext.recurrence(**{"gates": 1, **options})(function)


@pytest.mark.parametrize(
    "options, exception, message",
    [
        ({"gates": 0}, ValueError, "expected gates to be a positive int, got 0"),
        ({"gates": 2.0}, ValueError, "expected gates to be a positive int, got 2.0"),
        ({"separate": True, "recurrent": False}, ValueError, "expected separate=False for a cell without"),
        ({"states": "c"}, TypeError, "expected states to be a sequence of names, got 'c'"),
        ({"parameters": (1,)}, TypeError, r"expected parameters to be a sequence of names, got \(1,\)"),
        ({"states": ("h",)}, ValueError, "expected states without the name 'h', which is taken"),
        ({"states": ("c", "c")}, ValueError, "expected states without the name 'c', which is taken"),
        ({"parameters": ("bias",)}, ValueError, "expected parameters without the name 'bias'"),
        ({"parameters": ("h0",)}, ValueError, "expected parameters without the name 'h0'"),
        ({"inputs": ("reset",)}, ValueError, "expected inputs without the name 'reset'"),
        ({"parameters": ("a",), "inputs": ("a",)}, ValueError, "expected inputs without the name 'a'"),
        ({"inputs": ("2",)}, ValueError, "expected the names of inputs to be identifiers, got '2'"),
        ({"inputs": ("if",)}, ValueError, "expected the names of inputs to be identifiers, got 'if'"),
        ({"states": ("_c",)}, ValueError, "expected the names of states to be identifiers, got '_c'"),
        ({"states": ("\u03b1",)}, ValueError, "expected the names of states to be identifiers, got '\u03b1'"),
        ({"output": 0}, TypeError, "expected output to be the name of a state, or several, got 0"),
        (
            {"output": ("h", 1)},
            TypeError,
            r"expected output to be the name of a state, or several, got \('h', 1\)",
        ),
        ({"output": {"h"}}, TypeError, "expected output to be the name of a state, or several, got {'h'}"),
        ({"output": ()}, ValueError, r"expected output to name a state, or several once each, got \(\)"),
        (
            {"output": ("h", "h")},
            ValueError,
            r"expected output to name a state, or several once each, got \('h', 'h'\)",
        ),
        ({"output": ("h", "y")}, ValueError, "expected output to be one of h, got 'y'"),
        ({"output": "y"}, ValueError, "expected output to be one of h, got 'y'"),
        ({"states": ("c",), "output": "y"}, ValueError, "expected output to be one of h, c, got 'y'"),
    ],
)
def test_declarations_that_do_not_fit_are_refused(options, exception, message):
    with pytest.raises(exception, match=f"^function: {message}"):
        declare(**options)


def test_functions_that_do_not_fit_are_refused():
    with pytest.raises(TypeError, match=r"^recurrence: expected a function, got int"):
        lltm_ext.recurrence(gates=1)(3)


@pytest.mark.parametrize(
    "states, returned, message",
    [
        (
            (),
            lambda x: (x[0], (x[0],)),
            "expected the function to return the new h, as the cell declares no states=, got 1 state",
        ),
        ((), lambda x: 1.0, "expected the new h to be a tensor, got 1.0"),
        (("c",), lambda x: x[0], r"expected the function to return \(h, \(c,\)\), got 0 states"),
        (("c", "n"), lambda x: (x[0], (x[0], 0.0)), "expected the new n to be a tensor, got 0.0"),
    ],
)
def test_results_that_do_not_fit_are_refused(states, returned, message):
    with pytest.raises((TypeError, ValueError), match=rf"(?s)^<lambda>: {message}.*test_recurrence.py"):
        lltm_ext.recurrence(gates=1, states=states)(returned)


def test_no_states_may_be_returned_as_an_empty_tuple():
    @lltm_ext.recurrence(gates=1)
    def with_tuple(x):
        return torch.tanh(x[0]), ()

    call = arguments(plain, Make())
    assert_same_bits(call.run(with_tuple), call.run(plain))


def changed(**changes):
    """The arguments of a call of `everything`, some of them changed by functions."""
    call = arguments(everything, Make())
    names = ("input", "hx", "weight_ih", "weight_hh", "bias")
    given = {**dict(zip(names, call.args, strict=True)), **call.kwargs}
    return {
        name: changes[name](given.get(name)) if name in changes else given[name]
        for name in {**given, **changes}
    }


NO_ALGORITHM = "algorithm to be 'auto', 'stepwise', 'cluster' or 'grid', got 'fastest'"
SPARSE = "of layout torch.strided, got torch.sparse_coo"


def to_meta(x):
    return x.to("meta")


def of_state(index, change, exception, message):
    def changed_states(hx):
        return (*hx[:index], change(hx[index]), *hx[index + 1 :])

    return "hx", changed_states, exception, message


BATCH, STEPS, ROWS = "batch, hidden_size", "length, batch", "2*hidden_size"
BAD_CALLS = {
    "no input": no_tensor("input", None, "NoneType"),
    "input of 2-D": of_shape("input", lambda x: x[0], "length, batch, input_size", [3, 4]),
    "input of 1-D": of_shape("input", lambda x: x[0, 0], "length, batch, input_size", [4]),
    "sparse input": ("input", torch.Tensor.to_sparse, RuntimeError, "input of layout torch.strided, got"),
    "integers": of_dtype("input", torch.Tensor.long, "int64", FLOATING),
    "weight_ih of 1-D": of_shape("weight_ih", lambda x: x[0], f"{ROWS}, input_size", [4], [12, 4]),
    "one state": ("hx", lambda x: x[0], TypeError, "hx to be a tuple (h0, c0, n0), got Tensor"),
    "two states": ("hx", lambda x: x[:2], TypeError, "hx to be a tuple (h0, c0, n0), got tuple of 2"),
    "n0 a number": of_state(2, *no_tensor("n0", 1, "int")[1:]),
    "n0 in float64": of_state(2, *of_dtype("n0", torch.Tensor.double, "float64")[1:]),
    "h0 of 3-D": of_state(0, *of_shape("h0", lambda x: x[None], BATCH, [1, 3, 6])[1:]),
    "c0 of another batch": of_state(1, *of_shape("c0", lambda x: x[1:], BATCH, [2, 6], [3, 6])[1:]),
    "no weight_hh": no_tensor("weight_hh", None, "NoneType"),
    "weight_hh of no heads": of_shape(
        "weight_hh", lambda x: x[:, :4], f"{ROWS}, hidden_size (or / heads)", [12, 4], [12, 6]
    ),
    "weight_hh in float64": of_dtype("weight_hh", torch.Tensor.double, "float64"),
    "sparse weight_hh": ("weight_hh", torch.Tensor.to_sparse, RuntimeError, f"weight_hh {SPARSE}"),
    "weight_hh elsewhere": ("weight_hh", to_meta, RuntimeError, "weight_hh on cpu, got meta"),
    "bias of one row": of_shape("bias", lambda x: x[None], ROWS, [1, 12], [12]),
    "a of a row a unit": of_shape("a", lambda x: x[:, None], "hidden_size", [6, 1], [6]),
    "a in float16": of_dtype("a", torch.Tensor.half, "float16"),
    "gap None": no_tensor("gap", None, "NoneType"),
    "gap transposed": of_shape("gap", torch.t, STEPS, [3, 5], "[5, 3] or, for each unit, [5, 3, 6]"),
    "gap complex": ("gap", lambda x: x + 0j, TypeError, "gap of a real dtype, got complex64"),
    "gap elsewhere": ("gap", to_meta, RuntimeError, "gap on cpu, got meta"),
    "sparse gap": ("gap", torch.Tensor.to_sparse, RuntimeError, f"gap {SPARSE}"),
    "reset of each unit": of_shape("reset", lambda x: torch.zeros(5, 3, 6), STEPS, [5, 3, 6], [5, 3]),
    "unknown": ("gaps", lambda x: 1, TypeError, "only the names a, b, gap, mask, got gaps"),
    "algorithm": ("algorithm", lambda x: "fastest", ValueError, NO_ALGORITHM),
}


@pytest.mark.parametrize("bad", BAD_CALLS)
def test_bad_calls_are_named(bad):
    name, change, exception, message = BAD_CALLS[bad]
    for function in (everything, everything.algorithm):
        with pytest.raises(exception, match="^" + re.escape(f"everything: expected {message}")):
            function(**changed(**{name: change}))


def test_missing_and_superfluous_arguments_are_named():
    given = changed()
    del given["gap"]
    with pytest.raises(TypeError, match=r"^everything: expected gap to be a Tensor, but it is missing"):
        everything(**given)
    call = arguments(plain, Make())
    with pytest.raises(TypeError, match=r"^plain: expected no parameter or input of a step, got gap"):
        plain(*call.args, gap=None)
    call = arguments(without_product, Make())
    input, h0, weight_ih, _, bias = call.args
    with pytest.raises(TypeError, match=r"^without_product: expected weight_hh to be None, because"):
        without_product(input, h0, weight_ih, torch.ones(6, 6), bias, **call.kwargs)
    with pytest.raises(TypeError, match=r"^plain: expected hx to be a Tensor, h0, got tuple of 1"):
        plain(input, (h0,), weight_ih, torch.ones(6, 6), bias)


@pytest.mark.parametrize("algorithm", ["cluster", "grid"])
def test_the_cpu_refuses_persistent_algorithms(algorithm):
    message = f"^everything: algorithm '{algorithm}' needs a CUDA device .algorithm 'auto' runs everything"
    with pytest.raises(RuntimeError, match=message):
        everything(**changed(), algorithm=algorithm)


def test_a_gate_that_nothing_reads_is_a_warning():
    with pytest.warns(UserWarning, match="lonely: the function reads no gate 1 of 2"):

        @lltm_ext.recurrence(gates=2)
        def lonely(x):
            return torch.tanh(x[0])


class KernelsFailed(RuntimeError):
    pass


@pytest.fixture
def kernels_fail(monkeypatch):
    """On the CPU, calls go to kernels, and the kernels raise KernelsFailed."""

    def run_kernels(*_):
        raise KernelsFailed

    module = sys.modules["lltm_ext.recurrence"]
    monkeypatch.setattr(module, "kernels_check", lambda *_: True)
    monkeypatch.setattr(module, "run_kernels", run_kernels)


def test_a_call_that_kernels_refuse_names_the_argument(kernels_fail):
    h0, weight_ih, weight_hh = torch.zeros(2, 4), torch.zeros(12, 3), torch.zeros(12, 5)
    with pytest.raises(RuntimeError, match="gru: expected weight_hh of shape") as raised:
        gru(torch.zeros(6, 2, 3), h0, weight_ih, weight_hh, b_hn=torch.zeros(4))
    assert raised.value.__suppress_context__


def test_a_failure_of_kernels_is_raised_where_all_arguments_fit(kernels_fail):
    h0, weight_ih, weight_hh = torch.zeros(2, 4), torch.zeros(12, 3), torch.zeros(12, 4)
    with pytest.raises(KernelsFailed):
        gru(torch.zeros(6, 2, 3), h0, weight_ih, weight_hh, b_hn=torch.zeros(4))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_a_cell_without_product_refuses_weight_hh(device):
    zeros = functools.partial(torch.zeros, device=device)
    with pytest.raises(TypeError, match="indrnn: expected weight_hh to be None"):
        lltm_ext.cells.indrnn(zeros(6, 2, 3), zeros(2, 4), zeros(4, 3), zeros(4, 4), w_hh=zeros(4))
