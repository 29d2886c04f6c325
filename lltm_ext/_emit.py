"""The C++ struct of a derived cell, for src/recurrence (cell.h) and the compilers of host and device."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lltm_ext._graph import CONSTANT, LEAF, OPS, Node, ancestors

if TYPE_CHECKING:
    from lltm_ext._declaration import Declaration
    from lltm_ext._derive import Derived

STRUCT = """\
// {name}, {origin}. x[i]: a gate's pre-activation.
// Saved for backward: {saved}.
struct Cell {{
  static constexpr int kGates = {gates}, kStates = {states}, kSaved = {saves};
  static constexpr int kParameters = {parameters}, kStepInputs = {inputs};
  static constexpr bool kRecurrent = {recurrent}, kSeparate = {separate}, kReadsH = {reads_h};
  static constexpr int kOutputState = {output_state};  // -1: h

  template <typename Math, typename A>
  LLTM_HOST_DEVICE static A forward(const CellInputs<Cell, A>& in, A (&states)[{state_array}], \
A (&saved)[{saved_array}]) {{
{forward}
  }}

  template <typename Math, typename A>
  LLTM_HOST_DEVICE static void backward(const A (&saved)[{saved_array}], const CellInputs<Cell, A>& in,
                                        A grad_h, A (&grad_states)[{state_array}],
                                        CellGradients<Cell, A>& grads) {{
{backward}
  }}
}};
"""


FOLDED = ("sigmoid", "exp")  # forget gates, often near 1: common/math.h


def literal(value: float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    value = float(value)
    if math.isnan(value):
        return "nan<A>()"
    if math.isinf(value):
        return "infinity<A>()" if value > 0 else "-infinity<A>()"
    return f"A({value!r})"


class Names:
    """The C++ names of nodes: v1, v2, ..., or the user's variable and an underscore, which no keyword has."""

    def __init__(self, leaves: dict[Node, str]):
        self._names = dict(leaves)
        self._taken: set[str] = set()

    def __call__(self, node: Node) -> str:
        if node.op == CONSTANT:
            return literal(node.value)
        if node not in self._names:
            base = f"{node.label}_" if node.label and node.op != LEAF else "v"
            tries = (base, *(f"{base}{i}" for i in range(1, len(self._taken) + 2)))
            name = next(name for name in tries if name not in self._taken and name != "v")
            self._taken.add(name)
            self._names[node] = name
        return self._names[node]

    def definition(self, node: Node, text: str) -> str:
        return f"const {'bool' if node.boolean else 'A'} {self(node)} = {text};"


def statements(nodes: Sequence[Node], known: Sequence[Node], names: Names) -> list[str]:
    """The definitions of nodes that are not known yet."""
    lines = []
    for node in ancestors(nodes, known):
        if node.op not in (LEAF, CONSTANT) and node not in known:
            arguments = [names(arg) for arg in node.args]
            lines.append(names.definition(node, OPS[node.op].text.format(*arguments)))
    return lines


def to_save(node: Node, value: str) -> str:
    if node.boolean:
        return f"{value} ? A(1) : A(0)"
    return f"folded({value})" if node.op in FOLDED else value


def from_saved(node: Node, saved: str) -> str:
    if node.boolean:
        return f"{saved} != A(0)"
    return f"unfolded({saved})" if node.op in FOLDED else saved


def forward_text(cell: Derived, names: Names) -> list[str]:
    results = [*cell.outputs, *cell.saved]
    live = ancestors(results)
    lines = [f"const A {names(s)} = states[{k}];" for k, s in enumerate(cell.leaves["s"]) if s in live]
    lines += statements(results, (), names)
    lines += [f"saved[{j}] = {to_save(node, names(node))};" for j, node in enumerate(cell.saved)]
    lines += [f"states[{k}] = {names(node)};" for k, node in enumerate(cell.outputs[1:])]
    return [*lines, f"return {names(cell.outputs[0])};"]


def backward_text(cell: Derived, names: Names) -> list[str]:
    lines = [names.definition(node, from_saved(node, f"saved[{j}]")) for j, node in enumerate(cell.saved)]
    gradients = cell.gradients
    results = [node for nodes in gradients.values() for node in nodes]
    live = ancestors(results, cell.saved)
    lines += [
        f"const A {names(g)} = grad_states[{k}];" for k, g in enumerate(cell.cotangents[1:]) if g in live
    ]
    lines += statements(results, cell.saved, names)
    for target, argument in (
        ("grads.x", "x"),
        ("grads.r", "r"),
        ("grads.parameters", "p"),
        ("grad_states", "s"),
    ):
        lines += [f"{target}[{i}] = {names(node)};" for i, node in enumerate(gradients[argument])]
    if cell.reads_h:
        lines.append(f"grads.h = {names(gradients['h'][0])};")
    return lines


def emit(cell: Derived) -> str:
    """The struct's text. It depends only on the function and its declaration."""
    declared, leaves = cell.declaration, cell.leaves
    inputs = {"x": "in.x", "r": "in.r", "p": "in.parameters", "u": "in.steps"}
    places = {leaves["h"][0]: "in.h", cell.cotangents[0]: "grad_h"}
    for argument, array in inputs.items():
        places |= {node: f"{array}[{i}]" for i, node in enumerate(leaves[argument])}
    in_backward = {node: place for node, place in places.items() if node not in cell.saved}
    for k, (state, cotangent) in enumerate(zip(leaves["s"], cell.cotangents[1:], strict=True)):
        places[state] = in_backward[state] = f"s{k}"
        in_backward[cotangent] = f"grad_s{k}"
    for leaf in cell.saved:
        if leaf.op == LEAF and leaf not in leaves["s"]:
            in_backward[leaf] = re.sub(r"\W+", "", places[leaf].removeprefix("in."))
    return struct_of(
        declared,
        "derived from its Python function",
        cell.saved_names,
        cell.reads_h,
        forward_text(cell, Names(places)),
        backward_text(cell, Names(in_backward)),
    )


def struct_of(
    declared: Declaration,
    origin: str,
    saved: Sequence[str],
    reads_h: bool,
    forward: list[str],
    backward: list[str],
) -> str:
    """The struct with the lines of its two functions. `saved` describes the values saved."""
    return STRUCT.format(
        name=re.sub(r"[^ -~]|\\", "?", declared.name),  # in a comment, whose line must not go on
        origin=origin,
        saved=", ".join(saved) or "nothing",
        gates=declared.gates,
        states=len(declared.states),
        parameters=len(declared.parameters),
        inputs=len(declared.inputs),
        saves=len(saved),
        recurrent=flag(declared.recurrent),
        separate=flag(declared.separate),
        reads_h=flag(reads_h),
        output_state=declared.output_state,
        state_array=max(len(declared.states), 1),
        saved_array=max(len(saved), 1),
        forward=indented(forward),
        backward=indented(backward),
    )


def indented(lines: list[str]) -> str:
    return "\n".join(line if line.startswith("#") else f"    {line}" for line in lines)


def flag(value: bool) -> str:
    return "true" if value else "false"
