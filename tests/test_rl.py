"""from_torch with recurrent modules of torchrl and sb3-contrib: their results, without padding or a loop."""

import copy
import pickle
import sys

import pytest
import torch
from op_suite import DOUBLE, assert_all_near, assert_same_bits, cotangents
from torch import nn

import lltm_ext

BATCH, STEPS, INPUT, HIDDEN = 4, 9, 3, 5
KINDS = {
    "plain": {},
    "no bias": {"bias": False},
    "layers": {"num_layers": 2},
    "bidirectional": {"num_layers": 2, "bidirectional": True},
    "projection": {"proj_size": 2},
}


# ---- torchrl ---------------------------------------------------------------------------------------------

MODULES = ["LSTMModule", "GRUModule"]
recurrent_modules = pytest.mark.parametrize("name", MODULES)


def states_of(name):
    return ["h", "c"] if name == "LSTMModule" else ["h"]


def torchrl_module(name, **options):
    modules, states = pytest.importorskip("torchrl.modules"), states_of(name)
    keys = {"in_keys": ["x", *states], "out_keys": ["y", *(("next", state) for state in states)]}
    return getattr(modules, name)(INPUT, HIDDEN, **keys, default_recurrent_mode=True, **options).to(DOUBLE)


def rollouts(module, name, share_of_starts=0.3, device="cpu"):
    """Each step has states of its own, of which only those where an episode starts count."""
    from tensordict import TensorDict

    layer = next(module.children())
    rows = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = {"h": layer.proj_size or HIDDEN, "c": HIDDEN}
    data = {
        s: torch.randn(BATCH, STEPS, rows, sizes[s], dtype=DOUBLE, device=device) for s in states_of(name)
    }
    data["x"] = torch.randn(BATCH, STEPS, INPUT, dtype=DOUBLE, device=device)
    data = {key: x.requires_grad_() for key, x in data.items()}
    is_init = torch.rand(BATCH, STEPS, 1, device=device) < share_of_starts
    return TensorDict(data | {"is_init": is_init}, batch_size=[BATCH, STEPS])


def results(module, name, data):
    """The outputs and next states, and the gradients of parameters, input and states."""
    inputs = [data[key] for key in ("x", *states_of(name))]
    found = module(data.copy())
    outputs = [found["y"], *(found["next", state] for state in states_of(name))]
    return outputs, torch.autograd.grad(outputs, [*module.parameters(), *inputs], cotangents(outputs))


