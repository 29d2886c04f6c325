"""lstm against its reference, lltm_ext.LSTM against nn.LSTM. (Algorithm by algorithm: test_algorithms.py.)"""

import copy
import io
import itertools
import pickle
import warnings

import pytest
import torch
from op_suite import (
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
)
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

import lltm_ext
from lltm_ext.lstm import _SequenceFunction, lstm_reference

FLOATING = "float16, bfloat16, float32 or float64"


def sequence_arguments(make, length, batch, input_size, hidden_size, bias=True):
    return {
        "input": make(length, batch, input_size),
        "h0": make(batch, hidden_size, scale=0.5),
        "c0": make(batch, hidden_size),
        "weight_ih": make(4 * hidden_size, input_size, scale=max(input_size, 1) ** -0.5),
        "weight_hh": make(4 * hidden_size, hidden_size, scale=0.5 * hidden_size**-0.5),
        "bias": make(4 * hidden_size) if bias else None,
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
    return lstm_reference(input, hx, weight_ih, weight_hh, bias)


class TestLSTMFunction(SmoothSuite):
    op = "lstm"
    function = staticmethod(lltm_ext.lstm)
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
                f"^lstm: expected {name} to be a Tensor, got None",
            )
            for name in ("input", "h0", "c0", "weight_ih", "weight_hh")
        },
        "no states": (with_hx(None), TypeError, r"^lstm: expected hx to be a pair \(h0, c0\), got NoneType"),
        "three states": (
            with_hx((torch.zeros(4, 5),) * 3),
            TypeError,
            r"^lstm: expected hx to be a pair \(h0, c0\), got tuple",
        ),
        "algorithm": (
            with_algorithm("fastest"),
            ValueError,
            "^lstm: expected algorithm to be 'auto'.*, got 'fastest'",
        ),
        "integers": (
            changed(input=torch.Tensor.long),
            TypeError,
            f"^lstm: expected input of dtype {FLOATING}, got int64",
        ),
        "h0 in float64": (
            changed(h0=torch.Tensor.double),
            TypeError,
            "^lstm: expected h0 of dtype float32, got float64",
        ),
        "c0 in float16": (
            changed(c0=torch.Tensor.half),
            TypeError,
            "^lstm: expected c0 of dtype float32, got float16",
        ),
        "h0 of another batch": (
            changed(h0=lambda x: x[:1]),
            RuntimeError,
            r"^lstm: expected h0 of shape \[batch, hidden_size\] = \[4, 5\], got \[1, 5\]",
        ),
        "weights of the LLTM": (
            changed(weight_hh=lambda x: x[:15]),
            RuntimeError,
            r"^lstm: expected weight_hh of shape \[4\*hidden_size, hidden_size\] = \[20, 5\], got \[15, 5\]",
        ),
        "weight_ih transposed": (
            changed(weight_ih=lambda x: x.t()),
            RuntimeError,
            r"^lstm: expected weight_ih of shape \[4\*hidden_size, input_size\] = \[20, 3\], got \[3, 20\]",
        ),
        "both biases": (
            changed(bias=lambda x: torch.cat([x, x])),
            RuntimeError,
            r"^lstm: expected bias of shape \[4\*hidden_size\] = \[20\], got \[40\]",
        ),
        "sparse input": (
            changed(input=torch.Tensor.to_sparse),
            RuntimeError,
            "^lstm: expected input of layout torch.strided, got Sparse",
        ),
    }

    def apply(self, input, hx, weight_ih, weight_hh, bias=None):
        """What lstm takes under torch.func's transforms."""
        output, h_n, c_n, *_ = _SequenceFunction.apply(input, *hx, weight_ih, weight_hh, bias, "auto")
        return output, (h_n, c_n)

    def dispatcher_calls(self, call):
        input, (h0, c0), *rest = call.args
        yield torch.ops.lltm_ext.lstm.default, Call(input, h0, c0, *rest)

    def test_opcheck_of_packed_rows_and_the_other_direction(self, device):
        for grad, reverse in itertools.product((False, True), repeat=2):
            arguments = sequence_arguments(Make(DOUBLE, device), 2, 3, 3, 2)
            rows = arguments.pop("input").flatten(0, 1)[:5]
            call = Call(rows, *arguments.values(), [3, 2], reverse)
            call = call.leaves() if grad else call
            torch.library.opcheck(torch.ops.lltm_ext.lstm.default, call.args)

    def test_opcheck_of_the_forward_and_backward_ops(self, device):
        ops = torch.ops.lltm_ext
        for sizes, reverse in itertools.product((None, [3, 2]), (False, True)):
            arguments = sequence_arguments(Make(DOUBLE, device), 2, 3, 3, 2)
            if sizes:
                arguments["input"] = arguments["input"].flatten(0, 1)[:5]
            inputs = tuple(arguments.values())
            torch.library.opcheck(ops.lstm_forward.default, (*inputs, sizes, reverse, "auto"))
            output, h_n, c_n, gates, extra = ops.lstm_forward(*inputs, sizes, reverse, "auto")
            torch.library.opcheck(
                ops.lstm_backward.default,
                (output, h_n, c_n, *inputs[:5], output, gates, extra, sizes, reverse, "auto", True, True),
            )

    @pytest.mark.parametrize("reverse", [False, True])
    def test_gradcheck_of_packed_rows(self, reverse, device):
        arguments = sequence_arguments(Make(DOUBLE, device), 3, 3, 2, 2)
        rows = arguments.pop("input").flatten(0, 1)[:6]
        call = Call(rows, *arguments.values()).leaves()

        def packed(*tensors):
            return torch.ops.lltm_ext.lstm(*tensors, [3, 2, 1], reverse)

        assert torch.autograd.gradcheck(packed, call.tensors)
        assert torch.autograd.gradgradcheck(packed, call.tensors)

    @pytest.mark.parametrize("sizes", [[2, 3], [4, 2], [3, 1], [3, 3, 0], [3, 4, -1], []])
    def test_batch_sizes_that_do_not_fit_are_refused(self, sizes):
        arguments = sequence_arguments(Make(), 2, 3, 3, 2)
        rows = arguments.pop("input").flatten(0, 1)
        with pytest.raises(RuntimeError, match=r"^lstm: expected batch_sizes to "):
            torch.ops.lltm_ext.lstm(rows, *arguments.values(), sizes)

    def test_a_closed_forget_gate_forgets_and_an_open_one_keeps(self, device):
        """The gates in nn.LSTM's order, each by what it alone does."""
        zeros = torch.zeros(1, 1, dtype=DOUBLE, device=device)
        weights = torch.zeros(4, 1, dtype=DOUBLE, device=device)
        for (i, f, g, o), c_expected, h_expected in (
            ((-100, 100, 1, 100), 0.5, torch.tensor(0.5, dtype=DOUBLE).tanh()),  # keeps
            ((-100, -100, 1, 100), 0.0, 0.0),  # forgets
            ((100, -100, 50, 100), 1.0, torch.tensor(1.0, dtype=DOUBLE).tanh()),  # takes the candidate
            ((-100, 100, 1, -100), 0.5, 0.0),  # keeps what it does not show
        ):
            bias = torch.tensor([i, f, g, o], dtype=DOUBLE, device=device)
            output, (h_n, c_n) = lltm_ext.lstm(
                torch.zeros(3, 1, 1, dtype=DOUBLE, device=device),
                (zeros, zeros + 0.5),
                weights,
                weights,
                bias,
            )
            torch.testing.assert_close(c_n.item(), c_expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(h_n.item(), float(h_expected), rtol=0, atol=1e-12)
            assert output[-1].item() == h_n.item()

    def test_half_types_keep_the_cell_state_in_float32_inside(self, device):
        """At 2048 float16 counts in twos: 0.25 added many times arrives only where nothing rounds between."""
        for dtype in (torch.float16, torch.bfloat16):
            zeros = torch.zeros(1, 1, dtype=dtype, device=device)
            bias = torch.tensor([100, 100, 0.25541, 0], dtype=dtype, device=device)  # atanh(0.25)
            input = torch.zeros(512, 1, 1, dtype=dtype, device=device)
            weights = torch.zeros(4, 1, dtype=dtype, device=device)
            _, (_, c_n) = lltm_ext.lstm(
                input, (zeros, torch.full_like(zeros, 2048, dtype=torch.float32)), weights, weights, bias
            )
            assert c_n.dtype == torch.float32
            assert abs(c_n.item() - (2048 + 512 * 0.25)) < 1

    def test_autocast_leaves_the_cell_state_in_float32(self, device):
        with torch.autocast(device, torch.bfloat16):
            outputs = self.call("63", torch.float32, device).run(lltm_ext.lstm)
        assert [y.dtype for y in outputs] == [torch.bfloat16, torch.bfloat16, torch.float32]

    def test_nan_stays_in_its_row_and_after_its_step(self, device):
        call = sample(6, 4, 3, 5)(Make(device=device))
        good, _ = lltm_ext.lstm(*call.args)
        call.args[0][2, 1, 0] = torch.nan
        output, (h_n, _) = lltm_ext.lstm(*call.args)
        assert output[2:, 1].isnan().all()
        assert h_n[1].isnan().all()
        others = torch.ones(6, 4, dtype=torch.bool)
        others[2:, 1] = False
        assert_same_bits([output[others]], [good[others]])


# The layer. Its hidden size is one that the persistent kernels take, in float32 on a GPU.

INPUT, HIDDEN = 7, 8
KINDS = {
    "plain": {},
    "two layers": {"num_layers": 2},
    "bidirectional": {"bidirectional": True},
    "three bidirectional layers": {"num_layers": 3, "bidirectional": True},
    "without bias": {"num_layers": 2, "bias": False, "bidirectional": True},
}
kinds = pytest.mark.parametrize("kind", KINDS)
# Relative L2 error to nn.LSTM in float64: of outputs, of gradients.
NEAR = {DOUBLE: (1e-10, 1e-10), torch.float32: (1e-5, 5e-5)}


def build(kind, device="cpu", dtype=DOUBLE, **more):
    torch.manual_seed(0)
    return lltm_ext.LSTM(INPUT, HIDDEN, **KINDS[kind], **more, device=device, dtype=dtype)


def peer_of(layer, dtype=DOUBLE):
    """torch's layer of the same parameters."""
    peer = nn.LSTM(
        layer.input_size,
        layer.hidden_size,
        num_layers=layer.num_layers,
        bias=layer.bias,
        batch_first=layer.batch_first,
        dropout=layer.dropout,
        bidirectional=layer.bidirectional,
        device=next(layer.parameters()).device,
        dtype=dtype,
    )
    peer.load_state_dict(layer.state_dict())
    return peer.train(layer.training)


def states(make, layer, *batch):
    shape = (layer.num_layers * (2 if layer.bidirectional else 1), *batch, layer.hidden_size)
    return make(*shape, scale=0.5), make(*shape)


FORMS = {
    "batched": lambda layer, x: x.transpose(0, 1).contiguous() if layer.batch_first else x,
    "unbatched": lambda layer, x: x[:, 0],
    "packed": lambda layer, x: pack_padded_sequence(x, [6, 4, 4, 1]),
    "packed in any order": lambda layer, x: pack_padded_sequence(x, [2, 6, 1, 4], enforce_sorted=False),
}


def call_with_gradients(layer, form, values, hx):
    """Outputs and states, and the gradients of input, states and parameters for fixed random cotangents."""
    leaves = [x.detach().requires_grad_() for x in (values, *(hx or ()))]
    output, (h_n, c_n) = layer(FORMS[form](layer, leaves[0]), tuple(leaves[1:]) if hx else None)
    outputs = (output.data if isinstance(output, PackedSequence) else output, h_n, c_n)
    gradients = torch.autograd.grad(outputs, [*leaves, *layer.parameters()], cotangents(outputs))
    return output, outputs, gradients


class TestLSTM(ModuleSuite):
    modules = {
        "LSTM": (
            lambda **where: lltm_ext.LSTM(INPUT, HIDDEN, **where),
            lambda make: Call(make(6, 4, INPUT), (make(1, 4, HIDDEN), make(1, 4, HIDDEN))),
        ),
        "batch_first": (
            lambda **where: lltm_ext.LSTM(INPUT, HIDDEN, batch_first=True, **where),
            lambda make: Call(make(4, 6, INPUT)),
        ),
        "unbatched": (
            lambda **where: lltm_ext.LSTM(INPUT, HIDDEN, **where),
            lambda make: Call(make(6, INPUT), (make(1, HIDDEN), make(1, HIDDEN))),
        ),
        "all options": (
            lambda **where: lltm_ext.LSTM(
                INPUT, HIDDEN, num_layers=2, bias=False, batch_first=True, bidirectional=True, **where
            ),
            lambda make: Call(make(4, 6, INPUT), (make(4, 4, HIDDEN), make(4, 4, HIDDEN))),
        ),
    }

    def test_modules_compile_and_export(self, module, device, fresh_dynamo):
        with torch._dynamo.config.patch(allow_rnn=True):
            super().test_modules_compile_and_export(module, device, fresh_dynamo)

    # Equal to nn.LSTM

    @kinds
    @pytest.mark.parametrize("batch_first", [False, True], ids=["", "batch_first"])
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("given", [False, True], ids=["no hx", "hx"])
    @pytest.mark.parametrize("dtype", NEAR, ids=str)
    def test_values_and_gradients_are_those_of_nn_lstm(self, kind, batch_first, form, given, dtype, device):
        layer, make = build(kind, device, dtype, batch_first=batch_first), Make(dtype, device)
        peer = peer_of(layer)
        values = make(6, 4, INPUT)
        hx = states(make, layer, *([] if form == "unbatched" else [4])) if given else None
        output, outputs, gradients = call_with_gradients(layer, form, values, hx)
        exact, expected, expected_gradients = call_with_gradients(
            peer, form, values.double(), tuple(x.double() for x in hx) if given else None
        )
        forward, backward = NEAR[dtype]
        assert all(y.dtype == dtype for y in (*outputs, *gradients))
        assert_all_near(outputs, expected, forward, "output")
        assert_all_near(gradients, expected_gradients, backward, "gradient")
        if isinstance(exact, PackedSequence):
            assert isinstance(output, PackedSequence)
            for ours, theirs in zip(output[1:], exact[1:], strict=True):
                assert (ours is None) == (theirs is None)
                assert ours is None or torch.equal(ours, theirs)

    @kinds
    def test_values_in_every_dtype(self, kind, dtype, device):
        layer, make = build(kind, device, dtype), Make(dtype, device)
        call = Call(make(6, 4, INPUT), states(make, layer, 4))
        expected = call.map(torch.Tensor.double).run(peer_of(layer))
        assert_all_near(call.run(layer), expected, FORWARD[dtype])

    @kinds
    def test_a_packed_batch_in_half_types(self, kind, device):
        for dtype in (torch.float16, torch.bfloat16):
            layer = build(kind, device, dtype)
            packed = pack_sequence([Make(dtype, device)(n, INPUT) for n in (6, 3, 2)])
            expected, (h_n, c_n) = peer_of(layer)(packed.to(DOUBLE))
            output, (our_h_n, our_c_n) = layer(packed)
            assert_all_near([output.data, our_h_n, our_c_n], [expected.data, h_n, c_n], FORWARD[dtype])

    @pytest.mark.parametrize("used", ["output", "h_n", "c_n"])
    def test_each_output_has_its_gradient_alone(self, used, device):
        layer = build("three bidirectional layers", device)
        found = []
        for function in (layer, peer_of(layer)):
            input = Make(DOUBLE, device)(6, 4, INPUT).requires_grad_()
            output, (h_n, c_n) = function(input)
            y = {"output": output, "h_n": h_n, "c_n": c_n}[used]
            wanted = [input, *function.parameters()]
            found.append(torch.autograd.grad(y.square().sum(), wanted, materialize_grads=True))
        assert_all_near(*found, 1e-10)

    @pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
    def test_gradients_of_a_long_sequence_summed_in_chunks(self, packed, device):
        """More rows than one chunk of the backward takes."""
        layer = build("bidirectional", device)
        length, batch = 311, 60
        values = Make(DOUBLE, device)(length, batch, INPUT)
        lengths = [length - 2 * (i % 7) for i in range(batch)]
        assert sum(lengths) > 2 * 4096
        found = []
        for function in (layer, peer_of(layer)):
            input = values.clone().requires_grad_()
            given = pack_padded_sequence(input, lengths, enforce_sorted=False) if packed else input
            output = function(given)[0]
            loss = (output.data if packed else output).sin().sum()
            found.append(torch.autograd.grad(loss, [input, *function.parameters()]))
        assert_all_near(*found, 1e-10)

    def test_a_network_trains_on_with_it_as_with_nn_lstm(self, device):
        """The same parameters, loaded into a network with this layer in its place: the same losses."""
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

    def test_weight_norm_is_seen(self, device):
        """Parameters are read where nn.Module keeps them, so that what replaces one has its effect."""
        layer = build("plain", device)
        plain = layer(input := Make(DOUBLE, device)(6, 4, INPUT))[0].detach()
        nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
        assert_near(layer(input)[0], plain, 1e-8)  # the norm's own rounding on a GPU
        with torch.no_grad():
            layer.parametrizations.weight_hh_l0.original0.mul_(2)
        peer = nn.LSTM(INPUT, HIDDEN, device=device, dtype=DOUBLE)
        peer.load_state_dict({name: getattr(layer, name).detach() for name in peer.state_dict()})
        assert_near(layer(input)[0], peer(input)[0], 1e-10)

    # The same module

    def test_it_is_an_nn_lstm(self):
        layer = build("three bidirectional layers")
        assert isinstance(layer, nn.LSTM)
        assert layer.all_weights[0][0] is layer.weight_ih_l0

    @kinds
    @pytest.mark.parametrize("batch_first", [False, True], ids=["", "batch_first"])
    def test_it_prints_itself_as_nn_lstm_does(self, kind, batch_first):
        layer = build(kind, batch_first=batch_first)
        assert repr(layer) == repr(peer_of(layer))

    @kinds
    def test_parameters_are_drawn_as_nn_lstm_draws_them(self, kind, device):
        layer = build(kind, device)
        torch.manual_seed(0)
        peer = nn.LSTM(INPUT, HIDDEN, **KINDS[kind], device=device, dtype=DOUBLE)
        assert [n for n, _ in layer.named_parameters()] == [n for n, _ in peer.named_parameters()]
        assert_same_bits(list(layer.parameters()), list(peer.parameters()))

    @kinds
    def test_state_dicts_go_both_ways(self, kind, device):
        layer, input = build(kind, device), Make(DOUBLE, device)(6, 4, INPUT)
        peer = peer_of(layer)
        assert list(layer.state_dict()) == list(peer.state_dict())
        with torch.no_grad():
            for p in peer.parameters():
                p.mul_(1.5)
        file = io.BytesIO()
        torch.save(peer.state_dict(), file)
        file.seek(0)
        layer.load_state_dict(torch.load(file, weights_only=True))
        assert_same_bits(list(layer.parameters()), list(peer.parameters()))
        assert_all_near(Call(input).run(layer), Call(input).run(peer), 1e-10)

    def test_copies_have_parameters_of_their_own(self, device):
        layer, input = build("three bidirectional layers", device), Make(DOUBLE, device)(6, 4, INPUT)
        expected = layer(input)[0].detach()
        copies = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
        with torch.no_grad():
            for p in layer.parameters():
                p.zero_()
        for copied in copies:
            assert type(copied) is lltm_ext.LSTM
            assert_same_bits([copied(input)[0]], [expected])
        assert not torch.equal(layer(input)[0], expected)

    def test_frozen_parameters_get_no_gradient(self, device):
        layer = build("two layers", device)
        layer.weight_hh_l0.requires_grad_(False)
        layer.bias_hh_l1.requires_grad_(False)
        layer(Make(DOUBLE, device)(6, 4, INPUT))[0].sum().backward()
        assert [n for n, p in layer.named_parameters() if p.grad is None] == ["weight_hh_l0", "bias_hh_l1"]

    def test_projections_are_refused(self):
        with pytest.raises(ValueError, match=r"^LSTM: expected proj_size to be 0, got 3"):
            lltm_ext.LSTM(INPUT, HIDDEN, proj_size=3)
        assert lltm_ext.LSTM(INPUT, HIDDEN, proj_size=0).proj_size == 0

    # Dropout

    def test_dropout_acts_between_layers_while_training(self, device):
        layer = build("two layers", device, dropout=0.5)
        input = Make(DOUBLE, device)(6, 4, INPUT)
        first, second = layer(input)[0], layer(input)[0]
        assert not torch.equal(first, second)
        torch.manual_seed(1)
        first = layer(input)[0]
        torch.manual_seed(1)
        assert torch.equal(layer(input)[0], first)

    @pytest.mark.parametrize("form", FORMS)
    def test_dropout_does_nothing_in_eval(self, form, device):
        layer = build("three bidirectional layers", device, dropout=0.5).eval()
        peer, values = peer_of(layer), Make(DOUBLE, device)(6, 4, INPUT)
        with torch.backends.cudnn.flags(enabled=False):  # whose backward wants training
            _, expected, expected_gradients = call_with_gradients(peer, form, values, None)
        _, outputs, gradients = call_with_gradients(layer, form, values, None)
        assert_all_near(outputs, expected, 1e-10)
        assert_all_near(gradients, expected_gradients, 1e-10)

    def test_dropout_leaves_the_last_layer_and_the_states_alone(self, device):
        layer = build("two layers", device, dropout=0.5)
        input = Make(DOUBLE, device)(6, 4, INPUT)
        plain_output, (plain_h_n, plain_c_n) = build("two layers", device)(input)
        output, (h_n, c_n) = layer(input)
        assert torch.equal(h_n[0], plain_h_n[0])
        assert torch.equal(c_n[0], plain_c_n[0])
        assert not torch.equal(output, plain_output)
        assert torch.equal(output[-1], h_n[1])
        assert (output != 0).all()

    def test_dropout_drops_its_share_and_scales_the_rest(self, device):
        """Seen from above: the upper layer with weights that make its cell the tanh of what came through."""
        layer = lltm_ext.LSTM(1, 1, num_layers=2, dropout=0.25, device=device, dtype=DOUBLE)
        with torch.no_grad():
            for p in layer.parameters():
                p.zero_()
            layer.bias_ih_l0.copy_(torch.tensor([50.0, 0.0, 50.0, 50.0]))  # h = tanh(1) after one step
            layer.weight_ih_l1[2] = 1.0
            layer.bias_hh_l1.copy_(torch.tensor([50.0, 0.0, 0.0, 50.0]))
        torch.manual_seed(0)
        _, (h_n, c_n) = layer(torch.zeros(1, 10_000, 1, dtype=DOUBLE, device=device))
        kept = c_n[1] != 0
        assert abs(kept.double().mean().item() - 0.75) < 0.02
        torch.testing.assert_close(c_n[1][kept], (h_n[0] / 0.75).tanh()[kept])

    # Edges

    @kinds
    @pytest.mark.parametrize("length, batch", [(0, 4), (6, 0), (0, 0), (1, 1), (1, 4)])
    def test_few_or_no_steps_and_rows(self, kind, length, batch, device):
        layer, make = build(kind, device), Make(DOUBLE, device)
        values, hx = make(length, batch, INPUT), states(make, layer, batch)
        input = values.clone().requires_grad_()
        output, (h_n, c_n) = layer(input, hx)
        assert output.shape == (length, batch, HIDDEN * (2 if layer.bidirectional else 1))
        (output.sum() + h_n.sum() + c_n.sum()).backward()
        assert input.grad.shape == input.shape
        if length == 0:
            assert_same_bits([h_n, c_n], hx)
        if length * batch == 0:
            assert all((p.grad == 0).all() for p in layer.parameters())
        else:
            expected, states_expected = peer_of(layer)(values, hx)
            assert_all_near([output, h_n, c_n], [expected, *states_expected], 1e-10)

    def test_a_batch_of_none_has_the_shapes_of_nn_lstm(self):
        layer = build("three bidirectional layers")
        input = torch.zeros(6, 0, INPUT, dtype=DOUBLE)
        ours, theirs = Call(input).run(layer), Call(input).run(peer_of(layer))
        assert [y.shape for y in ours] == [y.shape for y in theirs]

    def test_autocast(self, device):
        """As near to float32 as nn.LSTM is. The cell state stays float32."""
        layer = build("three bidirectional layers", device, torch.float32)
        input = Make(device=device)(6, 4, INPUT)
        low = torch.float16 if device == "cuda" else torch.bfloat16
        exact = Call(input.double()).run(peer_of(layer))
        with torch.autocast(device, low):
            output, (h_n, c_n) = layer(input)
        assert [y.dtype for y in (output, h_n, c_n)] == [low, low, torch.float32]
        assert_all_near([output, h_n, c_n], exact, 3 * FORWARD[low])
        output.float().square().sum().backward()
        assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())
        peer = peer_of(layer, torch.float32)
        peer(input)[0].square().sum().backward()
        for (name, p), q in zip(layer.named_parameters(), peer.parameters(), strict=True):
            assert_near(p.grad, q.grad, 0.1, name)

    @pytest.mark.xfail(
        reason="dynamo takes no subclass of nn.LSTM in one graph unless allow_rnn is set",
        raises=torch._dynamo.exc.Unsupported,
    )
    def test_it_compiles_into_one_graph(self, device, fresh_dynamo):
        layer, input = build("three bidirectional layers", device), Make(DOUBLE, device)(6, 4, INPUT)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert_all_near(Call(input).run(compiled), Call(input).run(layer), FORWARD[DOUBLE])

    def test_a_network_with_it_compiles_around_it(self, device, fresh_dynamo):
        """What torch.compile does with nn.LSTM: a break, and the same values and gradients."""
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(3, INPUT), build("two layers")).to(device, DOUBLE)
        compiled = torch.compile(network, backend="aot_eager")
        input = Make(DOUBLE, device)(6, 4, 3)
        ours, expected = compiled(input)[0], network(input)[0]
        assert_near(ours, expected, FORWARD[DOUBLE])
        gradients, exact = (
            torch.autograd.grad(y, list(network.parameters()), cotangents([y])) for y in (ours, expected)
        )
        assert_all_near(gradients, exact, 1e-10)

    def test_double_backward_is_that_of_nn_lstm(self, device):
        """A penalty on the gradient, as WGAN-GP has it. cuDNN has no double backward."""
        layer = build("three bidirectional layers", device)
        found = []
        for function in (layer, peer_of(layer)):
            input = Make(DOUBLE, device)(6, 4, INPUT).requires_grad_()
            with torch.backends.cudnn.flags(enabled=False):
                (gradient,) = torch.autograd.grad(function(input)[0].sin().sum(), input, create_graph=True)
                penalty = (gradient.norm(dim=-1) - 1).square().sum()
                found.append(
                    torch.autograd.grad(penalty, [input, *function.parameters()], materialize_grads=True)
                )
        assert_all_near(*found, 1e-10)

    @pytest.mark.parametrize(
        "arguments, exception, pattern",
        [
            ((None,), TypeError, "^LSTM: expected input to be a Tensor, got NoneType"),
            ((torch.zeros(7),), ValueError, r"^LSTM: expected input of 2 or 3 dimensions, got \[7\]"),
            (
                (torch.zeros(1, 6, 4, 7),),
                ValueError,
                r"^LSTM: expected input of 2 or 3 dimensions, got \[1, 6, 4, 7\]",
            ),
            ((torch.zeros(6, 4, 6),), RuntimeError, r"expected (input|weight_ih) .*\b6\b.*"),
            ((torch.zeros(6, 6),), RuntimeError, r"expected (input|weight_ih) .*\b6\b.*"),
            ((pack_sequence([torch.zeros(3, 6)]),), RuntimeError, r"expected (input|weight_ih) .*\b6\b.*"),
            (
                (torch.zeros(6, 4, 7), (torch.zeros(4, 8), torch.zeros(4, 8))),
                RuntimeError,
                r"^LSTM: expected h0 of shape \[1, 4, 8\], got \[4, 8\]",
            ),
            (
                (torch.zeros(6, 4, 7), (torch.zeros(1, 4, 8), torch.zeros(2, 4, 8))),
                RuntimeError,
                r"^LSTM: expected c0 of shape \[1, 4, 8\], got \[2, 4, 8\]",
            ),
            (
                (torch.zeros(6, 7), (torch.zeros(1, 1, 8), torch.zeros(1, 1, 8))),
                RuntimeError,
                r"^LSTM: expected h0 of shape \[1, 8\], got \[1, 1, 8\]",
            ),
            (
                (torch.zeros(6, 7), (torch.zeros(1, 9), torch.zeros(1, 8))),
                RuntimeError,
                r"^LSTM: expected h0 of shape .*, got \[1, (1, )?9\]",
            ),
            (
                (pack_sequence([torch.zeros(3, 7)]), (torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))),
                RuntimeError,
                r"^LSTM: expected h0 of shape \[1, 1, 8\], got \[1, 2, 8\]",
            ),
            (
                (torch.zeros(6, 4, 7), (torch.zeros(1, 4, 8, dtype=DOUBLE),) * 2),
                TypeError,
                "expected h0 of dtype float32, got float64",
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
        input = Make()(6, 4, INPUT)
        assert_near(layer(input)[0], peer_of(layer)(input.double())[0], FORWARD[torch.float32])

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
