"""Our layers in the graphs of torch.compile and torch.fx.

Dynamo, the tracer of torch.compile, refuses each nn.LSTM, nn.GRU and nn.RNN by its class, because it does
not trace torch's own. It does trace ours, so where it wraps one of them that refusal is off. torch's layers
are refused as before. For torch.fx, whose proxies have no sizes, a module is one node, as torch's modules
are.

These are private names of Dynamo. A torch that lacks them breaks the graph at a layer.
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


def make_leaves(symbolic_trace: ModuleType) -> None:
    """Makes a node of a call with proxies of each module whose ``forward`` is of this package."""
    original = symbolic_trace.Tracer.call_module

    @functools.wraps(original)
    def call_module(self: Any, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        has_proxies = any(isinstance(x, symbolic_trace.Proxy) for x in (*args, *kwargs.values()))
        if has_proxies and type(m).forward.__module__.startswith("lltm_ext."):
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)
        return original(self, m, forward, args, kwargs)

    symbolic_trace.Tracer.call_module = call_module


AfterImport("torch._dynamo.variables.builder", allow_layers)
AfterImport("torch._dynamo.trace_rules", leave_padding_to_eager)
AfterImport("torch.fx._symbolic_trace", make_leaves)
