"""LSTM, GRU and RNN in the place of torch's: each habit of its users, torch's layer and ours side by side."""

import copy
import inspect
import io
import pickle
import re
import warnings

import forks
import pytest
import torch
from op_suite import (
    DOUBLE,
    FORWARD,
    Call,
    Make,
    assert_all_near,
    assert_near,
    assert_same_bits,
    pairwise,
    sum_of_squares,
)
from sequence_suite import FORMS, INPUT, KINDS, forms, kinds, results_of_layer, tensors_of
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils._pytree import tree_map

import lltm_ext

HIDDEN = 8
LAYERS = {"LSTM": {}, "GRU": {}, "RNN": {}, "RNN of relu": {"nonlinearity": "relu"}}
names = pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
layers = pytest.mark.parametrize("name", LAYERS)


def pair(name, input_size=INPUT, hidden_size=HIDDEN, device="cpu", dtype=torch.float32, **options):
    """Torch's layer and ours, initialized with the same parameters."""
    both = []
    for module in (nn, lltm_ext):
        torch.manual_seed(0)
        Layer, options = getattr(module, name.split()[0]), {**LAYERS[name], **options}
        both.append(Layer(input_size, hidden_size, device=device, dtype=dtype, **options))
    return both


def states_of(layer, *batch, make=torch.randn):
    """An hx of random values."""
    shape = (layer.num_layers * (2 if layer.bidirectional else 1), *batch, layer.hidden_size)
    h0, c0 = make(*shape), make(*shape)
    return (h0, c0) if layer.mode == "LSTM" else h0


class Tagger(nn.Module):
    """A model around a recurrent layer, as torch's tools see one."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(layer.hidden_size * (2 if layer.bidirectional else 1), 3)

    def forward(self, x):
        return self.head(self.layer(x)[0])


class PackedTagger(Tagger):
    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.layer(packed)[0])[0])


def taggers(name, Model=Tagger, **options):
    theirs, ours = (Model(layer) for layer in pair(name, **options))
    ours.load_state_dict(theirs.state_dict())
    return theirs.eval(), ours.eval()


# ---- Values, gradients, parameters -----------------------------------------------------------------------


@pairwise(
    layer={**{name: (name, DOUBLE) for name in LAYERS}, "LSTM in float32": ("LSTM", torch.float32)},
    kind=[*KINDS],
    batch_first={"": False, "batch_first": True},
    form=[*FORMS],
    given={"no hx": False, "hx": True},
)
def test_values_and_gradients_equal_those_of_torch(layer, kind, batch_first, form, given, device):
    name, dtype = layer
    theirs, ours = pair(name, device=device, dtype=dtype, batch_first=batch_first, **KINDS[kind])
    make = Make(dtype, device)
    call, batch = Call(make(6, 4, INPUT)), () if form == "unbatched" else (4,)
    call = Call(*call.args, states_of(ours, *batch, make=make)) if given else call
    output, outputs, gradients = results_of_layer(ours, form, call)
    exact, expected, exact_gradients = results_of_layer(theirs.double(), form, call.map(torch.Tensor.double))
    assert all(y.dtype == dtype for y in (*outputs, *gradients))
    assert_all_near(outputs, expected, 1e-10 if dtype == DOUBLE else 1e-5, "output")
    assert_all_near(gradients, exact_gradients, 1e-10 if dtype == DOUBLE else 5e-5, "gradient")
    if isinstance(exact, PackedSequence):
        for x, y in zip(output[1:], exact[1:], strict=True):
            assert (x is None) == (y is None) and (x is None or torch.equal(x, y))


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "LSTM"])
@kinds
def test_values_in_every_dtype(name, kind, dtype, device):
    theirs, ours = pair(name, device=device, dtype=dtype, **KINDS[kind])
    make = Make(dtype, device)
    call = Call(make(6, 4, INPUT), states_of(ours, 4, make=make))
    outputs = call.run(ours)
    assert all(y.dtype == dtype for y in outputs)
    assert_all_near(outputs, call.map(torch.Tensor.double).run(theirs.double()), FORWARD[dtype])


@layers
@kinds
@pytest.mark.parametrize("batch_first", [False, True], ids=["", "batch_first"])
def test_parameters_state_dicts_and_text_are_those_of_torch(name, kind, batch_first, device):
    options = {"device": device, "dtype": DOUBLE, "batch_first": batch_first}
    theirs, ours = pair(name, **options, **KINDS[kind])
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert_same_bits(list(ours.parameters()), list(theirs.parameters()))
    call = Call(Make(DOUBLE, device)(6, 4, INPUT))
    for source, target in ((ours, theirs), (theirs, ours)):
        with torch.no_grad():
            for p in source.parameters():
                p.mul_(1.5)
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        target.load_state_dict(torch.load(file, weights_only=True))
        assert_same_bits(list(target.parameters()), list(source.parameters()))
        assert_all_near(call.run(ours), call.run(theirs), 1e-10)


@layers
@forms
def test_dropout_does_nothing_in_eval(name, form, device):
    options = {"num_layers": 3, "bidirectional": True, "dropout": 0.5, "device": device, "dtype": DOUBLE}
    theirs, ours = (layer.eval() for layer in pair(name, **options))
    call = Call(Make(DOUBLE, device)(6, 4, INPUT))
    with torch.backends.cudnn.flags(enabled=False):  # cuDNN has no backward in eval
        _, expected, exact_gradients = results_of_layer(theirs, form, call)
    _, outputs, gradients = results_of_layer(ours, form, call)
    assert_all_near(outputs, expected, 1e-10)
    assert_all_near(gradients, exact_gradients, 1e-10)


@layers
def test_dropout_in_training_is_random_and_seeded(name):
    _, layer = pair(name, num_layers=2, dropout=0.5)
    input, outputs = torch.randn(6, 4, INPUT), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(layer(input)[0])
    assert torch.equal(outputs[1], outputs[0])
    assert not torch.equal(outputs[2], outputs[0])


# ---- What torch tests its modules with -------------------------------------------------------------------

# In another process, because the import freezes torch's flags.
SAVE_CALLS = """
import sys, torch
from torch.testing._internal.common_modules import module_db
torch.manual_seed(0)
calls = {}
for info in module_db:
    if info.module_cls in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        options = dict(device="cpu", dtype=torch.float64, requires_grad=False, training=True)
        calls[info.module_cls.__name__] = [
            (call.constructor_input.kwargs, call.forward_input.args)
            for call in info.module_inputs_func(info, **options)
        ]
