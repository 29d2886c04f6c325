import copy
import itertools
import warnings

import pytest
import torch
from op_suite import (
    BACKWARD,
    DOUBLE,
    FORWARD,
    Call,
    Make,
    ModuleSuite,
    SmoothSuite,
    assert_all_near,
    assert_near,
    assert_same_bits,
    cotangents,
    forward_and_gradients,
    needs_cuda,
    sum_of_squares,
)
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import lltm_ext
from lltm_ext.lltm import _SequenceFunction, lltm_cell_reference, lltm_reference

FLOATING = "float16, bfloat16, float32 or float64"


def sequence_arguments(make, length, batch, input_size, hidden_size, bias=True):
    return {
        "input": make(length, batch, input_size),
        "h0": make(batch, hidden_size, scale=0.5),
        "c0": make(batch, hidden_size),
        "weight_ih": make(3 * hidden_size, input_size, scale=max(input_size, 1) ** -0.5),
        "weight_hh": make(3 * hidden_size, hidden_size, scale=0.5 * hidden_size**-0.5),
        "bias": make(3 * hidden_size) if bias else None,
    }


def as_call(input, h0, c0, weight_ih, weight_hh, bias):
    return Call(input, (h0, c0), weight_ih, weight_hh, bias)


def sample(*sizes, **options):
    return lambda make: as_call(**sequence_arguments(make, *sizes, **options))


def changed(**changes):
    """A sample of which some arguments are given by functions of the good one."""

    def build(make):
        arguments = sequence_arguments(make, 6, 4, 3, 5)
        return as_call(**{name: changes.get(name, lambda x: x)(x) for name, x in arguments.items()})

    return build


def with_hx(hx):
    def build(make):
        call = sample(6, 4, 3, 5)(make)
        return Call(call.args[0], hx, *call.args[2:])

    return build


def with_algorithm(algorithm):
    return lambda make: Call(*sample(6, 4, 3, 5)(make).args, algorithm=algorithm)


def state_in_float32(make):
    arguments = sequence_arguments(make, 6, 4, 3, 5)
    arguments["c0"] = arguments["c0"] if make.dtype == DOUBLE else arguments["c0"].float()
    return as_call(**arguments)


def flat_reference(input, hx, weight_ih, weight_hh, bias=None, *, algorithm="auto"):
    return lltm_reference(input, hx, weight_ih, weight_hh, bias)


