"""lltm_ext.Recurrent: a user's cell as a layer. (Its manners, those of every CellLayer: test_lltm.py.)"""

import pytest
import torch
from op_suite import BACKWARD, DOUBLE, FORWARD, Call, Make, assert_all_near, assert_same_bits
from sequence_suite import INPUT, KINDS, kinds
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import lltm_ext
from lltm_ext import cells

OPTIONS = {"gates": 2, "separate": True, "states": ("c",), "parameters": {"a": None, "b": 0.25}}
OPTIONS |= {"inputs": ("gap", "mask")}


@lltm_ext.recurrence(**OPTIONS)
def timed(x, r, h, s, p, u):
    gate = torch.sigmoid(x[0] + p.a * r[0] - u.gap)
    c = gate * s.c + (1 - gate) * torch.tanh(x[1] * torch.sigmoid(r[1]) + p.b * h)
    return u.mask * h + (1 - u.mask) * torch.tanh(c), (c,)


of_both_states = lltm_ext.recurrence(**OPTIONS, output=("c", "h"))(timed.function)
HIDDEN = 6


# ---- parameters ------------------------------------------------------------------------------------------


def build(kind="plain", cell=timed, **options):
    torch.manual_seed(0)
    return lltm_ext.Recurrent(cell, INPUT, HIDDEN, **KINDS[kind], dtype=DOUBLE, **options)


def test_parameters_have_names_shapes_and_initial_values():
    layer = build("three bidirectional layers", heads=2)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert {n: s for n, s in shapes.items() if n.endswith("l0")} == {
        "weight_ih_l0": (12, INPUT),
        "weight_hh_l0": (12, 3),
        "bias_l0": (12,),
        "a_l0": (6,),
        "b_l0": (6,),
    }
    assert shapes["weight_ih_l2_reverse"] == (12, 12)
    assert len(shapes) == 3 * 2 * 5
    for name, p in layer.named_parameters():
        if name.startswith("b_"):
            assert (p == 0.25).all()
        else:
            assert 0 < p.abs().max() <= HIDDEN**-0.5
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(9)
    layer.reset_parameters()
    assert (layer.b_l2_reverse == 0.25).all()
    assert layer.a_l1.abs().max() <= HIDDEN**-0.5


def test_a_cell_without_recurrent_product_or_bias_has_no_such_weights():
    layer = lltm_ext.Recurrent(cells.indrnn, INPUT, HIDDEN, bias=False)
    assert list(layer.state_dict()) == ["weight_ih_l0", "w_hh_l0"]
    output, h_n = layer(torch.ones(3, 2, INPUT))
    assert (output.shape, h_n.shape) == ((3, 2, HIDDEN), (1, 2, HIDDEN))


def test_it_prints_its_cell_and_options():
    assert repr(build()) == f"Recurrent(timed, {INPUT}, {HIDDEN})"
    layer = build("two layers", bias=False, heads=3, batch_first=True)
    assert (
        repr(layer)
        == f"Recurrent(timed, {INPUT}, {HIDDEN}, num_layers=2, bias=False, batch_first=True, heads=3)"
    )


def test_options_that_do_not_fit_are_refused():
    for options, exception, message in (
        ({"cell": torch.tanh}, TypeError, "cell to be made by recurrence, got builtin_function_or_method"),
        ({"heads": 4}, ValueError, "heads to divide hidden_size = 6, got 4"),
        ({"heads": 0}, ValueError, "heads to be positive, got 0"),
        ({"heads": 2.0}, TypeError, "heads to be an int, got float"),
        ({"cell": cells.indrnn, "heads": 2}, ValueError, "heads to be 1 without a recurrent product, got 2"),
        ({"input_size": -1}, ValueError, "input_size to be positive, got -1"),
        ({"hidden_size": 0}, ValueError, "hidden_size to be positive, got 0"),
        ({"num_layers": 0}, ValueError, "num_layers to be positive, got 0"),
        ({"num_layers": 1.5}, TypeError, "num_layers to be an int, got float"),
        ({"dropout": True}, ValueError, r"dropout to be a probability in \[0, 1\], got True"),
        ({"dropout": 2}, ValueError, r"dropout to be a probability in \[0, 1\], got 2"),
    ):
        with pytest.raises(exception, match=f"^Recurrent: expected {message}"):
            lltm_ext.Recurrent(**{"cell": timed, "input_size": 3, "hidden_size": 6, **options})