torch.save(calls, sys.argv[1])
"""


@pytest.fixture(scope="module")
def calls_of_torchs_tests(tmp_path_factory):
    """By the class's name, (options of the layer, arguments of the call)."""
    file = tmp_path_factory.mktemp("calls") / "calls.pt"
    forks.run("-c", SAVE_CALLS, file, cwd=file.parent).check_returncode()
    return torch.load(file)


@names
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_the_calls_that_torch_tests_its_modules_with(calls_of_torchs_tests, name, training, device):
    """Outputs, states and gradients; after pickling too, and in float64."""
    assert len(calls_of_torchs_tests[name]) >= 16
    # cuDNN has no gradients in eval mode.
    with torch.backends.cudnn.flags(enabled=False, allow_tf32=False):
        for options, given in calls_of_torchs_tests[name]:
            args = tree_map(lambda x: x.to(device, torch.float32), given)
            theirs, ours = pair(name, device=device, dtype=torch.float32, **options)
            assert_same_call(theirs.train(training), ours.train(training), args)
            assert_same_call(theirs, pickle.loads(pickle.dumps(ours)), args)
            args = tree_map(torch.Tensor.double, args)
            assert_same_call(theirs.double(), ours.double(), args)


def assert_same_call(theirs, ours, args):
    expected, found = (tensors_of(layer(*args)) for layer in (theirs, ours))
    bound = 1e-12 if found[0].dtype == torch.float64 else 1e-5
    assert_all_near(found, expected, bound)
    gradients = (
        torch.autograd.grad(sum_of_squares(outputs), list(layer.parameters()))
        for layer, outputs in ((ours, found), (theirs, expected))
    )
    assert_all_near(*gradients, 10 * bound)