class TestLLTMFunction(SmoothSuite):
    op = "lltm"
    function = staticmethod(lltm_ext.lltm)
    reference = staticmethod(flat_reference)
    lowered_by_autocast = True
    saved = 4  # weight_hh
    samples = {
        "small": sample(3, 2, 3, 2),
        "1": sample(1, 1, 1, 1),
        "63": sample(7, 5, 9, 63),
        "500": sample(3, 21, 63, 500),
        "one step": sample(1, 4, 3, 5),
        "no bias": sample(6, 4, 3, 5, bias=False),
        "long": sample(100, 2, 3, 5),
        "states in float32": state_in_float32,
        "stepwise": with_algorithm("stepwise"),
    }
    resized = ("63", "long")
    empty_samples = {
        "no steps": sample(0, 4, 3, 5),
        "no rows": sample(6, 0, 3, 5),
        "no steps and no rows": sample(0, 0, 3, 5),
        "no features": sample(6, 4, 0, 5),
    }
    bad_calls = {
        **{
            f"{name} None": (
                changed(**{name: lambda x: None}),
                TypeError,
                f"^lltm: expected {name} to be a Tensor, got None",
            )
            for name in ("input", "h0", "c0", "weight_ih", "weight_hh")
        },
        "no states": (with_hx(None), TypeError, r"^lltm: expected hx to be a pair \(h0, c0\), got NoneType"),
        "one state": (
            with_hx(torch.zeros(4, 5)),
            TypeError,
            r"^lltm: expected hx to be a pair \(h0, c0\), got (Fake)?Tensor",
        ),
        "algorithm": (
            with_algorithm("fastest"),
            ValueError,
            "^lltm: expected algorithm to be 'auto'.*, got 'fastest'",
        ),
        "integers": (
            changed(input=torch.Tensor.long),
            TypeError,
            f"^lltm: expected input of dtype {FLOATING}, got int64",
        ),
        "h0 in float64": (
            changed(h0=torch.Tensor.double),
            TypeError,
            "^lltm: expected h0 of dtype float32, got float64",
        ),
        "c0 in float16": (
            changed(c0=torch.Tensor.half),
            TypeError,
            "^lltm: expected c0 of dtype float32, got float16",
        ),
        "weight_hh in bfloat16": (
            changed(weight_hh=torch.Tensor.bfloat16),
            TypeError,
            "^lltm: expected weight_hh of dtype float32, got bfloat16",
        ),
        "input of 2-D": (
            changed(input=lambda x: x[0]),
            RuntimeError,
            r"^lltm: expected input of shape \[length, batch, input_size\], got \[4, 3\]",
        ),
        "h0 of the layer's shape": (
            changed(h0=lambda x: x[None]),
            RuntimeError,
            r"^lltm: expected h0 of shape \[batch, hidden_size\], got \[1, 4, 5\]",
        ),
        "h0 of another batch": (
            changed(h0=lambda x: x[:1]),
            RuntimeError,
            r"^lltm: expected h0 of shape \[batch, hidden_size\] = \[4, 5\], got \[1, 5\]",
        ),
        "c0 of another size": (
            changed(c0=lambda x: x[:, 1:]),
            RuntimeError,
            r"^lltm: expected c0 of shape \[batch, hidden_size\] = \[4, 5\], got \[4, 4\]",
        ),
        "weight_ih transposed": (
            changed(weight_ih=lambda x: x.t()),
            RuntimeError,
            r"^lltm: expected weight_ih of shape \[3\*hidden_size, input_size\] = \[15, 3\], got \[3, 15\]",
        ),
        "weight_hh of another size": (
            changed(weight_hh=lambda x: x[:, :3]),
            RuntimeError,
            r"^lltm: expected weight_hh of shape \[3\*hidden_size, hidden_size\] = \[15, 5\], got \[15, 3\]",
        ),
        "bias of one row": (
            changed(bias=lambda x: x[None]),
            RuntimeError,
            r"^lltm: expected bias of shape \[3\*hidden_size\] = \[15\], got \[1, 15\]",
        ),
        "sparse input": (
            changed(input=torch.Tensor.to_sparse),
            RuntimeError,
            "^lltm: expected input of layout torch.strided, got Sparse",
        ),
    }

    def apply(self, input, hx, weight_ih, weight_hh, bias=None):
        """What lltm takes under torch.func's transforms."""
        output, h_n, c_n, *_ = _SequenceFunction.apply(input, *hx, weight_ih, weight_hh, bias, "auto")
        return output, (h_n, c_n)

    def dispatcher_calls(self, call):
        input, (h0, c0), *rest = call.args
        yield torch.ops.lltm_ext.lltm.default, Call(input, h0, c0, *rest)

    def test_opcheck_of_packed_rows_and_the_other_direction(self, device):
        for grad, reverse in itertools.product((False, True), repeat=2):
            arguments = sequence_arguments(Make(DOUBLE, device), 2, 3, 3, 2)
            rows = arguments.pop("input").flatten(0, 1)[:5]
            call = Call(rows, *arguments.values(), [3, 2], reverse)
            call = call.leaves() if grad else call
            torch.library.opcheck(torch.ops.lltm_ext.lltm.default, call.args)

    def test_the_other_direction_equals_the_sequence_turned_round(self, dtype, device):
        call = sample(6, 4, 3, 5)(Make(dtype, device))

        def other(input, hx, *weights):
            return torch.ops.lltm_ext.lltm(input, *hx, *weights, reverse=True)

        def turned(input, hx, *weights):
            output, (h_n, c_n) = lltm_reference(input.flip(0), hx, *weights)
            return output.flip(0), h_n, c_n

        outputs, gradients = forward_and_gradients(other, call)
        exact, exact_gradients = forward_and_gradients(
            turned, call.map(torch.Tensor.double), cotangents(outputs)
        )
        assert_all_near(outputs, exact, FORWARD[dtype])
        assert_all_near(gradients, exact_gradients, BACKWARD[dtype])

    @pytest.mark.parametrize("reverse", [False, True])
    def test_gradcheck_of_packed_rows(self, reverse, device):
        arguments = sequence_arguments(Make(DOUBLE, device), 3, 3, 2, 2)
        rows = arguments.pop("input").flatten(0, 1)[:6]
        call = Call(rows, *arguments.values()).leaves()

        def packed(*tensors):
            return torch.ops.lltm_ext.lltm(*tensors, [3, 2, 1], reverse)

        assert torch.autograd.gradcheck(packed, call.tensors)
        assert torch.autograd.gradgradcheck(packed, call.tensors)

    @pytest.mark.parametrize("sizes", [[2, 3], [4, 2], [3, 1], [3, 3, 0], [3, 4, -1], []])
    def test_batch_sizes_that_do_not_fit_are_refused(self, sizes):
        arguments = sequence_arguments(Make(), 2, 3, 3, 2)
        rows = arguments.pop("input").flatten(0, 1)
        with pytest.raises(RuntimeError, match=r"^lltm: expected batch_sizes to "):
            torch.ops.lltm_ext.lltm(rows, *arguments.values(), sizes)

    @pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
    @pytest.mark.parametrize("reverse", [False, True], ids=["onward", "backward in time"])
    def test_many_steps(self, packed, reverse, device):
        """More rows than one chunk of the backward takes."""
        length, batch = 1100, 16
        arguments = sequence_arguments(Make(DOUBLE, device), length, batch, 3, 2)
        rows = arguments.pop("input").flatten(0, 1)
        sizes = [batch - t * (batch - 1) // length for t in range(length)] if packed else [batch] * length
        assert sum(sizes) > 2 * 4096
        call = Call(rows[: sum(sizes)], *arguments.values())

        def ours(rows, *others):
            if packed:
                return torch.ops.lltm_ext.lltm(rows, *others, sizes, reverse)
            output, h_n, c_n = torch.ops.lltm_ext.lltm(
                rows.unflatten(0, (length, batch)), *others, None, reverse
            )
            return output.flatten(0, 1), h_n, c_n

        def loop(rows, h, c, weight_ih, weight_hh, bias):
            weights = torch.cat([weight_hh, weight_ih], 1)
            steps = list(enumerate(rows.split(sizes)))
            outputs = [None] * length
            for t, x in reversed(steps) if reverse else steps:
                new_h, new_c = lltm_cell_reference(x, weights, bias, h[: len(x)], c[: len(x)])
                h, c = torch.cat([new_h, h[len(x) :]]), torch.cat([new_c, c[len(x) :]])
                outputs[t] = new_h
            return torch.cat(outputs), h, c

        outputs, gradients = forward_and_gradients(ours, call)
        expected, exact = forward_and_gradients(loop, call)
        assert_all_near(outputs, expected, FORWARD[DOUBLE], "output")
        assert_all_near(gradients, exact, BACKWARD[DOUBLE], "gradient of argument")

    def test_it_equals_a_loop_over_cells(self, dtype, device):
        input, (h, c), weight_ih, weight_hh, bias = sample(6, 4, 3, 5)(Make(dtype, device)).args
        output, (h_n, c_n) = lltm_ext.lltm(input, (h, c), weight_ih, weight_hh, bias)
        weights = torch.cat([weight_hh, weight_ih], 1).double()
        h, c = h.double(), c.double()
        for t, x in enumerate(input.double()):
            h, c = lltm_cell_reference(x, weights, bias.double(), h, c)
            assert_near(output[t], h, FORWARD[dtype])
        assert_all_near([h_n, c_n], [h, c], FORWARD[dtype])

    def test_half_types_keep_the_cell_state_in_float32_inside(self, device):
        """At 2048 float16 counts in twos: 0.5 added many times arrives only where nothing rounds between."""
        for dtype in (torch.float16, torch.bfloat16):
            zeros = torch.zeros(1, 1, dtype=dtype, device=device)
            bias = torch.tensor([100, 100, 0.5], dtype=dtype, device=device)
            input = torch.zeros(128, 1, 1, dtype=dtype, device=device)
            weights = torch.zeros(3, 1, dtype=dtype, device=device)
            _, (_, c_n) = lltm_ext.lltm(input, (zeros, torch.full_like(zeros, 2048)), weights, weights, bias)
            assert (c_n.dtype, c_n.item()) == (dtype, 2112)

    def test_large_cell_states_of_half_types_stay_finite(self, device):
        """The cell is not bounded: here it leaves the range of float16, outputs and gradients do not."""
        bias = torch.tensor([100, 100, 1000], dtype=torch.float16, device=device).requires_grad_()
        zeros = torch.zeros(1, 1, dtype=torch.float16, device=device)
        weights = torch.zeros(3, 1, dtype=torch.float16, device=device)
        input = torch.zeros(100, 1, 1, dtype=torch.float16, device=device)
        output, (h_n, c_n) = lltm_ext.lltm(input, (zeros, zeros.float()), weights, weights, bias)
        assert c_n.item() == 100_000
        assert output.flatten().tolist() == [1] * 100
        (output.sum() + h_n.sum() + c_n.sum()).backward()
        assert bias.grad.tolist() == [0, 0, 100]

    def test_autocast_leaves_the_cell_state_in_float32(self, device):
        with torch.autocast(device, torch.bfloat16):
            outputs = self.call("63", torch.float32, device).run(lltm_ext.lltm)
        assert [y.dtype for y in outputs] == [torch.bfloat16, torch.bfloat16, torch.float32]

    def test_nan_stays_in_its_row_and_after_its_step(self, device):
        call = sample(6, 4, 3, 5)(Make(device=device))
        good, _ = lltm_ext.lltm(*call.args)
        call.args[0][2, 1, 0] = torch.nan
        output, (h_n, _) = lltm_ext.lltm(*call.args)
        assert output[2:, 1].isnan().all()
        assert h_n[1].isnan().all()
        others = torch.ones(6, 4, dtype=torch.bool)
        others[2:, 1] = False
        assert_same_bits([output[others]], [good[others]])

    def test_a_batch_above_65535(self, device):
        call = sample(2, 65_537, 1, 2)(Make(device=device))
        outputs, gradients = forward_and_gradients(self.function, call)
        exact, exact_gradients = forward_and_gradients(self.reference, call.map(torch.Tensor.double))
        assert_all_near(outputs, exact, FORWARD[torch.float32])
        assert_all_near(gradients, exact_gradients, BACKWARD[torch.float32])


def layer(*sizes, **options):
    """A function that builds the layer in double precision, whose dropout, if any, does nothing."""
    return lambda **where: lltm_ext.LLTM(*sizes, **options, **where)


def weights_of(layer, k, suffix):
    end = f"_l{k}{suffix}"
    weights = torch.cat([getattr(layer, "weight_hh" + end), getattr(layer, "weight_ih" + end)], 1)
    return weights, getattr(layer, "bias" + end, None)


def loop_over_cells(layer, input, hx=None):
    """What the layer must give for [T, B, I], by a Python loop over the reference's cell."""
    suffixes = ("", "_reverse") if layer.bidirectional else ("",)
    states = layer.num_layers * len(suffixes)
    if hx is None:
        hx = [input.new_zeros(states, input.shape[1], layer.hidden_size)] * 2
    h_n, c_n = [], []
    for k in range(layer.num_layers):
        outputs = []
        for suffix in suffixes:
            weights, bias = weights_of(layer, k, suffix)
            h, c = hx[0][len(h_n)], hx[1][len(c_n)]
            steps = list(input)
            found = []
            for x in steps if suffix == "" else reversed(steps):
                h, c = lltm_cell_reference(x, weights, bias, h, c)
                found.append(h)
            outputs.append(torch.stack(found if suffix == "" else found[::-1]))
            h_n.append(h)
            c_n.append(c)
        input = torch.cat(outputs, -1)
    return input, (torch.stack(h_n), torch.stack(c_n))


KINDS = {
    "plain": {},
    "two layers": {"num_layers": 2},
    "bidirectional": {"bidirectional": True},
    "three bidirectional layers": {"num_layers": 3, "bidirectional": True},
    "without bias": {"num_layers": 2, "bias": False, "bidirectional": True},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def build(kind, device="cpu", dtype=DOUBLE, **more):
    torch.manual_seed(0)
    return lltm_ext.LLTM(7, 5, **KINDS[kind], **more, device=device, dtype=dtype)


def states(make, layer, batch=4):
    shape = (layer.num_layers * (2 if layer.bidirectional else 1), batch, layer.hidden_size)
    return make(*shape, scale=0.5), make(*shape)


class TestLLTM(ModuleSuite):
    modules = {
        "LLTM": (layer(7, 5), lambda make: Call(make(6, 4, 7), (make(1, 4, 5), make(1, 4, 5)))),
        "batch_first": (layer(7, 5, batch_first=True), lambda make: Call(make(4, 6, 7))),
        "unbatched": (layer(7, 5), lambda make: Call(make(6, 7), (make(1, 5), make(1, 5)))),
        "all options": (
            layer(7, 5, num_layers=2, bias=False, batch_first=True, bidirectional=True),
            lambda make: Call(make(4, 6, 7), (make(4, 4, 5), make(4, 4, 5))),
        ),
    }

    @kinds
    @pytest.mark.parametrize("given", [False, True], ids=["no hx", "hx"])
    def test_it_equals_a_loop_over_cells(self, kind, given, device):
        layer, make = build(kind, device), Make(DOUBLE, device)
        call = Call(make(6, 4, 7), *([states(make, layer)] if given else [])).leaves()
        outputs, expected = call.run(layer), call.run(lambda *args: loop_over_cells(layer, *args))
        assert_all_near(outputs, expected, FORWARD[DOUBLE])
        wanted = [*call.tensors, *layer.parameters()]
        gradients, exact = (torch.autograd.grad(ys, wanted, cotangents(ys)) for ys in (outputs, expected))
        assert_all_near(gradients, exact, BACKWARD[DOUBLE])

    @kinds
    def test_values_in_every_dtype(self, kind, dtype, device):
        layer, make = build(kind, device, dtype), Make(dtype, device)
        call = Call(make(6, 4, 7), states(make, layer))
        exact = call.map(torch.Tensor.double)
        expected = exact.run(lambda *args: loop_over_cells(copy.deepcopy(layer).double(), *args))
        assert_all_near(call.run(layer), expected, FORWARD[dtype])

    @kinds
    @pytest.mark.parametrize("batch_first", [False, True])
    @pytest.mark.parametrize("batched", [False, True], ids=["unbatched", "batched"])
    def test_it_is_called_like_nn_lstm(self, kind, batch_first, batched, device):
        options = {**KINDS[kind], "batch_first": batch_first, "device": device}
        layer, peer = lltm_ext.LLTM(7, 5, **options), torch.nn.LSTM(7, 5, **options)
        make = Make(device=device)
        input = make(4, 6, 7) if batched else make(6, 7)
        hx = states(make, layer, batch=6 if not batch_first else 4)
        hx = hx if batched else tuple(x[:, 0].contiguous() for x in hx)  # cuDNN takes no others
        for arguments in ((input,), (input, hx), (input, None)):
            output, (h_n, c_n) = layer(*arguments)
            peer_output, (peer_h_n, peer_c_n) = peer(*arguments)
            assert output.shape == peer_output.shape
            assert (h_n.shape, c_n.shape) == (peer_h_n.shape, peer_c_n.shape)

    @pytest.mark.parametrize("packed", [False, True])
    def test_gradients_of_a_long_sequence_summed_in_chunks(self, packed, device):
        """The backward takes a sequence of many rows in four chunks of steps."""
        layer, make = build("bidirectional", device), Make(DOUBLE, device)
        length, batch = 311, 60
        lengths = [length - 2 * (i % 7) if packed else length for i in range(batch)]
        input = make(length, batch, layer.input_size, scale=0.1).requires_grad_()
        if packed:
            output, _ = layer(pack_padded_sequence(input, lengths, enforce_sorted=False))
            output, _ = pad_packed_sequence(output)
        else:
            output, _ = layer(input)
        wanted = [input, *layer.parameters()]
        ours = torch.autograd.grad(output.sin().sum(), wanted)
        loops = [
            loop_over_cells(layer, input[:n, [i for i in range(batch) if lengths[i] == n]])[0]
            for n in set(lengths)
        ]
        expected = torch.autograd.grad(sum(output.sin().sum() for output in loops), wanted)
        assert_all_near(ours, expected, BACKWARD[DOUBLE])

    @kinds
    def test_no_states_are_zero_states(self, kind, device):
        layer, make = build(kind, device), Make(DOUBLE, device)
        input = make(6, 4, 7)
        zeros = tuple(torch.zeros_like(x) for x in states(make, layer))
        assert_same_bits(Call(input).run(layer), Call(input, zeros).run(layer))

    @kinds
    def test_batch_first_swaps_input_and_output_and_no_state(self, kind, device):
        layer, make = build(kind, device), Make(DOUBLE, device)
        swapped = build(kind, device, batch_first=True)
        input, hx = make(6, 4, 7), states(make, layer)
        output, (h_n, c_n) = layer(input, hx)
        ours, (our_h_n, our_c_n) = swapped(input.transpose(0, 1), hx)
        assert_all_near([ours.transpose(0, 1), our_h_n, our_c_n], [output, h_n, c_n], FORWARD[DOUBLE])

    @kinds
    @pytest.mark.parametrize("batch_first", [False, True])
    def test_an_unbatched_sequence_equals_a_batch_of_one(self, kind, batch_first, device):
        layer, make = build(kind, device, batch_first=batch_first), Make(DOUBLE, device)
        dim = 0 if batch_first else 1
        input, hx = make(6, 7), states(make, layer, batch=1)
        output, (h_n, c_n) = layer(input.unsqueeze(dim), hx)
        ours, (our_h_n, our_c_n) = layer(input, tuple(x[:, 0] for x in hx))
        assert_all_near(
            [ours, our_h_n, our_c_n], [output.squeeze(dim), h_n[:, 0], c_n[:, 0]], FORWARD[DOUBLE]
        )

    def test_parameters_have_the_names_and_shapes_of_the_field(self):
        layer = lltm_ext.LLTM(7, 5, num_layers=2, bidirectional=True)
        expected = {}
        for k, features in ((0, 7), (1, 10)):
            for suffix in ("", "_reverse"):
                expected[f"weight_ih_l{k}{suffix}"] = (15, features)
                expected[f"weight_hh_l{k}{suffix}"] = (15, 5)
                expected[f"bias_l{k}{suffix}"] = (15,)
        assert {k: tuple(v.shape) for k, v in layer.state_dict().items()} == expected
        assert list(lltm_ext.LLTM(7, 5, bias=False).state_dict()) == ["weight_ih_l0", "weight_hh_l0"]

    def test_parameters_are_drawn_within_one_over_the_root_of_the_size(self):
        torch.manual_seed(0)
        for parameter in lltm_ext.LLTM(70, 100, num_layers=2).parameters():
            assert 0.08 < parameter.abs().max() <= 0.1
            assert abs(parameter.mean()) < 0.02

    def test_a_cell_with_the_same_weights_gives_the_same_steps(self, device):
        layer, make = build("plain", device), Make(DOUBLE, device)
        cell = lltm_ext.LLTMCell(7, 5, device=device, dtype=DOUBLE)
        weights, bias = weights_of(layer, 0, "")
        cell.load_state_dict({"weights": weights, "bias": bias})
        input = make(6, 4, 7)
        output, _ = layer(input)
        hx = None
        for x, expected in zip(input, output, strict=True):
            hx = cell(x, hx)
            assert_near(hx[0], expected, FORWARD[DOUBLE])

    def test_loading_a_checkpoint_of_another_shape_fails(self):
        with pytest.raises(RuntimeError, match="weight_ih_l1"):
            lltm_ext.LLTM(7, 5).load_state_dict(lltm_ext.LLTM(7, 5, num_layers=2).state_dict())
        with pytest.raises(RuntimeError, match="size mismatch for weight_hh_l0"):
            lltm_ext.LLTM(7, 5).load_state_dict(lltm_ext.LLTM(7, 6).state_dict())

    # Dropout

    def test_dropout_acts_between_layers_while_training(self, device):
        layer = build("two layers", device, dropout=0.5)
        input = Make(DOUBLE, device)(6, 4, 7)
        first, second = layer(input)[0], layer(input)[0]
        assert not torch.equal(first, second)
        torch.manual_seed(1)
        first = layer(input)[0]
        torch.manual_seed(1)
        assert torch.equal(layer(input)[0], first)
        layer.eval()
        assert_all_near(Call(input).run(layer), Call(input).run(build("two layers", device)), FORWARD[DOUBLE])

    def test_dropout_leaves_the_last_layer_and_the_states_alone(self, device):
        layer = build("two layers", device, dropout=0.5)
        input = Make(DOUBLE, device)(6, 4, 7)
        plain_output, (plain_h_n, _) = build("two layers", device)(input)
        output, (h_n, _) = layer(input)
        assert torch.equal(h_n[0], plain_h_n[0])
        assert not torch.equal(output, plain_output)
        assert torch.equal(output[-1], h_n[1])
        assert (output != 0).all()

    def test_dropout_of_everything_feeds_zeros(self, device):
        layer = build("two layers", device, dropout=1.0)
        input = Make(DOUBLE, device)(6, 4, 7).requires_grad_()
        output, _ = layer(input)
        upper = lltm_ext.LLTM(5, 5, device=device, dtype=DOUBLE)
        upper.load_state_dict({k.replace("l1", "l0"): v for k, v in layer.state_dict().items() if "l1" in k})
        expected, _ = upper(torch.zeros(6, 4, 5, dtype=DOUBLE, device=device))
        assert_near(output, expected, FORWARD[DOUBLE])
        (gradient,) = torch.autograd.grad(output.sum(), input)
        assert (gradient == 0).all()

    def test_dropout_drops_its_share(self, device):
        """Seen from above: the upper layer with weights that make its candidate the dropped value itself."""
        layer = lltm_ext.LLTM(1, 1, num_layers=2, dropout=0.25, device=device, dtype=DOUBLE)
        with torch.no_grad():
            for p in layer.parameters():
                p.zero_()
            layer.bias_l0.copy_(torch.tensor([50.0, 50.0, 1.0]))  # h = tanh(1) after one step
            layer.weight_ih_l1[2] = 1.0
            layer.bias_l1.copy_(torch.tensor([50.0, 50.0, 0.0]))  # c = the value let through
        torch.manual_seed(0)
        _, (_, c_n) = layer(torch.zeros(1, 10_000, 1, dtype=DOUBLE, device=device))
        kept = c_n[1] != 0
        assert abs(kept.double().mean().item() - 0.75) < 0.02
        torch.testing.assert_close(c_n[1][kept], torch.full_like(c_n[1][kept], 1.0).tanh() / 0.75)

    def test_dropout_without_a_layer_above_warns(self):
        with pytest.warns(UserWarning, match=r"dropout.*num_layers=1"):
            lltm_ext.LLTM(7, 5, dropout=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lltm_ext.LLTM(7, 5, num_layers=2, dropout=0.5)

    # Packed sequences

    @kinds
    @pytest.mark.parametrize("given", [False, True], ids=["no hx", "hx"])
    @pytest.mark.parametrize("lengths", [(6, 4, 4, 1), (2, 6, 1, 4), (3, 3, 3), (1,), (5, 1)], ids=str)
    def test_a_packed_batch_equals_each_sequence_alone(self, kind, given, lengths, device):
        layer, make = build(kind, device), Make(DOUBLE, device)
        sequences = [make(n, 7).requires_grad_() for n in lengths]
        hx = states(make, layer, len(lengths)) if given else None
        is_sorted = list(lengths) == sorted(lengths, reverse=True)
        for enforce_sorted in {False, is_sorted}:
            packed = pack_sequence(sequences, enforce_sorted=enforce_sorted)
            output, (h_n, c_n) = layer(packed, hx)
            assert isinstance(output, PackedSequence)
            padded, found_lengths = pad_packed_sequence(output)
            assert found_lengths.tolist() == list(lengths)
            ours, expected = [h_n, c_n], [[], []]
            for b, x in enumerate(sequences):
                alone, state = layer(x, tuple(s[:, b] for s in hx) if given else None)
                ours.append(padded[: len(x), b])
                expected.append(alone)
                for stack, s in zip(expected[:2], state, strict=True):
                    stack.append(s)
            expected = [torch.stack(s, 1) for s in expected[:2]] + expected[2:]
            assert_all_near(ours, expected, FORWARD[DOUBLE])
            wanted = [*sequences, *layer.parameters()]
            gradients, exact = (torch.autograd.grad(ys, wanted, cotangents(ys)) for ys in (ours, expected))
            assert_all_near(gradients, exact, BACKWARD[DOUBLE])

    def test_a_packed_batch_keeps_the_order_of_nn_lstm(self, device):
        layer = build("bidirectional", device)
        peer = torch.nn.LSTM(7, 5, bidirectional=True, device=device, dtype=DOUBLE)
        padded = Make(DOUBLE, device)(6, 4, 7)
        packed = pack_padded_sequence(padded, [2, 6, 1, 4], enforce_sorted=False)
        ours, theirs = layer(packed)[0], peer(packed)[0]
        assert ours.data.shape == theirs.data.shape
        for a, b in zip(ours[1:], theirs[1:], strict=True):
            assert torch.equal(a, b)

    def test_a_packed_batch_with_gradients_of_hx(self, device):
        layer, make = build("two layers", device), Make(DOUBLE, device)
        hx = tuple(x.requires_grad_() for x in states(make, layer, 3))
        packed = pack_sequence([make(n, 7) for n in (2, 5, 3)], enforce_sorted=False)
        output, (h_n, c_n) = layer(packed, hx)
        loss = sum_of_squares([output.data, h_n, c_n])
        gradients = torch.autograd.grad(loss, hx)
        h = 1e-6
        for x, gradient in zip(hx, gradients, strict=True):
            direction = Make(DOUBLE, device, seed=5)(*x.shape)
            ends = []
            for sign in (1, -1):
                moved = tuple(s + sign * h * direction if s is x else s for s in hx)
                output, final = layer(packed, moved)
                ends.append(sum_of_squares([output.data, *final]))
            torch.testing.assert_close(
                ((ends[0] - ends[1]) / (2 * h)), (gradient * direction).sum(), rtol=1e-6, atol=1e-8
            )

    def test_a_packed_batch_in_half_types(self, device):
        for dtype in (torch.float16, torch.bfloat16):
            layer = build("bidirectional", device, dtype)
            packed = pack_sequence([Make(dtype, device)(n, 7) for n in (6, 3, 2)])
            exact, _ = copy.deepcopy(layer).double()(packed.to(DOUBLE))
            assert_near(layer(packed)[0].data, exact.data, FORWARD[dtype])

    # Edges

    @kinds
    @pytest.mark.parametrize("length, batch", [(0, 4), (6, 0), (0, 0), (1, 1), (1, 4)])
    def test_few_or_no_steps_and_rows(self, kind, length, batch, device):
        layer, make = build(kind, device), Make(DOUBLE, device)
        input, hx = make(length, batch, 7).requires_grad_(), states(make, layer, batch)
        output, (h_n, c_n) = layer(input, hx)
        assert output.shape == (length, batch, 10 if layer.bidirectional else 5)
        if length == 0:
            assert_same_bits([h_n, c_n], hx)
        (output.sum() + h_n.sum() + c_n.sum()).backward()
        assert input.grad.shape == input.shape
        if length * batch == 0:
            assert all((p.grad == 0).all() for p in layer.parameters())
        else:
            expected = loop_over_cells(layer, input, hx)
            assert_all_near([output, h_n, c_n], [expected[0], *expected[1]], FORWARD[DOUBLE])

    @pytest.mark.parametrize("used", ["output", "h_n", "c_n"])
    def test_each_output_has_its_gradient_alone(self, used, device):
        layer, input = (
            build("three bidirectional layers", device),
            Make(DOUBLE, device)(6, 4, 7).requires_grad_(),
        )
        wanted = [input, *layer.parameters()]
        found = []
        for function in (layer, lambda x: loop_over_cells(layer, x)):
            output, (h_n, c_n) = function(input)
            y = {"output": output, "h_n": h_n, "c_n": c_n}[used]
            found.append(
                torch.autograd.grad(sum_of_squares(y), wanted, materialize_grads=True, allow_unused=True)
            )
        assert_all_near(*found, BACKWARD[DOUBLE])

    def test_frozen_parameters_get_no_gradient(self, device):
        layer = build("two layers", device)
        layer.weight_hh_l0.requires_grad_(False)
        layer(Make(DOUBLE, device)(6, 4, 7))[0].sum().backward()
        assert [n for n, p in layer.named_parameters() if p.grad is None] == ["weight_hh_l0"]

    def test_per_sample_gradients_of_the_layer(self):
        layer = build("bidirectional")
        parameters = {k: v.detach() for k, v in layer.named_parameters()}
        inputs = Make(DOUBLE)(3, 6, 7)

        def loss(parameters, x):
            return sum_of_squares(torch.func.functional_call(layer, parameters, (x,))[0])

        together = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, inputs)
        for b, x in enumerate(inputs):
            layer.zero_grad()
            sum_of_squares(layer(x)[0]).backward()
            for name, p in layer.named_parameters():
                assert_near(together[name][b], p.grad, BACKWARD[DOUBLE], name)

    def test_autocast(self, device):
        layer, input = (
            build("three bidirectional layers", device, torch.float32),
            Make(device=device)(6, 4, 7),
        )
        low = torch.float16 if device == "cuda" else torch.bfloat16
        with torch.autocast(device, low):
            output, (h_n, _) = layer(input)
        assert (output.dtype, h_n.dtype) == (low, low)
        output.float().square().sum().backward()
        assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())
        assert_near(output, layer(input)[0], 3 * FORWARD[low])

    @pytest.mark.parametrize(
        "arguments, exception, pattern",
        [
            ((None,), TypeError, "^LLTM: expected input to be a Tensor, got NoneType"),
            ((torch.zeros(7),), RuntimeError, r"^LLTM: expected input .*, got \[7\]"),
            (
                (torch.zeros(6, 4, 6),),
                RuntimeError,
                r"^LLTM: expected input .*input_size = 7, got \[6, 4, 6\]",
            ),
            ((torch.zeros(1, 6, 4, 7),), RuntimeError, r"^LLTM: expected input .*, got \[1, 6, 4, 7\]"),
            (
                (torch.zeros(6, 4, 7), torch.zeros(1, 4, 5)),
                TypeError,
                "^LLTM: expected hx to be a pair .*got Tensor",
            ),
            (
                (torch.zeros(6, 4, 7), (torch.zeros(1, 4, 5), None)),
                TypeError,
                "^LLTM: expected c0 .*got NoneType",
            ),
            (
                (torch.zeros(6, 4, 7), (torch.zeros(4, 5), torch.zeros(4, 5))),
                RuntimeError,
                r"^LLTM: expected h0 of shape \[1, 4, 5\], got \[4, 5\]",
            ),
            (
                (torch.zeros(6, 4, 7), (torch.zeros(1, 4, 5), torch.zeros(2, 4, 5))),
                RuntimeError,
                r"^LLTM: expected c0 of shape \[1, 4, 5\], got \[2, 4, 5\]",
            ),
            (
                (torch.zeros(6, 7), (torch.zeros(1, 6, 5), torch.zeros(1, 6, 5))),
                RuntimeError,
                r"^LLTM: expected h0 of shape \[1, 5\], got \[1, 6, 5\]",
            ),
            (
                (pack_sequence([torch.zeros(3, 7)]), (torch.zeros(1, 2, 5), torch.zeros(1, 2, 5))),
                RuntimeError,
                r"^LLTM: expected h0 of shape \[1, 1, 5\], got \[1, 2, 5\]",
            ),
            (
                (pack_sequence([torch.zeros(3, 6)]),),
                RuntimeError,
                r"^LLTM: expected input .*input_size = 7, got \[3, 6\]",
            ),
            (
                (torch.zeros(6, 4, 7, dtype=DOUBLE),),
                TypeError,
                "expected weight_ih of dtype float64, got float32",
            ),
            ((torch.zeros(6, 4, 7, dtype=torch.long),), TypeError, "expected input of dtype .*got int64"),
        ],
    )
    def test_bad_input_is_named_and_the_next_call_is_right(self, arguments, exception, pattern):
        layer = build("plain", dtype=torch.float32)
        with pytest.raises(exception, match=pattern):
            layer(*arguments)
        input = Make()(6, 4, 7)
        assert_near(layer(input)[0], loop_over_cells(layer, input)[0], FORWARD[torch.float32])

    @pytest.mark.parametrize(
        "options, exception, pattern",
        [
            ({"hidden_size": 0}, ValueError, "^LLTM: expected hidden_size to be positive, got 0"),
            ({"input_size": -1}, ValueError, "^LLTM: expected input_size to be positive, got -1"),
            ({"num_layers": 0}, ValueError, "^LLTM: expected num_layers to be positive, got 0"),
            ({"num_layers": 1.5}, TypeError, "^LLTM: expected num_layers to be an int, got float"),
            ({"dropout": 1.5}, ValueError, r"^LLTM: expected dropout .*\[0, 1\], got 1.5"),
            ({"dropout": True}, ValueError, "^LLTM: expected dropout .*got True"),
        ],
    )
    def test_bad_options(self, options, exception, pattern):
        with pytest.raises(exception, match=pattern):
            lltm_ext.LLTM(**{"input_size": 7, "hidden_size": 5, **options})

    def test_it_learns(self, device):
        """A few steps of Adam halve the loss of remembering the first input, in eager and compiled alike."""
        layer = build("plain", device, torch.float32)
        optimizer = torch.optim.Adam(layer.parameters(), 0.05)
        input = Make(device=device)(4, 32, 7)
        target = input[0, :, :5].tanh()
        losses = []
        for _ in range(40):
            optimizer.zero_grad()
            loss = (layer(input)[0][-1] - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0]

    @needs_cuda
    def test_gradients_are_the_same_bits_each_time(self):
        layer = build("three bidirectional layers", "cuda", torch.float32)
        input = Make(device="cuda")(50, 64, 7)
        runs = []
        for _ in range(3):
            layer.zero_grad()
            layer(input)[0].square().sum().backward()
            runs.append([p.grad.clone() for p in layer.parameters()])
        assert_same_bits(runs[1], runs[0])
        assert_same_bits(runs[2], runs[0])