@kinds
def test_the_outputs_of_a_cell_are_next_to_each_other(kind):
    layer, values = build(kind, of_both_states), values_of_steps()
    output, (h_n, c_n) = layer(Make(DOUBLE)(6, 4, INPUT), **values)
    directions = 1 + layer.bidirectional
    of_steps = output.unflatten(-1, (directions, 2, HIDDEN))
    last = [of_steps[(-1, 0)[i], :, i] for i in range(directions)]
    expected = torch.stack([c_n[-directions:], h_n[-directions:]], 2)
    assert_same_bits(last, expected.unbind(0))


# ---- resets and inputs of the steps ----------------------------------------------------------------------


def values_of_steps(length=6, batch=4):
    make = Make(DOUBLE, seed=4)
    mask = make(length, batch, HIDDEN) > 0.5
    reset = make(length, batch) > 0.7
    return {"gap": make(length, batch), "mask": mask, "reset": reset}


def by_function(layer, input, hx, reset, **inputs):
    """The layer by calls of its cell's function. The reverse direction is of the flipped sequence."""
    final = []
    for k in range(layer.num_layers):
        outputs = []
        for suffix in ("", "_reverse")[: 1 + layer.bidirectional]:
            weights = [getattr(layer, f"{name}_l{k}{suffix}") for name in ("weight_ih", "weight_hh", "bias")]
            named = {name: getattr(layer, f"{name}_l{k}{suffix}") for name in "ab"} | inputs
            x, starts = input, reset
            if suffix:
                x, *flipped = (value.flip(0) for value in (input, *inputs.values()))
                named |= dict(zip(inputs, flipped, strict=True))
                # Step t of the reversed order starts an episode if the step after it in time does.
                starts = torch.zeros_like(reset)
                starts[1:] = reset.flip(0)[:-1]
            states = tuple(state[len(final)] for state in hx)
            output, states = layer.cell(x, states, *weights, reset=starts, **named)
            outputs.append(output.flip(0) if suffix else output)
            final.append(states)
        input = torch.cat(outputs, -1)
    return input, tuple(torch.stack(states) for states in zip(*final, strict=True))


def states(layer, batch=4):
    make = Make(DOUBLE, seed=5)
    slices = layer.num_layers * (1 + layer.bidirectional)
    return make(slices, batch, HIDDEN), make(slices, batch, HIDDEN)


layered = pytest.mark.parametrize(
    "kind", ["plain", "two layers", "bidirectional", "three bidirectional layers"]
)
outputs = pytest.mark.parametrize("cell", [timed, of_both_states], ids=["h", "c and h"])


@layered
@outputs
def test_resets_and_inputs_go_to_all_layers_and_directions(kind, cell):
    layer, input, values = build(kind, cell), Make(DOUBLE)(6, 4, INPUT), values_of_steps()
    hx = states(layer)
    assert values["reset"].any() and values["mask"].any()
    ours = Call(input, hx, **values).run(layer)
    expected = Call(layer, input, hx, **values).run(by_function)
    assert_all_near(ours, expected, FORWARD[DOUBLE])


