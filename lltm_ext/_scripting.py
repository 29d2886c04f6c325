"""Our layers in torch.jit.script: sources of their ``forward`` in TorchScript's static types."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lltm_ext._custom_cell import expand_gates as expand_gates

LAYER = """\
def forward(self, input: Tensor, hx: {hx} | None = None, reset: Tensor | None = None{inputs}):
    states = torch.jit.annotate(list[Tensor], [])
    if hx is not None:
        states = [{states}]
    weights = torch.jit.annotate(list[Tensor | None], [{weights}])
    steps = torch.jit.annotate(list[Tensor | None], [{steps}])
    options = (self._programs, self.batch_first, self.dropout if self.training else 0.0, {sizes})
    y, final = run_layers(input, states, weights, steps, reset, *options)
    return y, {final}
"""


def scriptable(module: nn.Module, forward: Callable[..., Any], text: str, **attributes: Any) -> nn.Module:
    """What torch.jit.script compiles in the place of a module: one with its content.

    torch.jit.script puts it into the model that it is given, too. There it acts as the module: only the
    source of its ``forward`` is another, and it is pickled as the module.
    """
    cls: Any = type(module)
    if cls.forward is not forward:  # a user's own, or one from here
        return module
    file, namespace = f"<lltm_ext script {hash(text)}>", dict[str, Any]()
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), globals(), namespace)

    @functools.wraps(namespace["forward"])  # by which inspect finds the text
    def same(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    def reduce(self: Any, _: Any) -> Any:
        return with_class(self, cls).__reduce_ex__(0)  # later protocols insist on the class

    content = {"forward": same, "__reduce_ex__": reduce, "__module__": cls.__module__}
    content["__jit_unused_properties__"] = [n for n in dir(cls) if isinstance(getattr(cls, n), property)]
    content["__annotations__"] = {"training": bool}  # instead of those of cls, which are texts
    return with_class(module, type(cls.__name__, (cls,), content), attributes)


def with_class(module: nn.Module, cls: type, attributes: dict[str, Any] | None = None) -> Any:
    other: Any = object.__new__(cls)
    other.__dict__ = module.__dict__ | (attributes or {})
    return other


def scriptable_layer(layer: Any, forward: Callable[..., Any]) -> nn.Module:
    """:func:`scriptable` of a layer. Its text has the names of the layer's parameters and step inputs."""
    cell, count = layer._cell, len(layer._cell.state_names)
    own_gates = cell.recurrent_gates

    def of_slice(end: str) -> str:
        names = ("weight_ih", "weight_hh", "bias")
        ih, hh, bias = (f"self.{n}{end}" if hasattr(layer, n + end) else "None" for n in names)
        if 0 < len(own_gates) < cell.gates:
            hh = f"expand_gates({hh}, {own_gates}, {cell.gates})"
        own = ", ".join(f"self.{name}{end}" for name in cell.parameters)
        rows = f"torch.cat([{own}]).view({len(cell.declared.parameters)}, -1)" if own else "None"
        return f"{ih}, {hh}, {bias}, {rows}"

    ends = ("", "_reverse")[: layer._directions]
    text = LAYER.format(
        hx="Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]",
        inputs="".join(f", {name}: Tensor | None = None" for name in cell.inputs),
        states="hx" if count == 1 else ", ".join(f"hx[{i}]" for i in range(count)),
        weights=", ".join(of_slice(f"_l{k}{end}") for k in range(layer.num_layers) for end in ends),
        steps=", ".join(cell.inputs),
        sizes=f"{len(ends)}, {layer._is_reverse}, {layer.hidden_size}",
        final="final[0]" if count == 1 else ", ".join(f"final[{i}]" for i in range(count)).join("()"),
    )
    programs = tuple(cell.programs[dtype] for dtype in (torch.float32, torch.float16, torch.bfloat16))
    return scriptable(layer, forward, text, _programs=programs)


def run_layers(
    input: Tensor,
    states: list[Tensor],
    weights: list[Tensor | None],
    step_inputs: list[Tensor | None],
    reset: Tensor | None,
    programs: tuple[str, str, str],
    batch_first: bool,
    dropout: float,
    directions: int,
    is_reverse: bool,
    hidden: int,
) -> tuple[Tensor, list[Tensor]]:
    """What :class:`lltm_ext._layers.SequenceLayer` does with batches, in TorchScript."""
    x, dtype, later = input.transpose(0, 1) if batch_first else input, input.dtype, reset
    program = programs[1 if dtype == torch.float16 else 2 if dtype == torch.bfloat16 else 0]
    planes = torch.jit.annotate(list[Tensor], [])
    for u in step_inputs:
        assert u is not None, "an input of the steps is missing"
        assert not u.requires_grad, "a script has no gradients of the inputs of the steps"
        u = u.transpose(0, 1) if batch_first else u
        planes.append((u if u.dim() == 3 else u.unsqueeze(-1).expand(-1, -1, hidden)).to(dtype))
    steps = torch.cat(planes, -1) if len(planes) > 0 else None
    if reset is not None:
        reset = reset.transpose(0, 1) if batch_first else reset
        reset = (
            reset
            if reset.dtype == torch.bool
            else reset.detach().to(torch.promote_types(dtype, torch.float32))
        )
        later = torch.cat([reset[1:], torch.zeros_like(reset[:1])])  # for the reverse direction
    h_n, states_n = torch.jit.annotate(list[Tensor], []), torch.jit.annotate(list[Tensor], [])
    slices = len(weights) // 4
    for first in range(0, slices, directions):
        outputs = torch.jit.annotate(list[Tensor], [])
        for i in range(first, first + directions):
            h0 = states[0][i] if len(states) > 0 else None
            others = torch.stack([s[i] for s in states[1:]]) if len(states) > 1 else None
            weight_ih, weight_hh, bias, parameters = weights[4 * i : 4 * i + 4]
            reverse = is_reverse or i > first
            of_cell = (weight_ih, weight_hh, bias, parameters, steps, later if reverse else reset)
            y, h, s = torch.ops.lltm_ext.custom_cell(x, h0, others, *of_cell, None, reverse, "auto", program)
            outputs.append(y)
            h_n.append(h)
            states_n.append(s)
        x = torch.cat(outputs, -1)
        if dropout > 0.0 and first + directions < slices:
            x = F.dropout(x, dropout)
    final = [torch.stack(h_n)]
    final.extend(torch.stack(states_n).unbind(1))
    return x.transpose(0, 1) if batch_first else x, final