# ---- Gradients and weights -------------------------------------------------------------------------------


@names
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_gradients_can_be_scaled_in_place(name, dtype, bidirectional, device):
    """Each gradient has its own memory."""
    _, layer = pair(name, device=device, dtype=dtype, num_layers=2, bidirectional=bidirectional)
    parameters = list(layer.parameters())
    output = layer(Make(dtype, device)(6, 4, INPUT))[0]
    gradients = torch.autograd.grad(output.sum(), parameters)
    expected = [0.5 * g for g in gradients]
    for g in gradients:
        g.mul_(0.5)
    for g, e in zip(gradients, expected, strict=True):
        assert torch.equal(g, e)


@names
def test_weights_put_into_flat_weights_are_used(name):
    """Weight dropout does so."""
    input = torch.randn(6, 4, INPUT)
    found = []
    for layer in pair(name, bidirectional=True):
        torch.manual_seed(1)
        layer._flat_weights = [nn.functional.dropout(w, 0.5) for w in layer._flat_weights]
        layer._flat_weights[1] = 2 * layer._flat_weights[1]
        found.append(tensors_of(layer(input)))
    assert_all_near(found[1], found[0], 1e-6)


@names
def test_a_plain_tensor_in_the_place_of_a_parameter_gets_the_gradient(name):
    """As in fastai's AWD-LSTM: the weight is computed anew from another parameter before each call."""
    input, found = torch.randn(6, 4, INPUT), []
    for layer in pair(name):
        raw = nn.Parameter(layer.weight_hh_l0.detach().clone())
        del layer.weight_hh_l0
        for factor in (1.0, 0.5):
            layer.weight_hh_l0 = raw * factor
            output = layer(input)[0]
            found.append([output, *torch.autograd.grad(output.square().sum(), raw)])
    assert_all_near([*found[2], *found[3]], [*found[0], *found[1]], 1e-5)


@pytest.mark.parametrize("mode", ["RNN_TANH", "RNN_RELU"])
def test_the_mode_of_an_rnn_chooses_its_function(mode):
    """As in torch. An nn.RNN that torch before 1.5 has pickled has no attribute `nonlinearity`."""
    theirs, ours = pair("RNN")
    for layer in (theirs, ours):
        layer.mode = mode
        del layer.nonlinearity
    input, reset = torch.randn(6, 4, INPUT), torch.zeros(6, 4, dtype=torch.bool)
    assert_near(ours(input)[0], theirs(input)[0], 1e-6)
    assert_near(ours(input, reset=reset)[0], theirs(input)[0], 1e-6)  # by the cell, not by torch's op


@names
def test_a_subclass_may_have_a_cell_of_its_own(name):
    theirs, ours = pair(name)
    for layer in (theirs, ours):
        layer.cell = nn.Linear(HIDDEN, HIDDEN)
        assert type(layer.cell) is nn.Linear
    input, reset = torch.randn(6, 4, INPUT), torch.zeros(6, 4, dtype=torch.bool)
    assert_near(ours(input, reset=reset)[0], theirs(input)[0], 1e-6)


@names
def test_a_parametrization_is_computed_once_a_call(name):
    """In torch's layers four times, which spectral_norm's iteration counts."""

    class Doubled(nn.Module):
        calls = 0

        def forward(self, weight):
            self.calls += 1
            return 2 * weight

    input, found = torch.randn(6, 4, INPUT), []
    for layer in pair(name):
        nn.utils.parametrize.register_parametrization(layer, "weight_hh_l0", Doubled())
        found.append(layer(input)[0])
    [doubled] = layer.parametrizations["weight_hh_l0"]
    calls = doubled.calls
    assert_near(layer(input)[0], found[0], 1e-6)
    assert_near(found[1], found[0], 1e-6)
    assert doubled.calls == calls + 1