def test_batch_first_and_unbatched_values_have_the_layout_of_the_input():
    layer, input, values = build("bidirectional"), Make(DOUBLE)(6, 4, INPUT), values_of_steps()
    hx = states(layer)
    expected, (h_n, c_n) = layer(input, hx, **values)
    swapped = build("bidirectional", batch_first=True)
    found, final = swapped(
        input.transpose(0, 1), hx, **{name: x.transpose(0, 1) for name, x in values.items()}
    )
    assert_all_near([found.transpose(0, 1), *final], [expected, h_n, c_n], FORWARD[DOUBLE])
    for each in (layer, swapped):
        of_row = {name: x[:, 2] for name, x in values.items()}
        found, final = each(input[:, 2], tuple(x[:, 2] for x in hx), **of_row)
        assert_all_near([found, *final], [expected[:, 2], h_n[:, 2], c_n[:, 2]], FORWARD[DOUBLE])


@layered
@outputs
@pytest.mark.parametrize("lengths", [[6, 4, 4, 1], [2, 6, 1, 4]], ids=["sorted", "in any order"])
def test_packed_values_equal_the_sequences_one_by_one(kind, cell, lengths):
    layer, values = build(kind, cell), values_of_steps()
    input, hx = Make(DOUBLE)(6, 4, INPUT).requires_grad_(), states(layer)

    def pack(x):
        return pack_padded_sequence(x, lengths, enforce_sorted=lengths == sorted(lengths, reverse=True))

    output, final = layer(pack(input), hx, **{name: pack(x) for name, x in values.items()})
    padded, _ = pad_packed_sequence(output)
    ours, expected = [*final], []
    for b, length in enumerate(lengths):
        of_row = {name: x[:length, b] for name, x in values.items()}
        y, last = layer(input[:length, b], tuple(x[:, b] for x in hx), **of_row)
        ours.append(padded[:length, b])
        expected.append([*last, y])
    stacked = [torch.stack([row[i] for row in expected], 1) for i in range(2)]
    expected = [*stacked, *(row[2] for row in expected)]
    assert_all_near(ours, expected, FORWARD[DOUBLE])
    wanted = [input, *layer.parameters()]
    found, exact = (torch.autograd.grad(sum(y.sin().sum() for y in ys), wanted) for ys in (ours, expected))
    assert_all_near(found, exact, BACKWARD[DOUBLE])


@kinds
@pytest.mark.parametrize("heads", [2, 3, 6])
def test_heads_of_a_layer_are_block_diagonal(kind, heads):
    layer, dense = build(kind, cells.slstm, heads=heads), build(kind, cells.slstm)
    state = layer.state_dict()
    for name, weight in state.items():
        if name.startswith("weight_hh"):
            gates = weight.unflatten(0, (4, heads, -1))
            state[name] = torch.cat([torch.block_diag(*gate) for gate in gates])
    dense.load_state_dict(state)
    call = Call(Make(DOUBLE)(6, 4, INPUT))
    assert_all_near(call.run(layer), call.run(dense), FORWARD[DOUBLE])


def test_bad_values_of_steps_are_named():
    layer, input, values = build(), Make(DOUBLE)(6, 4, INPUT), values_of_steps()
    packed = pack_sequence([input[:, 0], input[:3, 1]])

    def call(input=input, **changes):
        return layer(input, **{**values, **changes})

    for arguments, exception, message in (
        ({"gap": None}, TypeError, "gap to be a Tensor, but it is missing"),
        ({"reset": 1}, TypeError, "reset to be a Tensor, got int"),
        ({"gaps": input}, TypeError, "the inputs gap, mask of timed, got gaps"),
        (
            {"gap": values["gap"].t()},
            RuntimeError,
            r"gap of shape \[6, 4\], as the input has, .*got \[4, 6\]",
        ),
        ({"input": packed}, TypeError, "gap to be a PackedSequence as input is, got Tensor"),
        (
            {"input": packed, "gap": pack_sequence([values["gap"][:, 0], values["gap"][:2, 1]])},
            RuntimeError,
            "gap packed with the lengths of input, got others",
        ),
    ):
        with pytest.raises(exception, match=f"^Recurrent: expected {message}"):
            call(**arguments)
    with pytest.raises(TypeError, match=r"^Recurrent: expected no such input of gru, got gap"):
        build(cell=cells.gru)(input, gap=values["gap"])
    with pytest.raises(
        RuntimeError, match=r"^timed: expected reset of shape \[length, batch\] = \[6, 4\], got"
    ):
        call(reset=torch.zeros(6, 4, HIDDEN))
    output, _ = call()
    assert output.isfinite().all()


