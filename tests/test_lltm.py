import warnings

import pytest
import torch
from op_suite import DOUBLE, FORWARD, Make, assert_near
from sequence_suite import (
    OPS,
    LayerSuite,
    LoopOverSteps,
    SequenceSuite,
    for_any_algorithm,
    layer_bad_calls,
    layer_modules,
    sequence_bad_calls,
    sequence_empty_samples,
    sequence_samples,
)
from torch.nn.utils.rnn import pack_sequence

import lltm_ext
from lltm_ext.lltm import lltm_reference


class TestLLTMFunction(SequenceSuite):
    op = "lltm"
    gates, adds_a_quarter = 3, [100, 100, 0.25]
    function = staticmethod(lltm_ext.lltm)
    reference = staticmethod(for_any_algorithm(lltm_reference))
    samples = sequence_samples(gates)
    empty_samples = sequence_empty_samples(gates)
    bad_calls = sequence_bad_calls(op, gates)

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


class TestLLTM(LayerSuite):
    Layer = lltm_ext.LLTM
    hidden = 5
    modules = layer_modules(Layer, hidden)

    def peer(self, layer):
        return LoopOverSteps(layer, OPS["lltm"].step)

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
        weights = torch.cat([layer.weight_hh_l0, layer.weight_ih_l0], 1)
        cell.load_state_dict({"weights": weights, "bias": layer.bias_l0})
        input = make(6, 4, 7)
        output, _ = layer(input)
        hx = None
        for x, expected in zip(input, output, strict=True):
            hx = cell(x, hx)
            assert_near(hx[0], expected, FORWARD[DOUBLE])

    def test_dropout_without_a_layer_above_warns(self):
        with pytest.warns(UserWarning, match=r"dropout.*num_layers=1"):
            lltm_ext.LLTM(7, 5, dropout=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lltm_ext.LLTM(7, 5, num_layers=2, dropout=0.5)

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
            ((pack_sequence([torch.zeros(3, 6)]),), RuntimeError, r"^LLTM: .*input_size = 7, got \[3, 6\]"),
        ],
    )
    def test_bad_input_is_named_and_the_next_call_is_right(self, arguments, exception, pattern):
        self.assert_refused(arguments, exception, pattern)