@names
def test_the_own_weights_are_back_after_functional_call(name):
    layer, input = pair(name)[1], torch.randn(6, 4, INPUT)
    expected = layer(input)[0]
    zeros = {k: torch.zeros_like(v) for k, v in layer.named_parameters()}
    assert torch.func.functional_call(layer, zeros, (input,))[0].count_nonzero() == 0
    assert torch.equal(layer(input)[0], expected)


@names
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("given", [False, True], ids=["no hx", "hx"])
def test_overridden_hooks_are_called(name, packed, given):
    """check_forward_args and permute_hidden, of a subclass."""
    calls = []

    def subclass(base):
        class Layer(base):
            def check_forward_args(self, input, hidden, batch_sizes):
                shapes = [list(x.shape) for x in (hidden if isinstance(hidden, tuple) else (hidden,))]
                calls.append((list(input.shape), shapes, batch_sizes is None))

            def permute_hidden(self, hx, permutation):
                calls.append((type(hx), permutation is None))
                return super().permute_hidden(hx, permutation)

        return Layer(INPUT, HIDDEN, batch_first=True)

    input = torch.randn(2, 4, INPUT)
    input = pack_padded_sequence(input, [2, 4], True, enforce_sorted=False) if packed else input
    found = []
    for module in (nn, lltm_ext):
        layer = subclass(getattr(module, name))
        layer(input, states_of(layer, 2) if given else None)
        found.append([*calls])
        calls.clear()
    theirs, ours = ([c for c in calls if len(c) == 3] for calls in found)
    if not packed or name != "LSTM":  # nn.LSTM does not check packed input
        assert ours == theirs
    else:
        assert len(ours) == 1
    theirs, ours = ([c for c in calls if len(c) == 2] for calls in found)
    assert ours[-1] == theirs[-1]
    assert ((tuple if name == "LSTM" else torch.Tensor), not packed) in ours


# ---- States ----------------------------------------------------------------------------------------------


@names
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["batched", "unbatched", "packed", "two layers"])
def test_states_can_be_detached_in_place(name, dtype, form, device):
    """Truncated backpropagation through time: h.detach_()."""
    _, layer = pair(name, device=device, dtype=dtype, num_layers=2 if form == "two layers" else 1)
    input = Make(dtype, device)(6, 4, INPUT)
    if form == "packed":
        input = pack_padded_sequence(input, [6, 4, 3, 1])
    hx = None
    for _ in range(2):
        output, hx = layer(input[:, 0] if form == "unbatched" else input, hx)
        (output.data if form == "packed" else output).float().sum().backward()
        for state in hx if name == "LSTM" else (hx,):
            assert not state.detach_().requires_grad


def test_states_written_in_place_change_neither_output_nor_gradients(device):
    theirs, ours = pair("LSTM", device=device, dtype=torch.float64)
    found = []
    for layer in (theirs, ours):
        output, (h_n, c_n) = layer(Make(torch.float64, device)(6, 4, INPUT))
        h_n[:, 1], c_n[:, 2] = 0, 0  # these episodes are over
        loss = output.square().sum() + h_n.square().sum() + c_n.sum()
        found.append([output, h_n, c_n, *torch.autograd.grad(loss, list(layer.parameters()))])
    assert_all_near(found[1], found[0], 1e-10)


@names
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_under_autocast_output_and_states_are_of_the_half_type(name, low, packed, device):
    """As cuDNN returns them, for any dtype of hx."""
    _, layer = pair(name, device=device)
    input = torch.randn(6, 4, INPUT, device=device)
    input = pack_padded_sequence(input, [6, 4, 3, 1]) if packed else input
    zeros = torch.zeros(1, 4, HIDDEN, device=device)
    with torch.autocast(device, low):
        for hx in (None, zeros, zeros.to(low)):
            hx = (hx, hx) if name == "LSTM" and hx is not None else hx
            assert {y.dtype for y in tensors_of(layer(input, hx))} == {low}


def test_states_of_float64_stay_so_under_autocast():
    for layer in pair("LSTM", dtype=torch.float64):
        with torch.autocast("cpu", torch.bfloat16):
            assert {y.dtype for y in tensors_of(layer(torch.randn(6, 4, INPUT).double()))} == {torch.float64}