def test_autocast_leaves_the_states_in_float32():
    layer = build().float()
    values = values_of_steps()
    with torch.autocast("cpu", torch.bfloat16):
        output, (h_n, c_n) = layer(Make()(6, 4, INPUT), **values)
    assert [x.dtype for x in (output, h_n, c_n)] == [torch.bfloat16, torch.bfloat16, torch.float32]
    output.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.norm() > 0 for p in layer.parameters())


def test_it_compiles_with_resets_and_inputs_into_one_graph(fresh_dynamo):
    layer, values = build("bidirectional"), values_of_steps(3, 2)  # short: it is unrolled
    call = Call(Make(DOUBLE)(3, 2, INPUT), **values)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_all_near(call.run(compiled), call.run(layer), FORWARD[DOUBLE])


def test_gradients_are_the_same_bits_each_time():
    layer, call = build("bidirectional"), Call(Make(DOUBLE)(6, 4, INPUT), **values_of_steps())
    runs = []
    for _ in range(2):
        layer.zero_grad()
        call.run(layer)[0].square().sum().backward()
        runs.append([p.grad.clone() for p in layer.parameters()])
    assert_same_bits(*runs)


def test_it_exports_with_a_batch_of_any_size():
    layer, make = build("bidirectional", cells.slstm, heads=2), Make(DOUBLE)
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(layer, (make(3, 4, INPUT),), dynamic_shapes=({1: batch},)).module()
    call = Call(make(3, 7, INPUT))
    assert_all_near(call.run(exported), call.run(layer), FORWARD[DOUBLE])


def test_a_layer_without_a_cell_names_the_cell():
    with pytest.raises(TypeError, match="Recurrent: expected cell to be made by recurrence, got int"):
        lltm_ext.Recurrent(32, 64)


def test_a_missing_input_of_the_steps_is_named():
    layer = lltm_ext.Recurrent(lltm_ext.cells.cfc, 3, 4)
    for inputs in ({}, {"time": None}):
        with pytest.raises(TypeError, match="Recurrent: expected time to be a Tensor, but it is missing"):
            layer(torch.zeros(2, 1, 3), **inputs)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=str)
@pytest.mark.parametrize("name", ["LSTM", "GRU", "LLTM"])
def test_both_directions_read_lazily_negated_tensors(name, dtype, device):
    layer = getattr(lltm_ext, name)(3, 8, bidirectional=True).to(device, dtype)
    weights = [x.detach() for x in layer.parameters()]
    states = [torch.randn(2, 2, 8, device=device, dtype=dtype) for _ in layer._cell.state_names]
    input = torch.randn(4, 2, 3, device=device, dtype=dtype)
    cotangent = torch.randn(4, 2, 16, device=device, dtype=dtype)

    def outputs_and_gradients(change):
        leaves = [change(x).requires_grad_() for x in (*weights, *states)]
        named = dict(zip(dict(layer.named_parameters()), leaves, strict=False))
        hx = tuple(leaves[len(named) :])
        output, _ = torch.func.functional_call(layer, named, (input, hx if len(hx) > 1 else hx[0]))
        return [output, *torch.autograd.grad(output, leaves, change(cotangent))]

    expected = outputs_and_gradients(torch.clone)
    assert_all_near(outputs_and_gradients(lambda x: torch._neg_view(-x)), expected, BACKWARD[dtype])
