"""LSTM, GRU and RNN inside the graphs of torch.compile.

Dynamo refuses each nn.LSTM, nn.GRU and nn.RNN by its class, because it does not trace torch's own. It does
trace ours, so where it wraps one of them that refusal is off. torch's layers are refused as before.

Both changes are of private names. A torch that lacks them breaks the graph at a layer.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import nn

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


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module once it is imported: Dynamo takes over a second, which few need."""

    def __init__(self, name: str, function: Callable[[ModuleType], None]):
        self.name, self.function = name, function
        if name in sys.modules:
            function(sys.modules[name])
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self.function(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


AfterImport("torch._dynamo.variables.builder", allow_layers)
AfterImport("torch._dynamo.trace_rules", leave_padding_to_eager)
