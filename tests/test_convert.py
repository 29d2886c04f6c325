"""from_torch and to_torch: layers of torch become those here and back, in place."""

import copy
import pickle

import forks
import pytest
import torch
from op_suite import DOUBLE, Call, Make, assert_all_near, assert_same_bits, cotangents
from sequence_suite import INPUT, KINDS
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence

import lltm_ext
from lltm_ext import cells

HIDDEN = 5
OURS = {nn.LSTM: lltm_ext.LSTM, nn.GRU: lltm_ext.GRU, nn.RNN: lltm_ext.RNN}
FORMS = ["batched", "unbatched", "packed"]

layers = pytest.mark.parametrize("Layer", OURS, ids=lambda Layer: Layer.__name__)


class TwoPlaces(nn.Module):
    """One layer at two places, behind containers."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict({"first": nn.LSTM(INPUT, HIDDEN), "blocks": nn.ModuleList()})
        self.encoder["blocks"].append(nn.Sequential(nn.Linear(HIDDEN, INPUT), nn.Tanh()))
        self.decoder = nn.ModuleList([self.encoder["first"]])
        self.head = nn.Linear(HIDDEN, 2)

    def forward(self, input):
        hidden = self.encoder["blocks"][0](self.encoder["first"](input)[0])
        return self.head(self.decoder[0](hidden)[0])


class First(nn.Module):
    """Only the output of a layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, input: torch.Tensor):
        return self.layer(input)[0]


class OwnLSTM(nn.LSTM):
    def forward(self, input, hx=None):
        return super().forward(2 * input, hx)


def values(*shape, device="cpu"):
    return Make(DOUBLE, device)(*shape)


def input_of(form, device="cpu"):
    input = values(6, 3, INPUT, device=device)
    if form == "packed":
        return pack_padded_sequence(input, [6, 4, 1])
    return input if form == "batched" else input[:, 0]


def results(model, input):
    """The outputs, and the gradients of all parameters."""
    outputs = [y for y in Call(input).run(model) if y is not None and y.is_floating_point()]
    return outputs, torch.autograd.grad(outputs, list(model.parameters()), cotangents(outputs))


