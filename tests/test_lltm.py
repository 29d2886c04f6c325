import copy
import warnings

import pytest
import torch
from op_suite import BACKWARD, DOUBLE, FORWARD, Call, Make, assert_all_near, assert_near, cotangents
from sequence_suite import (
    INPUT,
    LayerSuite,
    SequenceSuite,
    for_any_algorithm,
    kinds,
    layer_bad_calls,
    layer_modules,
    sequence_bad_calls,
    sequence_empty_samples,
    sequence_samples,
    states,
)
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import lltm_ext
from lltm_ext.lltm import lltm_cell_reference, lltm_reference


class TestLLTMFunction(SequenceSuite):
    op = "lltm"
    gates = 3
    function = staticmethod(lltm_ext.lltm)
    reference = staticmethod(for_any_algorithm(lltm_reference))
    samples = sequence_samples(gates)
    empty_samples = sequence_empty_samples(gates)
    bad_calls = sequence_bad_calls(op, gates)

    def cell(self, x, h, c, weight_ih, weight_hh, bias):
        return lltm_cell_reference(x, torch.cat([weight_hh, weight_ih], 1), bias, h, c)

    def test_half_types_accumulate_the_cell_state_in_float32(self, device):
        """At 2048 float16 has steps of 2, so adding 0.5 many times changes nothing if each step rounds."""
        for dtype in (torch.float16, torch.bfloat16):
            zeros = torch.zeros(1, 1, dtype=dtype, device=device)
            bias = torch.tensor([100, 100, 0.5], dtype=dtype, device=device)
            input = torch.zeros(128, 1, 1, dtype=dtype, device=device)
            weights = torch.zeros(3, 1, dtype=dtype, device=device)
            _, (_, c_n) = lltm_ext.lltm(input, (zeros, torch.full_like(zeros, 2048)), weights, weights, bias)
            assert (c_n.dtype, c_n.item()) == (dtype, 2112)

    def test_large_cell_states_of_half_types_stay_finite(self, device):
        """The cell state is unbounded. Here it leaves float16's range; outputs and gradients do not."""
        bias = torch.tensor([100, 100, 1000], dtype=torch.float16, device=device).requires_grad_()
        zeros = torch.zeros(1, 1, dtype=torch.float16, device=device)
        weights = torch.zeros(3, 1, dtype=torch.float16, device=device)
        input = torch.zeros(100, 1, 1, dtype=torch.float16, device=device)
        output, (h_n, c_n) = lltm_ext.lltm(input, (zeros, zeros.float()), weights, weights, bias)
        assert c_n.item() == 100_000
        assert output.flatten().tolist() == [1] * 100
        (output.sum() + h_n.sum() + c_n.sum()).backward()
        assert bias.grad.tolist() == [0, 0, 100]


def weights_of(layer, k, suffix):
    end = f"_l{k}{suffix}"
    weights = torch.cat([getattr(layer, "weight_hh" + end), getattr(layer, "weight_ih" + end)], 1)
    return weights, getattr(layer, "bias" + end, None)


class LoopOverCells(torch.nn.Module):
    """An LLTM for [T, B, I] in float64: a Python loop over the reference's cell."""

    def __init__(self, layer):
        super().__init__()
        self.layer = copy.deepcopy(layer).double()

    def forward(self, input, hx=None):
        suffixes = ("", "_reverse") if self.layer.bidirectional else ("",)
        if hx is None:
            states = self.layer.num_layers * len(suffixes)
            hx = [input.new_zeros(states, input.shape[1], self.layer.hidden_size)] * 2
        h_n, c_n = [], []
        for k in range(self.layer.num_layers):
            outputs = []
            for suffix in suffixes:
                weights, bias = weights_of(self.layer, k, suffix)
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