# ---- What torch's own path serves ------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["batched", "unbatched", "packed", "hx"])
def test_proj_size(form):
    found = []
    for layer in pair("LSTM", proj_size=3, num_layers=2, bidirectional=True):
        torch.manual_seed(1)
        input = torch.randn(6, 4, INPUT, requires_grad=True)
        given = {"unbatched": lambda x: x[:, 0], "packed": lambda x: pack_padded_sequence(x, [6, 4, 3, 1])}
        hx = (torch.randn(4, 4, 3), torch.randn(4, 4, HIDDEN)) if form == "hx" else None
        outputs = tensors_of(layer(given.get(form, lambda x: x)(input), hx))
        loss = sum(y.square().sum() for y in outputs)
        found.append([*outputs, *torch.autograd.grad(loss, [input, *layer.parameters()])])
    assert_all_near(found[1], found[0], 1e-6)


def test_proj_size_takes_no_resets():
    layer = lltm_ext.LSTM(INPUT, HIDDEN, proj_size=3)
    with pytest.raises(ValueError, match=r"^LSTM: expected reset to be None with a proj_size.*got Tensor"):
        layer(torch.randn(6, 4, INPUT), reset=torch.zeros(6, 4, dtype=torch.bool))


@names
def test_complex_numbers(name):
    theirs, ours = pair(name, dtype=torch.complex64)
    input = torch.randn(6, 4, INPUT, dtype=torch.complex64)
    assert_all_near(*(list(map(torch.view_as_real, tensors_of(m(input)))) for m in (ours, theirs)), 1e-5)


@names
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_traced_model_takes_other_lengths(name, bidirectional):
    """torch.jit.trace of packing, the layer and padding: nothing of the example's lengths remains."""
    theirs, ours = taggers(name, PackedTagger, bidirectional=bidirectional)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(ours, (torch.randn(6, 4, INPUT), torch.tensor([6, 2, 5, 3])))
    for lengths in ([6, 2, 5, 3], [4, 9, 1], [2]):
        input, lengths = torch.randn(max(lengths), len(lengths), INPUT), torch.tensor(lengths)
        assert_near(traced(input, lengths), theirs(input, lengths), 1e-5)


@names
def test_a_scripted_model(name):
    theirs, ours = taggers(name, num_layers=2, bidirectional=True)
    parameters = [id(p) for p in ours.parameters()]
    scripted, input = torch.jit.script(ours), torch.randn(6, 4, INPUT)
    assert_near(scripted(input), theirs(input), 1e-5)
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    assert_near(torch.jit.load(file)(input), theirs(input), 1e-5)
    assert [id(p) for p in ours.parameters()] == parameters  # what trains on is what was scripted


@names
def test_a_layer_with_its_own_forward_is_not_scripted_as_torchs(name):
    class Layer(getattr(lltm_ext, name)):
        def forward(self, input):
            return 2 * super().forward(input)[0]

    layer = Layer(INPUT, HIDDEN)
    assert layer.__prepare_scriptable__() is layer


@names
def test_torch_fx_sees_one_call(name):
    theirs, ours = taggers(name)
    found = [torch.fx.symbolic_trace(model) for model in (theirs, ours)]
    targets = [[(n.op, str(n.target)) for n in graph.graph.nodes] for graph in found]
    assert targets[1] == targets[0]
    assert ("call_module", "layer") in targets[1]
    input = torch.randn(6, 4, INPUT)
    assert_near(found[1](input), found[0](input), 1e-6)


def test_torch_fx_keeps_resets():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = lltm_ext.LSTM(INPUT, HIDDEN)

        def forward(self, x, hx, reset):
            return self.layer(x, hx, reset=reset)[0]

    model, hx = Model(), (torch.randn(1, 4, HIDDEN), torch.randn(1, 4, HIDDEN))
    input, reset = torch.randn(6, 4, INPUT), torch.rand(6, 4) < 0.3
    traced = torch.fx.symbolic_trace(model)
    assert_near(traced(input, hx, reset), model(input, hx, reset), 1e-6)


