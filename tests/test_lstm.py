"""lstm against its reference, lltm_ext.LSTM against nn.LSTM. (Algorithm by algorithm: test_algorithms.py.)"""

import copy
import functools
import warnings

import pytest
import torch
from op_suite import (
    BACKWARD,
    DOUBLE,
    FORWARD,
    Call,
    Make,
    assert_all_near,
    assert_near,
    cotangents,
    forward_and_gradients,
    sum_of_squares,
)
from sequence_suite import (
    INPUT,
    OPS,
    LayerSuite,
    Recorder,
    SequenceSuite,
    for_any_algorithm,
    layer_bad_calls,
    layer_modules,
    results_of_layer,
    sequence_bad_calls,
    sequence_empty_samples,
    sequence_samples,
    states,
)
from torch import nn

import lltm_ext
from lltm_ext import _portable
from lltm_ext.lstm import lstm_reference


class TestLSTMFunction(SequenceSuite):
    op = "lstm"
    gates, adds_a_quarter = 4, [100, 100, 0.25541, 0]  # atanh(0.25)
    function = staticmethod(lltm_ext.lstm)
    reference = staticmethod(for_any_algorithm(lstm_reference))
    samples = sequence_samples(gates)
    empty_samples = sequence_empty_samples(gates)
    bad_calls = sequence_bad_calls(op, gates)

    def test_a_closed_forget_gate_forgets_and_an_open_one_keeps(self, device):
        """One case for the effect of each gate, in nn.LSTM's order."""
        zeros = torch.zeros(1, 1, dtype=DOUBLE, device=device)
        weights = torch.zeros(4, 1, dtype=DOUBLE, device=device)
        for (i, f, g, o), c_expected, h_expected in (
            ((-100, 100, 1, 100), 0.5, torch.tensor(0.5, dtype=DOUBLE).tanh()),  # forget gate open
            ((-100, -100, 1, 100), 0.0, 0.0),  # closed
            ((100, -100, 50, 100), 1.0, torch.tensor(1.0, dtype=DOUBLE).tanh()),  # input gate open
            ((-100, 100, 1, -100), 0.5, 0.0),  # output gate closed
        ):
            bias = torch.tensor([i, f, g, o], dtype=DOUBLE, device=device)
            input = torch.zeros(3, 1, 1, dtype=DOUBLE, device=device)
            output, (h_n, c_n) = lltm_ext.lstm(input, (zeros, zeros + 0.5), weights, weights, bias)
            torch.testing.assert_close(c_n.item(), c_expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(h_n.item(), float(h_expected), rtol=0, atol=1e-12)
            assert output[-1].item() == h_n.item()


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.skipif(_portable.in_use, reason="the portable library does not call oneDNN's layer")
def test_large_sequences_on_the_cpu_equal_the_steps(dtype, reverse, bias):
    """oneDNN's layer runs them, half types in float32: with and without gradients, and second derivatives."""
    function = functools.partial(OPS["lstm"], reverse=reverse)
    call = OPS["lstm"].call(Make(dtype), 6, 16, 40, input_size=12, bias=bias).leaves()
    found, without, names = [], [], []
    for by_layer in (True, False):
        with Recorder() as recorder, torch.backends.mkldnn.flags(enabled=by_layer):
            outputs, gradients = forward_and_gradients(function, call)
            found.append([*outputs, *gradients])
            with torch.no_grad():
                without.append(call.run(function))
            outputs = call.run(function)
            first = torch.autograd.grad(outputs, call.tensors, cotangents(outputs), create_graph=True)
            found[-1] += torch.autograd.grad(sum_of_squares(first), call.tensors)
        names.append({name.removeprefix("aten.") for name in recorder.names})
    assert {"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"} <= names[0]
    assert "mkldnn_rnn_layer" not in names[1]
    assert all(x.dtype == dtype for x in found[0])
    assert_all_near(*without, FORWARD[dtype])
    assert_all_near(*found, BACKWARD[dtype])


HIDDEN = 8  # hidden size of the layers, which persistent kernels support in float32


class TestLSTM(LayerSuite):
    Layer = lltm_ext.LSTM
    hidden = HIDDEN
    near = (1e-10, 1e-10)
    lowers_states = True
    modules = layer_modules(Layer, hidden)

    def peer(self, layer):
        peer = nn.LSTM(
            layer.input_size,
            layer.hidden_size,
            num_layers=layer.num_layers,
            bias=layer.bias,
            batch_first=layer.batch_first,
            dropout=layer.dropout,
            bidirectional=layer.bidirectional,
            device=next(layer.parameters()).device,
            dtype=DOUBLE,
        )
        peer.load_state_dict(layer.state_dict())
        return peer.train(layer.training)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_half_types_keep_a_long_memory(self, dtype, device):
        """A forget gate of 0.993 over 400 steps: rounded to bfloat16 it would be 0.992 or 0.996."""
        layer, make = self.build("plain", device, dtype), Make(dtype, device)
        with torch.no_grad():
            layer.weight_hh_l0 *= 0.1  # so that rounding errors of h don't grow
            layer.bias_ih_l0[HIDDEN : 2 * HIDDEN] += 5
        self.assert_as_near_as_its_dtype(layer, Call(make(400, 4, INPUT), states(make, layer, 4)), dtype)

    def assert_as_near_as_its_dtype(self, layer, call, dtype):
        """To nn.LSTM in float64. Returns values and gradients, and the expected values."""
        _, outputs, gradients = results_of_layer(layer, "batched", call)
        _, expected, exact = results_of_layer(self.peer(layer), "batched", call.map(torch.Tensor.double))
        assert_all_near(outputs, expected, FORWARD[dtype], "output")
        assert_all_near(gradients, exact, BACKWARD[dtype], "gradient")
        return outputs, gradients, expected

    @pytest.mark.parametrize("given", ["none", "both", "c0 in float32"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_sequences_on_the_cpu_that_onednn_takes(self, dtype, given):
        """In bfloat16 where the CPU multiplies it. Each bias has a gradient of its own."""
        layer, make = self.build("plain", "cpu", dtype), Make(dtype)
        values = make(60, 9, INPUT)
        h0, c0 = states(make, layer, 9)
        hx = None if given == "none" else (h0, c0.float() if given == "c0 in float32" else c0)
        call = Call(values, hx)
        with torch.no_grad():
            only = call.run(layer)
        outputs, gradients, expected = self.assert_as_near_as_its_dtype(layer, call, dtype)
        assert outputs[2].dtype == (hx[1].dtype if hx else dtype)
        assert_all_near(only, expected, FORWARD[dtype], "output without gradient")
        assert len({x.data_ptr() for x in gradients}) == len(gradients)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_second_derivatives_of_sequences_on_the_cpu_that_onednn_takes(self, dtype):
        layer = self.build("plain", "cpu", dtype)
        values, found = Make(dtype)(60, 9, INPUT), []
        for function, x in ((layer, values), (self.peer(layer), values.double())):
            x = x.clone().requires_grad_()
            (first,) = torch.autograd.grad(function(x)[0].sin().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), [x, *function.parameters()]))
        assert_all_near(*found, 8 * BACKWARD[dtype], "second derivative")

    def test_a_network_trains_with_it_as_with_nn_lstm(self, device):
        """The same losses from the same parameters, with this layer in the place of nn.LSTM."""
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(3, INPUT), nn.LSTM(INPUT, HIDDEN, num_layers=2)).to(device, DOUBLE)
        ours = copy.deepcopy(network)
        ours[1] = lltm_ext.LSTM(INPUT, HIDDEN, num_layers=2, device=device, dtype=DOUBLE)
        ours.load_state_dict(network.state_dict())
        input, target = Make(DOUBLE, device)(5, 16, 3), Make(DOUBLE, device, seed=1)(16, HIDDEN).tanh()
        losses = []
        for model in (network, ours):
            optimizer = torch.optim.Adam(model.parameters(), 0.02)
            losses.append([])
            for _ in range(10):
                optimizer.zero_grad()
                loss = (model(input)[0][-1] - target).square().mean()
                loss.backward()
                optimizer.step()
                losses[-1].append(loss.item())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-7, atol=0)
        assert losses[1][-1] < losses[1][0]

    def test_weight_norm_takes_effect(self, device):
        """Parameters are read from the module at each call, so that a parametrization takes effect."""
        layer, input = self.build("plain", device), Make(DOUBLE, device)(6, 4, INPUT)
        plain = layer(input)[0].detach()
        nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
        assert_near(layer(input)[0], plain, 1e-6)  # weight_norm rounds the weight
        peer = nn.LSTM(INPUT, HIDDEN, device=device, dtype=DOUBLE)
        for factor in (1, 2):
            with torch.no_grad():
                layer.parametrizations.weight_hh_l0.original0.mul_(factor)
            peer.load_state_dict({name: getattr(layer, name).detach() for name in peer.state_dict()})
            assert_near(layer(input)[0], peer(input)[0], 1e-10)

    # A module like nn.LSTM

    def test_it_is_an_nn_lstm(self):
        layer = self.build("three bidirectional layers")
        assert isinstance(layer, nn.LSTM)
        assert layer.all_weights[0][0] is layer.weight_ih_l0

    def test_it_compiles_into_one_graph(self, device, fresh_dynamo):
        layer, input = self.build("three bidirectional layers", device), Make(DOUBLE, device)(6, 4, INPUT)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert_all_near(Call(input).run(compiled), Call(input).run(layer), FORWARD[DOUBLE])

    def test_a_network_compiles_with_it_into_one_graph(self, device, fresh_dynamo):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(3, INPUT), self.build("two layers")).to(device, DOUBLE)
        compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
        input = Make(DOUBLE, device)(6, 4, 3)
        ours, expected = compiled(input)[0], network(input)[0]
        assert_near(ours, expected, FORWARD[DOUBLE])
        gradients, exact = (
            torch.autograd.grad(y, list(network.parameters()), cotangents([y])) for y in (ours, expected)
        )
        assert_all_near(gradients, exact, 1e-10)

    def test_double_backward_equals_that_of_nn_lstm(self, device):
        """A gradient penalty, as in WGAN-GP. cuDNN has no double backward."""
        layer = self.build("three bidirectional layers", device)
        found = []
        for function in (layer, self.peer(layer)):
            input = Make(DOUBLE, device)(6, 4, INPUT).requires_grad_()
            with torch.backends.cudnn.flags(enabled=False):
                (gradient,) = torch.autograd.grad(function(input)[0].sin().sum(), input, create_graph=True)
                penalty = (gradient.norm(dim=-1) - 1).square().sum()
                found.append(
                    torch.autograd.grad(penalty, [input, *function.parameters()], materialize_grads=True)
                )
        assert_all_near(*found, 1e-10)

    @pytest.mark.parametrize("arguments, exception, pattern", layer_bad_calls("LSTM", HIDDEN))
    def test_bad_input_is_named_and_the_next_call_is_right(self, arguments, exception, pattern):
        self.assert_refused(arguments, exception, pattern)

    @pytest.mark.parametrize("bidirectional", [False, True])
    def test_weights_on_another_device_are_named(self, bidirectional):
        layer = lltm_ext.LSTM(5, HIDDEN, bidirectional=bidirectional)
        with pytest.raises(RuntimeError, match=r"^lstm: expected weight_ih on meta, got cpu"):
            layer(torch.empty(7, 3, 5, device="meta"))

    def test_options_are_checked_as_nn_lstm_checks_them(self):
        with pytest.raises(ValueError, match="hidden_size must be greater than zero"):
            lltm_ext.LSTM(INPUT, 0)
        with pytest.warns(UserWarning, match="dropout option adds dropout after all but last"):
            lltm_ext.LSTM(INPUT, HIDDEN, dropout=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer = lltm_ext.LSTM(
                input_size=INPUT, hidden_size=HIDDEN, num_layers=2, dropout=0.5, bidirectional=True
            )
        assert (layer.num_layers, layer.dropout, layer.bidirectional) == (2, 0.5, True)