class TestLLTM(LayerSuite):
    Layer = lltm_ext.LLTM
    hidden = 5
    modules = layer_modules(Layer, hidden)

    def peer(self, layer):
        return LoopOverCells(layer)

    @kinds
    @pytest.mark.parametrize("given", [False, True], ids=["no hx", "hx"])
    def test_it_equals_a_loop_over_cells(self, kind, given, device):
        layer, make = self.build(kind, device), Make(DOUBLE, device)
        call = Call(make(6, 4, INPUT), *([states(make, layer, 4)] if given else [])).leaves()
        outputs, gradients = [], []
        for function in (layer, self.peer(layer)):
            outputs.append(call.run(function))
            wanted = [*call.tensors, *function.parameters()]
            gradients.append(torch.autograd.grad(outputs[-1], wanted, cotangents(outputs[-1])))
        assert_all_near(*outputs, FORWARD[DOUBLE])
        assert_all_near(*gradients, BACKWARD[DOUBLE])

    @pytest.mark.parametrize("packed", [False, True])
    def test_gradients_of_a_long_sequence_summed_in_chunks(self, packed, device):
        """The backward takes a sequence of many rows in four chunks of steps."""
        layer, make = self.build("bidirectional", device), Make(DOUBLE, device)
        length, batch = 311, 60
        lengths = [length - 2 * (i % 7) if packed else length for i in range(batch)]
        input = make(length, batch, layer.input_size, scale=0.1).requires_grad_()
        if packed:
            output, _ = layer(pack_padded_sequence(input, lengths, enforce_sorted=False))
            output, _ = pad_packed_sequence(output)
        else:
            output, _ = layer(input)
        ours = torch.autograd.grad(output.sin().sum(), [input, *layer.parameters()])
        peer = self.peer(layer)
        loops = [peer(input[:n, [i for i in range(batch) if lengths[i] == n]])[0] for n in set(lengths)]
        expected = torch.autograd.grad(
            sum(output.sin().sum() for output in loops), [input, *peer.parameters()]
        )
        assert_all_near(ours, expected, BACKWARD[DOUBLE])

    def test_a_packed_batch_in_half_types(self, device):
        for dtype in (torch.float16, torch.bfloat16):
            layer = self.build("bidirectional", device, dtype)
            packed = pack_sequence([Make(dtype, device)(n, 7) for n in (6, 3, 2)])
            exact, _ = copy.deepcopy(layer).double()(packed.to(DOUBLE))
            assert_near(layer(packed)[0].data, exact.data, FORWARD[dtype])

    def test_parameters_have_the_names_and_shapes_of_nn_lstm(self):
        layer = lltm_ext.LLTM(7, 5, num_layers=2, bidirectional=True)
        expected = {}
        for k, features in ((0, 7), (1, 10)):
            for suffix in ("", "_reverse"):
                expected[f"weight_ih_l{k}{suffix}"] = (15, features)
                expected[f"weight_hh_l{k}{suffix}"] = (15, 5)
                expected[f"bias_l{k}{suffix}"] = (15,)
        assert {k: tuple(v.shape) for k, v in layer.state_dict().items()} == expected
        assert list(lltm_ext.LLTM(7, 5, bias=False).state_dict()) == ["weight_ih_l0", "weight_hh_l0"]

    def test_parameters_are_uniform_within_one_over_the_root_of_the_size(self):
        torch.manual_seed(0)
        for parameter in lltm_ext.LLTM(70, 100, num_layers=2).parameters():
            assert 0.08 < parameter.abs().max() <= 0.1
            assert abs(parameter.mean()) < 0.02

    def test_a_cell_with_the_same_weights_gives_the_same_steps(self, device):
        layer, make = self.build("plain", device), Make(DOUBLE, device)
        cell = lltm_ext.LLTMCell(7, 5, device=device, dtype=DOUBLE)
        weights, bias = weights_of(layer, 0, "")
        cell.load_state_dict({"weights": weights, "bias": bias})
        input = make(6, 4, 7)
        output, _ = layer(input)
        hx = None
        for x, expected in zip(input, output, strict=True):
            hx = cell(x, hx)
            assert_near(hx[0], expected, FORWARD[DOUBLE])

    # Dropout

    def test_dropout_drops_its_share(self, device):
        """The upper layer's weights make its candidate equal to its input, which is the dropout's output."""
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

    # Edges

    @pytest.mark.parametrize(
        "arguments, exception, pattern",
        [
            *layer_bad_calls("LLTM", 5),
            ((torch.zeros(7),), RuntimeError, r"^LLTM: expected input .*, got \[7\]"),
            ((torch.zeros(1, 6, 4, 7),), RuntimeError, r"^LLTM: expected input .*, got \[1, 6, 4, 7\]"),
            (
                (torch.zeros(6, 4, 6),),
                RuntimeError,
                r"^LLTM: expected input .*input_size = 7, got \[6, 4, 6\]",
            ),
            (
                (pack_sequence([torch.zeros(3, 6)]),),
                RuntimeError,
                r"^LLTM: expected input .*input_size = 7, got \[3, 6\]",
            ),
        ],
    )
    def test_bad_input_is_named_and_the_next_call_is_right(self, arguments, exception, pattern):
        self.assert_refused(arguments, exception, pattern)

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