@names
def test_fx_quantization_prepares_and_converts_the_rest(name):
    from torch.ao.quantization import default_dynamic_qconfig, quantize_fx

    if "x86" not in torch.backends.quantized.supported_engines:
        pytest.skip("torch was built without the quantized engine x86")
    _, ours = taggers(name)
    input = torch.randn(6, 4, INPUT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = quantize_fx.prepare_fx(ours, {"": default_dynamic_qconfig}, (input,))
        converted = quantize_fx.convert_fx(prepared)
    assert type(converted.layer).__name__ == name
    assert "quantized" in type(converted.head).__module__
    assert_near(converted(input), ours(input), 0.05)


@names
def test_an_exporter_to_onnx_sees_torchs_ops(name, monkeypatch):
    """It knows no others."""
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    theirs, ours = (
        torch.export.export(model, (torch.randn(6, 4, INPUT),), strict=False) for model in taggers(name)
    )
    found = [[str(n.target) for n in exported.graph.nodes] for exported in (theirs, ours)]
    assert found[1] == found[0]


def run_by_onnx(model, input, dynamo, file):
    """The outputs of the exported model. Needs `pip install onnx onnxscript onnxruntime`."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (input,), file, dynamo=dynamo, input_names=["x"], verbose=False)
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(y) for y in session.run(None, {"x": input.numpy()})]


@names
@pytest.mark.parametrize("dynamo", [False, True])
def test_an_onnx_model_gives_the_same_numbers(name, dynamo, tmp_path):
    _, ours = taggers(name, num_layers=2, bidirectional=True)
    input = torch.randn(6, 4, INPUT)
    found = run_by_onnx(ours, input, dynamo, str(tmp_path / "model.onnx"))
    assert_all_near(found, [ours(input)], 1e-5)


@pytest.mark.parametrize("name,dynamo", [("LSTM", False), ("GRU", False), ("RNN", False), ("LSTM", True)])
def test_a_layer_that_is_the_whole_onnx_model(name, dynamo, tmp_path):
    """The exporter passes all defaults of forward, and those by position."""
    _, ours = pair(name)
    input = torch.randn(6, 4, INPUT)
    found = run_by_onnx(ours.eval(), input, dynamo, str(tmp_path / "layer.onnx"))
    assert_all_near(found, tensors_of(ours(input)), 1e-5)


@names
def test_the_defaults_of_a_call_may_be_given_by_position(name):
    """As torch.onnx.export(..., dynamo=False) gives them."""
    _, ours = pair(name)
    input = torch.randn(6, 4, INPUT)
    defaults = [p.default for p in inspect.signature(ours.forward).parameters.values()][1:]
    assert_all_near(tensors_of(ours(input, *defaults)), tensors_of(ours(input)), 0)


@names
@pytest.mark.parametrize("bidirectional", [False, True])
def test_gradients_of_each_sample_by_expanded_weights(name, bidirectional):
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    theirs, ours = pair(name, batch_first=True, bidirectional=bidirectional)
    input, found = torch.randn(4, 6, INPUT), []
    for layer in (theirs, ours):
        layer.weight_ih_l0.requires_grad_(False)
        with torch.backends.mkldnn.flags(enabled=False):  # torch has no rule for oneDNN's LSTM
            call_for_per_sample_grads(layer)(input)[0].square().sum().backward()
        found.append([p.grad_sample for p in layer.parameters() if p.requires_grad])
    assert_all_near(found[1], found[0], 1e-5)


@names
def test_a_vectorized_jacobian(name):
    theirs, ours = pair(name, bidirectional=True, dtype=torch.float64)
    input = torch.randn(3, 2, INPUT, dtype=torch.float64)
    found = [
        torch.autograd.functional.jacobian(lambda x, m=m: m(x)[0], input, vectorize=True)
        for m in (ours, theirs)
    ]
    assert_near(*found, 1e-10)


def test_dynamic_quantization_after_to_torch():
    if not set(torch.backends.quantized.supported_engines) & {"x86", "fbgemm", "onednn"}:
        pytest.skip("torch was built without a quantized engine")
    _, ours = taggers("LSTM")
    input = torch.randn(6, 4, INPUT)
    expected = ours(input)
    quantized = torch.ao.quantization.quantize_dynamic(lltm_ext.to_torch(ours), {nn.LSTM, nn.Linear})
    assert "quantized" in type(quantized.layer).__module__
    assert_near(quantized(input), expected, 0.05)


# ---- Errors ----------------------------------------------------------------------------------------------


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, HIDDEN, dtype=dtype)


BAD_INPUTS = {
    "1-D": (lambda: torch.zeros(INPUT), r"of 2 or 3 dimensions, got \[7\]"),
    "4-D": (lambda: torch.zeros(1, 6, 4, INPUT), r"of 2 or 3 dimensions, got \[1, 6, 4, 7\]"),
    "another size": (lambda: torch.zeros(6, 4, INPUT - 1), "of input_size = 7 features"),
    "unbatched of another size": (lambda: torch.zeros(6, INPUT - 1), "of input_size = 7 features"),
    "integers": (lambda: torch.zeros(6, 4, INPUT).long(), "of dtype"),
    "float64": (
        lambda: torch.zeros(6, 4, INPUT).double(),
        "of dtype float32, as the weights have, got float64",
    ),
    "float16": (
        lambda: torch.zeros(6, 4, INPUT).half(),
        "of dtype float32, as the weights have, got float16",
    ),
}
BAD_STATES = {
    "2-D": (lambda: zeros(4), r"of shape \[1, 4, 8\], got \[4, 8\]"),
    "another batch": (lambda: zeros(1, 3), r"of shape \[1, 4, 8\], got \[1, 3, 8\]"),
    "another number of layers": (lambda: zeros(2, 4), r"of shape \[1, 4, 8\], got \[2, 4, 8\]"),
    "float64": (lambda: zeros(1, 4, dtype=torch.float64), "of dtype float32, got float64"),
}


def error_of(layer, *arguments):
    with pytest.raises(Exception) as found:
        layer(*arguments)
    return found.value


def assert_raises_what_torch_raises(layers, arguments, message):
    theirs, ours = (error_of(layer, *arguments) for layer in layers)
    assert isinstance(ours, type(theirs))
    assert re.match(message, str(ours))


@names
@pytest.mark.parametrize("bad", BAD_INPUTS)
def test_a_bad_input_raises_what_torch_raises(name, bad):
    make, message = BAD_INPUTS[bad]
    assert_raises_what_torch_raises(pair(name), [make()], f"{name}: expected input {message}")


@names
def test_packed_input_of_another_size_is_refused(name):
    """Torch's LSTM takes it from 2.15 on."""
    _, ours = pair(name)
    error = error_of(ours, pack_sequence([torch.zeros(3, INPUT - 1)]))
    assert isinstance(error, RuntimeError)
    assert str(error).startswith(f"{name}: expected input of input_size")


@names
@pytest.mark.parametrize("bad", BAD_STATES)
def test_bad_states_raise_what_torch_raises(name, bad):
    make, message = BAD_STATES[bad]
    hx = (make(), make()) if name == "LSTM" else make()
    arguments = torch.zeros(6, 4, INPUT), hx
    assert_raises_what_torch_raises(pair(name), arguments, f"{name}: expected h0 {message}")


@pytest.mark.parametrize("name", ["GRU", "RNN"])
def test_a_tuple_of_h0_and_a_proj_size_are_refused(name):
    error = error_of(pair(name)[1], torch.zeros(6, 4, INPUT), (zeros(1, 4),))
    assert isinstance(error, TypeError)
    assert str(error).startswith(f"{name}: expected hx to be a Tensor, h0, got tuple of 1")
    with pytest.raises(ValueError, match="proj_size"):
        pair(name, proj_size=3)


def test_three_states_raise_what_torch_raises():
    arguments = torch.zeros(6, 4, INPUT), (zeros(1, 4),) * 3
    assert_raises_what_torch_raises(pair("LSTM"), arguments, "LSTM: expected hx to be a pair")


@names
def test_a_wrong_dtype_is_also_a_type_error(name):
    """As of every op here."""
    assert isinstance(error_of(pair(name)[1], torch.zeros(6, 4, INPUT).double()), TypeError)


# ---- torch.compile ---------------------------------------------------------------------------------------


LENGTHS = (6, 4, 9, 5, 7, 8, 3, 10, 11, 12)


@names
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_torch_compile_makes_one_graph_of_a_model(name, training, fresh_dynamo):
    """Once for the first length, once for all others."""

    class Model(Tagger):
        def forward(self, x):
            x = torch.tanh(2 * x)
            return self.head(self.layer(x)[0])

    _, model = taggers(name, Model)
    graphs = []
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)
    for length in LENGTHS:
        found, expected = (function(torch.ones(length, 2, INPUT)) for function in (compiled, model))
        assert_near(found, expected, 1e-6)
        if training:
            parameters = list(model.parameters())
            gradients = [torch.autograd.grad(y.square().sum(), parameters) for y in (found, expected)]
            assert_all_near(*gradients, 1e-5)
    assert len(graphs) == 2
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert any("custom_cell" in target for target in targets)
    assert not any("zeros" in target for target in targets)  # the op takes None for these states