def assert_same_results(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        assert_all_near(ours, theirs, 1e-10)


def trained(model, optimizer, steps, input):
    for _ in range(steps):
        optimizer.zero_grad()
        Call(input).run(model)[0].square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


# ---- values ----------------------------------------------------------------------------------------------


OPTIONS = KINDS | {"batch_first": {"batch_first": True}, "relu": {"nonlinearity": "relu"}}


@pytest.mark.parametrize("Layer,kind", [(L, k) for L in OURS for k in OPTIONS if k != "relu" or L is nn.RNN])
@pytest.mark.parametrize("form", FORMS)
def test_results_are_the_same_before_and_after_and_back(Layer, kind, form, device):
    layer, input = Layer(INPUT, HIDDEN, **OPTIONS[kind], device=device, dtype=DOUBLE), input_of(form, device)
    expected, text = results(layer, input), repr(layer)
    assert lltm_ext.from_torch(layer) is layer
    assert (type(layer), repr(layer)) == (OURS[Layer], text)
    assert_same_results(results(layer, input), expected)
    assert lltm_ext.to_torch(layer) is layer
    assert (type(layer), repr(layer)) == (Layer, text)
    assert_same_bits(results(layer, input)[0], expected[0])


def test_the_kernels_here_run_a_converted_layer():
    layer = lltm_ext.from_torch(nn.LSTM(INPUT, HIDDEN))
    with torch.profiler.profile() as profile:
        layer(torch.zeros(6, 3, INPUT))
    names = {event.name for event in profile.events()}
    assert any(name.startswith("lltm_ext::custom_cell") for name in names)
    assert "aten::lstm" not in names


# ---- models ----------------------------------------------------------------------------------------------


def test_a_shared_layer_behind_containers_stays_shared(device):
    model, input = TwoPlaces().to(device, DOUBLE), values(6, 3, INPUT, device=device)
    expected, keys = results(model, input), list(model.state_dict())
    assert lltm_ext.from_torch(model) is model
    assert model.encoder["first"] is model.decoder[0]
    assert type(model.decoder[0]) is lltm_ext.LSTM
    assert list(model.state_dict()) == keys
    assert_same_results(results(model, input), expected)


def test_converting_twice_is_converting_once():
    model = lltm_ext.from_torch(lltm_ext.from_torch(TwoPlaces()))
    assert type(model.decoder[0]) is lltm_ext.LSTM
    assert type(lltm_ext.to_torch(lltm_ext.to_torch(model)).decoder[0]) is nn.LSTM


@layers
def test_an_optimizer_made_before_continues(Layer, device):
    """Adam's moments too: the same steps as without a conversion."""
    found = []
    for convert in (lltm_ext.from_torch, lambda model: model):
        torch.manual_seed(0)
        layer, input = Layer(INPUT, HIDDEN, device=device, dtype=DOUBLE), input_of("batched", device)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
        trained(layer, optimizer, 2, input)
        found.append(trained(convert(layer), optimizer, 3, input))
    assert_all_near(*found, 1e-10)


def test_parameters_buffers_modes_and_flat_weights_are_the_same_objects():
    layer = nn.LSTM(INPUT, HIDDEN, num_layers=2).eval().requires_grad_(False)
    layer.bias_ih_l0.requires_grad_()
    layer.register_buffer("steps", torch.zeros(3))
    layer.note = "kept"
    before = [*layer.parameters(), *layer.buffers(), *layer._flat_weights]
    lltm_ext.from_torch(layer)
    after = [*layer.parameters(), *layer.buffers(), *layer._flat_weights]
    assert [id(x) for x in after] == [id(x) for x in before]
    assert [n for n, p in layer.named_parameters() if p.requires_grad] == ["bias_ih_l0"]
    assert not layer.training
    assert layer.note == "kept"


def test_hooks_stay_and_fire_once():
    layer, fired = nn.LSTM(INPUT, HIDDEN), []
    layer.register_forward_pre_hook(lambda *_: fired.append("before"))
    layer.register_forward_hook(lambda *_: fired.append("after"))
    layer.register_full_backward_hook(lambda *_: fired.append("backward"))
    layer.register_state_dict_post_hook(lambda *_: fired.append("state_dict"))
    layer.register_load_state_dict_post_hook(lambda *_: fired.append("load_state_dict"))
    for convert in (lltm_ext.from_torch, lltm_ext.to_torch):
        convert(layer)
        layer(torch.zeros(6, 3, INPUT, requires_grad=True))[0].sum().backward()
        layer.load_state_dict(layer.state_dict())
        assert fired == ["before", "after", "backward", "state_dict", "load_state_dict"]
        fired.clear()


def test_copies_are_independent():
    layer = nn.LSTM(INPUT, HIDDEN)
    ours = lltm_ext.from_torch(copy.deepcopy(layer))
    assert (type(layer), type(ours)) == (nn.LSTM, lltm_ext.LSTM)
    assert ours.weight_ih_l0 is not layer.weight_ih_l0
    assert type(copy.deepcopy(ours)) is lltm_ext.LSTM
    assert type(pickle.loads(pickle.dumps(ours))) is lltm_ext.LSTM


# ---- weights made of others ------------------------------------------------------------------------------


@layers
def test_a_parametrization_is_kept_and_takes_effect(Layer, device):
    layer, input = Layer(INPUT, HIDDEN, device=device, dtype=DOUBLE), values(6, 3, INPUT, device=device)
    parametrizations.weight_norm(layer, "weight_ih_l0")
    parametrizations.orthogonal(layer, "weight_hh_l0")
    other = copy.deepcopy(layer)  # shares the class that parametrize made; torch can't copy it after a call
    expected, keys = results(other, input), list(layer.state_dict())
    lltm_ext.from_torch(layer)
    assert isinstance(layer, OURS[Layer])
    assert not isinstance(other, OURS[Layer])
    assert list(layer.state_dict()) == keys
    copied = copy.deepcopy(layer)
    assert_same_results(results(layer, input), expected)

    for model in (layer, other, copied):
        with torch.no_grad():
            model.parametrizations.weight_ih_l0.original0.mul_(2)
    assert_same_results(results(layer, input), results(other, input))

    assert_same_results(results(copied, input), results(other, input))
    parametrize.register_parametrization(layer, "bias_hh_l0", nn.Tanh())
    parametrize.register_parametrization(other, "bias_hh_l0", nn.Tanh())
    assert_same_results(results(layer, input), results(other, input))

    lltm_ext.to_torch(layer)
    assert not isinstance(layer, OURS[Layer])
    assert_same_results(results(layer, input), results(other, input))
    lltm_ext.from_torch(layer)
    for name in ("weight_hh_l0", "weight_ih_l0", "bias_hh_l0"):
        parametrize.remove_parametrizations(layer, name)
    assert type(layer) is OURS[Layer]


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_weight_norm_of_hooks_is_kept(device):
    layer, input = nn.LSTM(INPUT, HIDDEN, device=device, dtype=DOUBLE), values(6, 3, INPUT, device=device)
    nn.utils.weight_norm(layer, "weight_hh_l0")
    expected = results(layer, input)
    assert_same_results(results(lltm_ext.from_torch(layer), input), expected)
    with torch.no_grad():
        layer.weight_hh_l0_g.mul_(2)
    changed = results(layer, input)
    assert_same_results(results(lltm_ext.to_torch(layer), input), changed)


# ---- layers that stay ------------------------------------------------------------------------------------


def test_subclasses_of_torch_layers_stay():
    model = nn.ModuleList([OwnLSTM(INPUT, HIDDEN), nn.LSTM(INPUT, HIDDEN)])
    parametrizations.weight_norm(model[0], "weight_hh_l0")
    before = type(model[0])
    lltm_ext.from_torch(model)
    assert type(model[0]) is before
    assert type(model[1]) is lltm_ext.LSTM


def test_a_layer_with_a_projection_computes_the_same():
    peer, input = nn.LSTM(INPUT, HIDDEN, proj_size=2), torch.randn(6, 3, INPUT)
    layer = lltm_ext.from_torch(copy.deepcopy(peer))
    assert type(layer) is lltm_ext.LSTM
    torch.testing.assert_close(layer(input), peer(input), rtol=0, atol=0)


def test_a_scripted_model_stays():
    model, input = torch.jit.script(First(nn.LSTM(INPUT, HIDDEN))), torch.zeros(6, 3, INPUT)
    expected = model(input)
    assert lltm_ext.from_torch(model) is model
    assert_same_bits([model(input)], [expected])


# ---- wrapped models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False], ids=["torch.compile", "Module.compile"])
def test_a_compiled_model_runs_the_new_layers(whole, device, fresh_dynamo):
    model, input = TwoPlaces().to(device, DOUBLE), values(6, 3, INPUT, device=device)
    expected = results(model, input)
    if whole:
        model = torch.compile(model, backend="aot_eager")
    else:
        model.compile(backend="aot_eager")
    assert_same_results(results(model, input), expected)
    lltm_ext.from_torch(model)
    with torch.profiler.profile() as profile:
        found = results(model, input)
    assert_same_results(found, expected)
    assert not any(event.name == "aten::lstm" for event in profile.events())
    assert_same_results(results(lltm_ext.to_torch(model), input), expected)


def test_a_model_in_ddp_is_converted_inside(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(TwoPlaces().double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        peer = copy.deepcopy(model.module)
        expected = trained(peer, torch.optim.SGD(peer.parameters(), lr=0.1), 2, input_of("batched"))
        lltm_ext.from_torch(model)
        assert type(model.module.decoder[0]) is lltm_ext.LSTM
        assert_all_near(trained(model, optimizer, 2, input_of("batched")), expected, 1e-10)
    finally:
        torch.distributed.destroy_process_group()


# ---- the way back ----------------------------------------------------------------------------------------


def test_a_model_made_torch_loads_without_lltm_ext(tmp_path):
    model = nn.ModuleList([Layer(INPUT, HIDDEN) for Layer in OURS.values()])
    input = torch.randn(6, 3, INPUT)
    expected = model[0](input)[0].detach()
    torch.save((lltm_ext.to_torch(model), input, expected), tmp_path / "model.pt")
    program = """
import sys
sys.modules["lltm_ext"] = None  # importing it fails
import torch
model, input, expected = torch.load(sys.argv[1], weights_only=False)
torch.testing.assert_close(model[0](input)[0], expected)
print(*(type(layer).__module__ for layer in model))
"""
    found = forks.run("-c", program, tmp_path / "model.pt", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["torch.nn.modules.rnn"] * 3


def test_to_torch_names_the_modules_without_a_counterpart_and_changes_nothing():
    class Mine(lltm_ext.LSTM):
        pass

    model = nn.ModuleDict(
        {
            "first": lltm_ext.LSTM(INPUT, HIDDEN),
            "rest": nn.ModuleList([lltm_ext.LLTM(INPUT, HIDDEN), nn.Tanh(), lltm_ext.ReLU()]),
            "mine": Mine(INPUT, HIDDEN),
        }
    )
    parametrizations.weight_norm(model["mine"], "weight_hh_l0")
    message = (
        "^to_torch: expected no modules of lltm_ext except LSTM, GRU and RNN, "
        r"got rest\.0 \(LLTM\), rest\.2 \(ReLU\), mine \(ParametrizedMine\)$"
    )
    with pytest.raises(TypeError, match=message):
        lltm_ext.to_torch(model)
    assert type(model["first"]) is lltm_ext.LSTM
    with pytest.raises(TypeError, match=r"got the model \(Recurrent\)$"):
        lltm_ext.to_torch(lltm_ext.Recurrent(cells.lstm, INPUT, HIDDEN))


@pytest.mark.parametrize("convert", [lltm_ext.from_torch, lltm_ext.to_torch], ids=lambda f: f.__name__)
def test_anything_but_a_module_is_refused(convert):
    name = convert.__name__
    with pytest.raises(TypeError, match=f"^{name}: expected model to be a torch.nn.Module, got dict$"):
        convert({})


def test_a_model_without_torchs_layers_is_a_warning():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="from_torch: found no nn.LSTM, nn.GRU or nn.RNN in Sequential"):
        assert lltm_ext.from_torch(model) is model


# ---- xlstm's sLSTM ---------------------------------------------------------------------------------------


def xlstm_checkpoint(backend, kernel, bias):
    """As xlstm's cell of a backend stores a kernel [heads, from, gates, to] and a bias [heads, gates, to]."""
    if backend == "cuda":
        return {"cell._recurrent_kernel_": kernel.flatten(2), "cell._bias_": bias.flatten()}
    stored = kernel.permute(0, 2, 3, 1).flatten(1, 2)
    return {"cell._recurrent_kernel_": stored, "cell._bias_": bias.transpose(0, 1).flatten()}


def slstm_loop(gates, kernel, bias):
    """The steps of the paper, from zeros, for gates [T, B, 4, heads, size]."""
    y = c = n = m = torch.zeros_like(gates[0, :, 0])
    found = []
    for step in gates:
        i, f, z, o = (step + torch.einsum("bhi,higo->bgho", y, kernel) + bias.transpose(0, 1)).unbind(1)
        log_f = torch.nn.functional.logsigmoid(f) + m
        m = i if not found else torch.maximum(i, log_f)
        c = torch.exp(log_f - m) * c + torch.exp(i - m) * torch.tanh(z)
        n = torch.exp(log_f - m) * n + torch.exp(i - m)
        y = torch.sigmoid(o) * c / n
        found.append(y)
    return torch.stack(found).flatten(2)


@pytest.mark.parametrize("backend", ["cuda", "vanilla"])
def test_a_checkpoint_of_xlstm_computes_the_same(backend):
    torch.manual_seed(0)
    steps, batch, heads, size = 9, 3, 2, 5
    kernel = torch.randn(heads, size, 4, size, dtype=torch.float64)
    bias = torch.randn(heads, 4, size, dtype=torch.float64)
    gates = torch.randn(steps, batch, 4, heads, size, dtype=torch.float64)
    found = lltm_ext.slstm_from_xlstm(xlstm_checkpoint(backend, kernel, bias), prefix="cell.")
    layer = lltm_ext.Recurrent(lltm_ext.cells.slstm, None, heads * size, heads=heads, dtype=torch.float64)
    layer.load_state_dict(found)
    output, _ = layer(gates.flatten(2))
    torch.testing.assert_close(output, slstm_loop(gates, kernel, bias), rtol=1e-12, atol=1e-12)


def test_a_checkpoint_without_that_cell_is_refused():
    with pytest.raises(KeyError, match=r"expected 'cell._recurrent_kernel_' in the state_dict"):
        lltm_ext.slstm_from_xlstm({}, prefix="cell.")
    wrong = {"_recurrent_kernel_": torch.zeros(2, 5, 15), "_bias_": torch.zeros(40)}
    with pytest.raises(ValueError, match=r"\[heads, size, 4\*size\].*got \[2, 5, 15\] and \[40\]"):
        lltm_ext.slstm_from_xlstm(wrong)
