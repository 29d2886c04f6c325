"""Modules for reinforcement learning around our layers: a reset needs no loop over steps and no padding.

from_torch gives a module of torchrl or sb3-contrib a class that inherits from an adapter here and then from
the module's own. Nothing here imports the libraries: their classes are known by name.
"""

from __future__ import annotations

import copyreg
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lltm_ext._layers import TorchLayer, leave_to_eager


class Adapter:
    """The first base of a module's new class. Its second base is the module's own class."""

    def __reduce_ex__(self, protocol: Any) -> Any:  # pickle does not find the new class by its name
        found: Any = super().__reduce_ex__(max(protocol, 2))
        return _restore, (type(self).__bases__[1],), *found[2:]


class RecurrentPolicy(Adapter):
    """A policy of sb3-contrib, whose own method calls the layer for each step if there is a reset."""

    def _process_sequence(self, features: Tensor, hx: Any, episode_starts: Tensor, lstm: Any) -> Any:
        """Takes features [B*T, I] and episode_starts [B*T]; returns output [B*T, H] and the last states."""
        batch = hx[0].shape[1]
        if not isinstance(lstm, TorchLayer) or lstm.proj_size > 0:
            return super()._process_sequence(features, hx, episode_starts, lstm)  # type: ignore[misc]
        input = features.reshape(batch, -1, lstm.input_size).transpose(0, 1)
        output, hx = lstm(input, hx, reset=episode_starts.reshape(batch, -1).transpose(0, 1) != 0)
        return output.transpose(0, 1).flatten(0, 1), hx


class RecurrentModule(Adapter):
    """A module of torchrl. Its default backends, pad and auto, split the episodes of a batch and pad them.

    Its backend scan gets the batch as it is, so a module with one of these has that backend here.
    """

    lstm: Any
    gru: Any
    recurrent_backend: str
    _replaced_backend: str
    _lstm_pad_with_resets: Any
    _gru_pad_with_resets: Any

    def _lstm_scan_with_resets(self, input: Tensor, h: Tensor, c: Tensor, hx: Any, is_init: Tensor) -> Any:
        if isinstance(self.lstm, TorchLayer):
            return run_episodes(self.lstm, input, (h, c), hx, is_init)
        return self._lstm_pad_with_resets(input, h, c, is_init)

    def _gru_scan_with_resets(self, input: Tensor, h: Tensor, hx: Tensor, is_init: Tensor) -> Any:
        if isinstance(self.gru, TorchLayer):
            return run_episodes(self.gru, input, (h,), hx, is_init)
        return self._gru_pad_with_resets(input, h, is_init)


def run_episodes(
    layer: TorchLayer, input: Tensor, states: tuple[Tensor, ...], hx: Any, is_init: Tensor
) -> tuple[Tensor, ...]:
    """Runs each episode of a batch as a row of a packed sequence.

    ``reset=`` does not serve: an episode starts from any states, and its last states are results too.

    Args:
        input: [B, T, I].
        states: [B, T, L, H] each, of which those at the first step of each episode count.
        hx: the states at the first steps of all as the layer takes them.
        is_init: [B, T], where an episode starts.

    Returns:
        output [B, T, H], and for each state those after the last step of an episode there, elsewhere zeros.
    """
    starts = is_init.detach().cpu() | (torch.arange(is_init.shape[1]) == 0)
    first = starts.flatten().nonzero().squeeze(1)  # steps are numbered through all rows of the batch
    end = first.new_tensor([starts.numel()])
    lengths, order = first.diff(append=end).sort(descending=True, stable=True)
    first, last = first[order], (first[order] + lengths - 1).to(input.device)
    if len(first) == len(starts):
        output, final = layer(input, hx)
    else:
        step = torch.arange(int(lengths[0])).unsqueeze(1)
        rows = (first + step).masked_select(step < lengths).to(input.device)
        packed = PackedSequence(input.flatten(0, 1).index_select(0, rows), (step < lengths).sum(1))
        first = first.to(input.device)
        initial = [x.flatten(0, 1).index_select(0, first).transpose(0, 1).contiguous() for x in states]
        (found, *_), final = layer(packed, layer._as_hx(initial))
        output = torch.empty_like(found).index_copy_(0, rows, found).view(*is_init.shape, -1)
    placed = (
        y.new_zeros(x.shape).flatten(0, 1).index_copy_(0, last, y.transpose(0, 1)).view_as(x)
        for x, y in zip(states, layer._as_states(final), strict=True)
    )
    return output, *placed


leave_to_eager(run_episodes)
TORCHRL, SB3 = "torchrl.modules.tensordict_module.rnn", "sb3_contrib.common.recurrent.policies"
ADAPTERS = {  # with the methods that a subclass must not override
    f"{SB3}.RecurrentActorCriticPolicy": (RecurrentPolicy, ["_process_sequence"]),
    f"{TORCHRL}.LSTMModule": (RecurrentModule, ["forward", "_lstm", "_lstm_scan_with_resets"]),
    f"{TORCHRL}.GRUModule": (RecurrentModule, ["forward", "_gru", "_gru_scan_with_resets"]),
}


def adapt(module: Any) -> None:
    """Changes the class of a module if there is an adapter for it."""
    backend = vars(module).get("recurrent_backend", "pad")
    if not isinstance(module, Adapter) and backend in ("pad", "auto"):
        module.__class__ = _adapted(module.__class__)
        if isinstance(module, RecurrentModule):
            module.recurrent_backend, module._replaced_backend = "scan", backend


def restore(module: Adapter) -> None:
    """Undoes what :func:`adapt` does."""
    if isinstance(module, RecurrentModule):
        module.recurrent_backend = vars(module).pop("_replaced_backend")
    module.__class__ = type(module).__bases__[1]


@cache
def _adapted(cls: Any) -> Any:
    """The class with its adapter. The class itself if there is none for it."""
    for base in cls.__mro__:
        adapter, methods = ADAPTERS.get(f"{base.__module__}.{base.__name__}", (None, []))
        if adapter and all(
            hasattr(base, name) and getattr(cls, name) is getattr(base, name) for name in methods
        ):
            return type(cls)(cls.__name__, (adapter, cls), {"__module__": cls.__module__})
    return cls


def _restore(cls: Any) -> Any:
    return copyreg.__newobj__(_adapted(cls))  # type: ignore[attr-defined]