def assert_same_results(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        assert_all_near(ours, theirs, 1e-10)


@pytest.fixture
def no_padding(monkeypatch):
    rnn = pytest.importorskip("torchrl.modules.tensordict_module.rnn")
    monkeypatch.setattr(rnn, "_split_and_pad_for_reset", None)


@pytest.mark.parametrize("share_of_starts", [0, 0.3, 1])
@pytest.mark.parametrize(
    "name,kind", [(n, k) for n in MODULES for k in KINDS if (n, k) != ("GRUModule", "projection")]
)
def test_a_torchrl_module_has_the_results_of_the_unconverted_one(name, kind, share_of_starts, device):
    module = torchrl_module(name, **KINDS[kind]).to(device)
    data = rollouts(module, name, share_of_starts, device)
    expected = results(module, name, data)
    assert lltm_ext.from_torch(module) is module
    assert_same_results(results(module, name, data), expected)


@recurrent_modules
def test_a_torchrl_module_pads_no_episodes(name, no_padding):
    module = lltm_ext.from_torch(torchrl_module(name))
    module(rollouts(module, name))


@recurrent_modules
@pytest.mark.parametrize("shape", [(STEPS,), (1, BATCH, STEPS)])
def test_a_torchrl_module_takes_other_dimensions(name, shape):
    module = torchrl_module(name)
    data = rollouts(module, name).detach()
    data = data[0] if len(shape) == 1 else data.reshape(shape)
    expected = module(data.copy())["y"]
    assert_all_near(lltm_ext.from_torch(module)(data.copy())["y"], expected, 1e-10)


@recurrent_modules
def test_a_torchrl_module_takes_single_steps_and_no_states(name):
    peer = torchrl_module(name)
    data, module = rollouts(peer, name).detach(), lltm_ext.from_torch(copy.deepcopy(peer))
    with sys.modules["torchrl.modules"].set_recurrent_mode(False):
        assert_all_near(module(data[:, 0].copy())["y"], peer(data[:, 0].copy())["y"], 1e-10)
    data = data.select("x", "is_init")
    assert_all_near(module(data.copy())["y"], peer(data.copy())["y"], 1e-10)


@recurrent_modules
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_torchrl_module_is_copied_and_pickled(name, duplicate):
    module = lltm_ext.from_torch(nn.Sequential(torchrl_module(name)))[0]
    other = duplicate(module)
    assert type(other) is type(module)
    assert list(other.state_dict()) == list(torchrl_module(name).state_dict())
    data = rollouts(module, name)
    for actual, expected in zip(results(other, name, data), results(module, name, data), strict=True):
        assert_same_bits(actual, expected)


@recurrent_modules
@pytest.mark.parametrize("backend", ["pad", "auto"])
def test_to_torch_restores_a_torchrl_module(name, backend):
    module = torchrl_module(name, recurrent_backend=backend)
    cls, content = type(module), set(vars(module))
    assert isinstance(lltm_ext.from_torch(lltm_ext.from_torch(module)), cls)
    assert type(module) is not cls
    lltm_ext.to_torch(module)
    assert (type(module), module.recurrent_backend, set(vars(module))) == (cls, backend, content)
    module(rollouts(module, name))


@recurrent_modules
def test_a_backend_that_somebody_chose_stays(name):
    module = torchrl_module(name, recurrent_backend="scan")
    cls = type(module)
    assert type(lltm_ext.from_torch(module)) is cls
    assert module.recurrent_backend == "scan"


@recurrent_modules
def test_a_subclass_of_a_torchrl_module_with_its_own_forward_stays(name):
    module = torchrl_module(name)
    own = type("Own", (type(module),), {"forward": lambda self, data: type(module).forward(self, data)})
    module.__class__ = own
    assert type(lltm_ext.from_torch(module)) is own


@recurrent_modules
def test_torchrls_layers_in_python_can_replace_ours(name):
    module = torchrl_module(name).float()  # they take no other dtype
    data = rollouts(module, name).detach().select("x", "is_init")
    data["x"] = data["x"].float()
    expected = module(data.copy())["y"]
    found = lltm_ext.from_torch(module).make_python_based()(data)
    assert_all_near(found["y"], expected, 1e-5)


@recurrent_modules
def test_vmap_over_the_parameters_of_torchrl_modules(name):
    from torch.func import functional_call, stack_module_state

    modules = [lltm_ext.from_torch(torchrl_module(name)) for _ in range(2)]
    data = rollouts(modules[0], name).detach()
    parameters, _ = stack_module_state(modules)
    found = torch.vmap(lambda p: functional_call(modules[0], p, (data.copy(),))["y"])(parameters)
    assert_all_near(found, torch.stack([module(data.copy())["y"] for module in modules]), 1e-10)


# ---- sb3-contrib -----------------------------------------------------------------------------------------

POLICIES = {
    "two": {},
    "shared": {"shared_lstm": True, "enable_critic_lstm": False},
    "actor": {"enable_critic_lstm": False},
    "layers": {"n_lstm_layers": 2},
}


def sb3_policy(Base=None, **options):
    policies = pytest.importorskip("sb3_contrib.common.recurrent.policies")
    from gymnasium.spaces import Box, Discrete

    spaces = Box(-1, 1, (INPUT,)), Discrete(2)
    Base = Base or policies.RecurrentActorCriticPolicy
    return Base(*spaces, lambda progress: 1e-3, lstm_hidden_size=HIDDEN, net_arch=[], **options)


def batch_for(policy):
    from sb3_contrib.common.recurrent.type_aliases import RNNStates

    h, c, h_critic, c_critic = torch.randn(4, policy.lstm_actor.num_layers, BATCH, HIDDEN, requires_grad=True)
    starts = (torch.rand(BATCH * STEPS) < 0.3).float()
    input, actions = torch.rand(BATCH * STEPS, INPUT), torch.randint(2, (BATCH * STEPS,))
    return input, actions, RNNStates((h, c), (h_critic, c_critic)), starts


def evaluated(policy, input, actions, states, starts):
    """Values and so on, the last states, and all gradients."""
    outputs = [*policy.evaluate_actions(input, actions, states, starts)]
    outputs += policy.get_distribution(input, states.pi, starts)[1]
    wanted = [*policy.parameters(), *states.pi, *states.vf]
    grads = torch.autograd.grad(outputs, wanted, cotangents(outputs), allow_unused=True)
    return outputs, [g for g in grads if g is not None]


@pytest.mark.parametrize("kind", POLICIES)
def test_an_sb3_policy_has_the_results_of_the_unconverted_one(kind):
    policy = sb3_policy(**POLICIES[kind])
    batch = batch_for(policy)
    expected = evaluated(policy, *batch)
    assert lltm_ext.from_torch(policy) is policy
    for ours, theirs in zip(evaluated(policy, *batch), expected, strict=True):
        assert_all_near(ours, theirs, 1e-5)


def test_an_sb3_policy_calls_its_layer_once():
    policy, calls = lltm_ext.from_torch(sb3_policy()), []
    policy.lstm_actor.register_forward_hook(lambda *_: calls.append(1))
    evaluated(policy, *batch_for(policy))
    assert len(calls) == 2  # one for each method of the policy


def test_an_sb3_policy_acts():
    policy = sb3_policy()
    observation, starts = torch.rand(BATCH, INPUT).numpy(), torch.tensor([1, 0, 0, 1]).numpy()
    _, states = policy.predict(observation, None, starts, deterministic=True)
    expected = policy.predict(observation, states, starts, deterministic=True)
    found = lltm_ext.from_torch(policy).predict(observation, states, starts, deterministic=True)
    assert_all_near([torch.tensor(x) for x in found[1]], [torch.tensor(x) for x in expected[1]], 1e-5)


def test_an_sb3_policy_is_pickled_and_restored():
    policy = sb3_policy()
    cls, content = type(policy), set(vars(policy))
    other = pickle.loads(pickle.dumps(lltm_ext.from_torch(policy)))
    assert type(other) is type(policy) is not cls
    batch = batch_for(policy)
    assert_same_bits(evaluated(other, *batch)[0], evaluated(policy, *batch)[0])
    lltm_ext.to_torch(policy)
    assert (type(policy), set(vars(policy))) == (cls, content)


def test_subclasses_of_an_sb3_policy():
    policies = pytest.importorskip("sb3_contrib.common.recurrent.policies")

    class Own(policies.RecurrentActorCriticPolicy):
        pass

    class OwnSequence(Own):
        @staticmethod
        def _process_sequence(*args):
            return policies.RecurrentActorCriticPolicy._process_sequence(*args)

    assert type(lltm_ext.from_torch(sb3_policy(Own))) is not Own
    assert type(lltm_ext.from_torch(sb3_policy(OwnSequence))) is OwnSequence
