"""LSTM, GRU and RNN inside the graphs of torch.compile.

Dynamo refuses each nn.LSTM, nn.GRU and nn.RNN by its class, because it does not trace torch's own. It does
trace ours, so where it wraps one of them that refusal is off. torch's layers are refused as before.

Both changes are of private names. A torch that lacks them breaks the graph at a layer.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from torch import nn

from lltm_ext._after_import import AfterImport
from lltm_ext._layers import TorchLayer


def allow_layers(builder: ModuleType) -> None:
    original = getattr(builder.VariableBuilder, "wrap_module", None)
    if original is None:
        return

    @functools.wraps(original)
    def wrap_module(self: Any, value: nn.Module) -> Any:
        if not isinstance(value, TorchLayer):
            return original(self, value)
        with builder.config.patch(allow_rnn=True):
            return original(self, value)

    builder.VariableBuilder.wrap_module = wrap_module


def leave_padding_to_eager(trace_rules: ModuleType) -> None:
    """Breaks a graph at ``pad_packed_sequence``, as Dynamo does at ``pack_padded_sequence``.

    Its own trace fails: fake tensors do not know the lengths.
    """
    rules = getattr(trace_rules, "manual_torch_name_rule_map", {})
    packing = rules.get("torch.nn.utils.rnn.pack_padded_sequence")
    if packing is not None:
        rules.setdefault("torch.nn.utils.rnn.pad_packed_sequence", packing)
        trace_rules.get_torch_obj_rule_map.cache_clear()


AfterImport("torch._dynamo.variables.builder", allow_layers)
AfterImport("torch._dynamo.trace_rules", leave_padding_to_eager)