@names
def test_torch_compile_of_packed_sequences_breaks_the_graph_and_computes_the_same(name, fresh_dynamo):
    _, model = taggers(name, PackedTagger)
    compiled = torch.compile(model, backend="eager")
    breaks = torch._dynamo.utils.counters["graph_break"]
    breaks.clear()
    for lengths in ([6, 2], [4, 3], [9, 1], [5, 5], [7, 2]):
        input = torch.randn(max(lengths), 2, INPUT)
        assert_near(compiled(input, lengths), model(input, lengths), 1e-6)
    functions = ("pack_padded_sequence", "_call_packed", "pad_packed_sequence")
    assert len(breaks) == 3 and all(any(name in reason for reason in breaks) for name in functions)


@names
def test_torch_compile_still_refuses_torchs_own_layer(name, fresh_dynamo):
    theirs, _ = pair(name)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="RNN, GRU, or LSTM"):
        torch.compile(theirs, backend="eager", fullgraph=True)(torch.zeros(6, 4, INPUT))


@names
def test_an_ensemble_by_vmap_compiles(name, fresh_dynamo):
    layers = [pair(name)[1] for _ in range(3)]
    parameters, _ = torch.func.stack_module_state(layers)
    base = copy.deepcopy(layers[0]).to("meta")
    ensemble = torch.vmap(lambda p, x: torch.func.functional_call(base, p, (x,))[0], (0, None))
    input = torch.randn(5, 2, INPUT)
    found = torch.compile(ensemble, backend="aot_eager")(parameters, input)
    for y, layer in zip(found, layers, strict=True):
        assert_near(y, layer(input)[0], 1e-5)


@names
def test_an_exported_layer_takes_any_length(name):
    _, layer = pair(name)
    lengths = ({0: torch.export.Dim.DYNAMIC}, None)
    program = torch.export.export(layer, (torch.randn(6, 4, INPUT), None), dynamic_shapes=lengths)
    for length in LENGTHS:
        input = torch.randn(length, 4, INPUT)
        assert_near(program.module()(input, None)[0], layer(input)[0], 1e-6)


def test_dynamo_that_is_imported_first_traces_the_layers_too(tmp_path):
    code = (
        "import torch, torch._dynamo, lltm_ext; layer = lltm_ext.LSTM(3, 4); "
        "print(torch.compile(layer, backend='eager', fullgraph=True)(torch.zeros(5, 2, 3))[0].shape)"
    )
    done = forks.run("-c", code, cwd=tmp_path)
    assert done.stdout == "torch.Size([5, 2, 4])\n"


@names
def test_a_missing_bias_raises_what_torch_raises(name):
    """A bias that is set to None."""
    both = pair(name)
    for layer in both:
        layer.bias_ih_l0 = None
    assert_raises_what_torch_raises(both, [torch.zeros(6, 4, INPUT)], "")
