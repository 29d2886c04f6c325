"""The C++ struct of a derived cell, for src/recurrence (cell.h) and the compilers of host and device."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from lltm_ext._formula.affine import are_affine_together
from lltm_ext._formula.declaration import Declaration
from lltm_ext._formula.graph import CONSTANT, LEAF, OPS, OVER_UNITS, Node, ancestors, levels, make

STRUCT = """\
// {name}, {origin}. x[i]: a gate's pre-activation.
// Saved for backward: {saved}.
struct Cell {{
  static constexpr int kGates = {gates}, kStates = {states}, kSaved = {saves};
  static constexpr int kParameters = {parameters}, kStepInputs = {inputs};
  static constexpr bool kRecurrent = {recurrent}, kSeparate = {separate}, kReadsH = {reads_h};
  {outputs}  // -1: h
  static constexpr bool kWideProjections = {wide}, kBackwardReadsH = {backward_reads_h};{others}
  LLTM_HOST_DEVICE static constexpr bool backward_reads(int gate) {{ return {backward_reads}; }}

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


HAS_OVER_UNITS = "\n  static constexpr bool kOverUnits = true;"

SAVED_STATES = """
  // h and the states are affine in the old ones. saved[i] is an old state:
  LLTM_HOST_DEVICE static constexpr int saved_state(int i) {{ return {states}; }}"""

# Of a cell with products besides that with h.
STAGES = """
  static constexpr int kProducts = {products}, kFed = {fed}, kBlocks = {blocks};
  LLTM_HOST_DEVICE static constexpr int block_of(int i) {{ return {block_of}; }}
  // Of whole steps: the first products forward, if these take the previous h; and calls of all others.
  static constexpr int kProductsOfH = {of_h}, kCalls = {calls}, kBackCalls = {back_calls};
  LLTM_HOST_DEVICE static constexpr OwnCall call(int i) {{ return {called}; }}
  LLTM_HOST_DEVICE static constexpr OwnCall back_call(int i) {{ return {called_back}; }}
  // The stage that computes what products take, and that of the backward that finds a product's gradient.
  LLTM_HOST_DEVICE static constexpr int stage_of(int i) {{ return {stages}; }}
  LLTM_HOST_DEVICE static constexpr int back_stage_of(int i) {{ return {back_stages}; }}

  template <int kStage, typename Math, typename A>
  LLTM_HOST_DEVICE static void feed(const CellInputs<Cell, A>& in, const A (&states)[{state_array}],
                                    A (&fed)[{fed}]) {{
{feed}
  }}

  template <int kStage, typename Math, typename A>
  LLTM_HOST_DEVICE static void feed_back(const A (&saved)[{saved_array}], const CellInputs<Cell, A>& in,
                                         A grad_h, const A (&grad_states)[{state_array}],
                                         A (&grad_products)[{products}]) {{
{feed_back}
  }}

  template <typename Math, typename A, class Products>
  LLTM_HOST_DEVICE static A forward(const CellInputs<Cell, A>& in, A (&states)[{state_array}],
                                    A (&saved)[{saved_array}], const Products& products) {{
{forward}
  }}

  template <typename Math, typename A, class Products>
  LLTM_HOST_DEVICE static void backward(const A (&saved)[{saved_array}], const CellInputs<Cell, A>& in,
                                        A grad_h, A (&grad_states)[{state_array}],
                                        CellGradients<Cell, A>& grads, const Products& products) {{
{backward}
  }}
"""


EXCHANGES = (*OVER_UNITS, "product", "product_back")  # ops for which units exchange values
FOLDED = ("sigmoid", "exp")  # these serve as forget gates, often near 1 (common/math.h)
DECISIONS = 8  # how many fit in a saved value: bfloat16 has all integers up to 256


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

    def __init__(self, leaves: dict[Node, str], in_packs: bool = False):
        self._names = dict(leaves)
        self._taken: set[str] = set()
        self.in_packs = in_packs  # whether A may be several numbers (src/recurrence/persistent/units.cuh)

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

    def array(self, nodes: Sequence[Node]) -> str:
        """That of an array for the values of these nodes."""
        return f"of_{self(nodes[0])}"

    def definition(self, node: Node, text: str) -> str:
        kind = ("auto" if self.in_packs else "bool") if node.boolean else "A"
        return f"const {kind} {self(node)} = {text};"

    def choice(self, condition: str, a: str, b: str) -> str:
        return f"choose({condition}, {a}, {b})" if self.in_packs else f"({condition} ? {a} : {b})"


def statements(
    nodes: Sequence[Node], known: Sequence[Node], names: Names, calls: Sequence[Call] = ()
) -> list[str]:
    """The definitions of nodes that are not known yet.

    Those over all units that do not wait for each other are found together, because threads exchange values.

    Args:
        calls: those that define products which are not known.
    """
    level = levels(nodes, EXCHANGES, known)
    defined = [node for node in level if node.op not in (LEAF, CONSTANT) and node not in known]
    lines = []
    for n in range(max(level.values(), default=0) + 1):
        of_level = [node for node in defined if level[node] == n]
        lines += over_units([node for node in of_level if node.op in OVER_UNITS], names)
        for i, call in enumerate(calls):
            lines += call.lines(i, names) if level[call.results[0]] == n else []
        lines += [names.definition(x, text_of(x, names)) for x in of_level if x.op not in EXCHANGES]
    return lines


def text_of(node: Node, names: Names) -> str:
    arguments = [names(arg) for arg in node.args]
    is_choice = node.op == "where" and names.in_packs
    return names.choice(*arguments) if is_choice else OPS[node.op].text.format(*arguments)


def over_units(nodes: Sequence[Node], names: Names) -> list[str]:
    """The definitions of ops over all units: of sums and variances together."""
    variances = [node for node in nodes if node.op == "units_var"]
    of_variances = [node.args[0] for node in variances]
    means = [node for node in nodes if node.op == "units_mean" and node.args[0] in of_variances]
    sums = [node for node in nodes if node.op in ("units_sum", "units_mean") and node not in means]
    others = [node for node in nodes if node not in (*variances, *means, *sums)]
    lines = [names.definition(node, text_of(node, names)) for node in others]
    arrays = []
    for found in (variances, sums):
        if found:
            arrays.append(names.array(found))
            lines.append(f"A {arrays[-1]}[] = {{{', '.join(names(node.args[0]) for node in found)}}};")
    if variances:
        arrays.insert(1, f"means_{arrays[0]}")
        lines.append(f"A {arrays[1]}[{len(variances)}];")
    if arrays:
        lines.append(f"in.units.{'moments' if variances else 'sums'}({', '.join(arrays)});")
    for i, node in enumerate(variances):
        lines.append(names.definition(node, f"{arrays[0]}[{i}]"))
    for node in means:
        lines.append(names.definition(node, f"{arrays[1]}[{of_variances.index(node.args[0])}]"))
    for i, node in enumerate(sums):
        value = f"{arrays[-1]}[{i}]"
        is_mean = node.op == "units_mean"
        lines.append(names.definition(node, f"in.units.per_unit({value})" if is_mean else value))
    return lines


class Saved(NamedTuple):
    """What one or two saved numbers have: a value, or several decisions."""

    nodes: tuple[Node, ...]
    first: int  # the number of the first one
    wide: bool = False  # whether it takes two, which keep float32's precision in half types

    def to_save(self, names: Names) -> list[str]:
        """The C++ expressions of the numbers."""
        node, value = self.nodes[0], names(self.nodes[0])
        if node.boolean:
            bits = (names.choice(names(x), f"A({1 << k})", "A(0)") for k, x in enumerate(self.nodes))
            return [" + ".join(bits)]
        if self.wide:
            return [f"Math::high_part({value})", f"Math::low_part({value})"]
        if node.op == "tanh":
            return [f"Math::folded_tanh({value})"]
        return [f"folded({value})" if node.op in FOLDED else value]

    def from_saved(self, names: Names) -> list[str]:
        """The C++ definitions of the nodes."""
        node, number = self.nodes[0], f"saved[{self.first}]"
        if len(self.nodes) > 1:
            plain, packed = "(static_cast<int>({0}) & {1}) != 0", "has_bit({0}, {1})"
            text = packed if names.in_packs else plain
            return [names.definition(x, text.format(number, 1 << k)) for k, x in enumerate(self.nodes)]
        if node.boolean:
            value = f"{number} != A(0)"
        elif self.wide:
            value = f"Math::of_parts({number}, saved[{self.first + 1}])"
        elif node.op == "tanh":
            value = f"Math::unfolded_tanh({number})"
        else:
            value = f"unfolded({number})" if node.op in FOLDED else number
        return [names.definition(node, value)]


def saved_numbers(nodes: Sequence[Node], wide: Collection[Node]) -> tuple[list[Saved], int]:
    """Returns where the saved nodes are, and how many numbers that takes."""
    values, decisions = ([x for x in nodes if x.boolean is boolean] for boolean in (False, True))
    groups: list[tuple[Node, ...]] = [(x,) for x in values]
    groups += [tuple(decisions[i : i + DECISIONS]) for i in range(0, len(decisions), DECISIONS)]
    found, count = [], 0
    for group in groups:
        found.append(Saved(group, count, group[0] in wide))
        count += 1 + found[-1].wide
    return found, count


class Product(NamedTuple):
    """A product of a block [H, H] of a weight with a value of all units."""

    node: Node
    block: int  # which one of all blocks
    gradient: Node  # of the product
    stage: int  # how many products, one after the other, the value depends on
    back_stage: int  # likewise the gradient, on products with transposed blocks

    @property
    def value(self) -> Node:
        return self.node.args[1]

    @property
    def back(self) -> Node:
        """The gradient's product with the transposed block, which is part of the value's gradient."""
        return make("product_back", self.node.args[0], self.gradient)


class Call(NamedTuple):
    """Products that a kernel of whole steps computes together, in the middle of a step.

    Forward all have one value. Backward they have the same `inputs` gradients, as often as there are values
    whose gradients they are part of. Of these only sums count, so each is the sum of its products.
    """

    products: tuple[Product, ...]
    inputs: int
    backward: bool

    @property
    def results(self) -> list[Node]:
        return [product.back if self.backward else product.node for product in self.products]

    @property
    def given(self) -> list[Node]:
        return [x.gradient if self.backward else x.value for x in self.products[: self.inputs]]

    @property
    def outputs(self) -> int:
        return len(self.products) // self.inputs

    def lines(self, number: int, names: Names) -> list[str]:
        """The definitions of the results."""
        given, found = f"given_{number}", f"products_{number}"
        lines = [f"const A {given}[] = {{{', '.join(map(names, self.given))}}};"]
        lines.append(f"A {found}[{self.outputs}];")
        lines.append(f"products.template multiply<{number}>({given}, {found});")
        for i, result in enumerate(self.results):
            is_rest = i % self.inputs > 0
            lines.append(names.definition(result, "A(0)" if is_rest else f"{found}[{i // self.inputs}]"))
        return lines


class CellNodes(NamedTuple):
    """Forward and backward of a cell, as Derived describes them."""

    declaration: Declaration
    leaves: Mapping[str, Sequence[Node]]
    outputs: Sequence[Node]
    cotangents: Sequence[Node]
    gradients: Mapping[str, Sequence[Node]]
    reads_h: bool
    over_units: bool
    products: tuple[Product, ...] = ()

    @property
    def fed(self) -> list[Node]:
        """The values that products take, each once, in the order of the products."""
        return list(dict.fromkeys(product.value for product in self.products))

    @property
    def calls(self) -> list[Call]:
        """The calls of a whole step forward, in their order. Products of h are known before it begins."""
        apart = [x for x in self.products if x.value is not self.leaves["h"][0]]
        return [Call(tuple(run), 1, False) for _, run in groupby(apart, lambda x: x.value.index)]

    def back_calls(self, known: Sequence[Node]) -> list[Call]:
        """Those of the backward, which knows these nodes."""
        level = levels([x.gradient for x in self.products], EXCHANGES, known)
        found: list[Call] = []
        for _, run in groupby(self.products, lambda x: (x.value.index, level[x.gradient])):
            products = tuple(run)
            given = [x.gradient.index for x in products]
            if found and [x.index for x in found[-1].given] == given:
                found[-1] = found[-1]._replace(products=found[-1].products + products)
            else:
                found.append(Call(products, len(products), True))
        return sorted(found, key=lambda call: level[call.given[0]])

    @property
    def stages(self) -> list[list[Node]]:
        """The values that the products of each stage take."""
        count = max((product.stage for product in self.products), default=-1) + 1
        found = [[x.value for x in self.products if x.stage == stage] for stage in range(count)]
        return [list(dict.fromkeys(values)) for values in found]

    @property
    def back_stages(self) -> list[list[Product]]:
        """The products whose gradients the backward finds in each stage."""
        count = max((product.back_stage for product in self.products), default=-1) + 1
        return [[x for x in self.products if x.back_stage == stage] for stage in range(count)]

    @property
    def free(self) -> str:
        """The arguments that backward can read again, exactly as forward did."""
        return "pu" if self.declaration.recurrent else "puxh"


def forward_values(
    cell: CellNodes, results: Sequence[Node], names: Names, calls: Sequence[Call] = ()
) -> list[str]:
    """The definitions of values of the forward. `calls`: those that define products."""
    called = [node for call in calls for node in call.results]
    known = [x.node for x in cell.products if x.node not in called]
    live = ancestors(results, known)
    lines = [f"const A {names(s)} = states[{k}];" for k, s in enumerate(cell.leaves["s"]) if s in live]
    return lines + statements(results, known, names, calls)


def backward_values(
    cell: CellNodes,
    saved: Sequence[Saved],
    results: Sequence[Node],
    names: Names,
    calls: Sequence[Call] = (),
) -> list[str]:
    """The definitions of values of the backward. `calls`: those that define products."""
    called = [node for call in calls for node in call.results]
    lines = [line for x in saved for line in x.from_saved(names)]
    known = [node for x in saved for node in x.nodes] + [
        x.back for x in cell.products if x.back not in called
    ]
    live = ancestors([*results, *called], known)
    lines += [
        f"const A {names(g)} = grad_states[{k}];" for k, g in enumerate(cell.cotangents[1:]) if g in live
    ]
    return lines + statements([*results, *called], known, names, calls)


def forward_text(
    cell: CellNodes, saved: Sequence[Saved], names: Names, calls: Sequence[Call] = ()
) -> list[str]:
    lines = forward_values(cell, [*cell.outputs, *(node for x in saved for node in x.nodes)], names, calls)
    numbers = [number for x in saved for number in x.to_save(names)]
    lines += [f"saved[{j}] = {number};" for j, number in enumerate(numbers)]
    lines += [f"states[{k}] = {names(node)};" for k, node in enumerate(cell.outputs[1:])]
    return [*lines, f"return {names(cell.outputs[0])};"]


def backward_text(
    cell: CellNodes, saved: Sequence[Saved], names: Names, calls: Sequence[Call] = ()
) -> list[str]:
    gradients = cell.gradients
    results = [node for nodes in gradients.values() for node in nodes]
    lines = backward_values(cell, saved, [*results, *cell.fed], names, calls)
    for target, argument in (
        ("grads.x", "x"),
        ("grads.r", "r"),
        ("grads.parameters", "p"),
        ("grad_states", "s"),
    ):
        lines += [f"{target}[{i}] = {names(node)};" for i, node in enumerate(gradients[argument])]
    if cell.reads_h:
        lines.append(f"grads.h = {names(gradients['h'][0])};")
    return lines + [f"grads.fed[{i}] = {names(node)};" for i, node in enumerate(cell.fed)]


def by_stage(stages: Sequence[list[str]]) -> list[str]:
    """Statements, those of each stage in a branch of its own."""
    lines = []
    for stage, of_stage in enumerate(stages):
        lines += [f"{'} else ' if stage else ''}if constexpr (kStage == {stage}) {{"]
        lines += [f"  {line}" for line in of_stage]
    return [*lines, "}"]


def stages_text(
    cell: CellNodes, saved: Sequence[Saved], count: int, places: dict[Node, str], in_backward: dict[Node, str]
) -> str:
    """What the struct of a cell with further products has besides."""
    if not cell.products:
        return ""
    feed = []
    for values in cell.stages:
        names = Names(places, in_packs=True)
        lines = forward_values(cell, values, names)
        feed.append([*lines, *(f"fed[{cell.fed.index(x)}] = {names(x)};" for x in values)])
    feed_back = []
    for products in cell.back_stages:
        names = Names(in_backward, in_packs=True)
        lines = backward_values(cell, saved, [x.gradient for x in products], names)
        results = (f"grad_products[{cell.products.index(x)}] = {names(x.gradient)};" for x in products)
        feed_back.append([*lines, *results])
    stage_of = [next(x.stage for x in cell.products if x.value is value) for value in cell.fed]
    forward, backward = cell.calls, cell.back_calls([node for x in saved for node in x.nodes])
    of_h = len(cell.products) - sum(len(call.products) for call in forward)
    called = {node for call in forward for node in call.results}
    called_back = {node for call in backward for node in call.results}
    at_once = {node: place for node, place in places.items() if node not in called}
    back_at_once = {node: place for node, place in in_backward.items() if node not in called_back}

    def described(calls: Sequence[Call]) -> str:
        first = [cell.products.index(call.products[0]) for call in calls]
        sizes = [f"{call.inputs}, {call.outputs}" for call in calls]
        return chosen([f"OwnCall{{{i}, {size}}}" for i, size in zip(first, sizes, strict=True)])

    return STAGES.format(
        products=len(cell.products),
        fed=len(cell.fed),
        blocks=len(cell.leaves["w"]),
        block_of=chosen([x.block for x in cell.products]),
        of_h=of_h,
        calls=len(forward),
        back_calls=len(backward),
        called=described(forward),
        called_back=described(backward),
        forward=indented(forward_text(cell, saved, Names(at_once, in_packs=True), forward)),
        backward=indented(backward_text(cell, saved, Names(back_at_once, in_packs=True), backward)),
        stages=chosen(stage_of),
        back_stages=chosen([x.back_stage for x in cell.products]),
        state_array=max(len(cell.leaves["s"]), 1),
        saved_array=max(count, 1),
        feed=indented(by_stage(feed)),
        feed_back=indented(by_stage(feed_back)),
    ).rstrip()


def outputs_text(states: Sequence[int]) -> str:
    if len(states) == 1:
        return f"static constexpr int kOutputState = {states[0]};"
    count = f"static constexpr int kOutputs = {len(states)};"
    return f"{count}\n  LLTM_HOST_DEVICE static constexpr int output_at(int i) {{ return {chosen(states)}; }}"


def saved_states_text(cell: CellNodes, nodes: Sequence[Node], wide: Collection[Node]) -> str:
    """What the struct has besides if the whole cell is affine and saves nothing but old states."""
    states = list(cell.leaves["s"])
    live = [*cell.leaves["h"], *states] if cell.reads_h else states
    only_states = not wide and set(nodes) <= set(states)
    if not only_states or not are_affine_together(live, cell.outputs, cell.declaration.recurrent):
        return ""
    return SAVED_STATES.format(states=chosen([*map(states.index, nodes), -1]))


def chosen(values: Sequence[int | str]) -> str:
    """The C++ expression of the i-th of the values."""
    last = str(values[-1]) if values else "{}"
    return "".join(f"i == {i} ? {x} : " for i, x in enumerate(values[:-1])) + last


class Struct(NamedTuple):
    """A cell's struct in C++."""

    source: str
    saved: int  # how many numbers its forward saves
    wide_projections: bool = False  # whether the projections of half types are in float32
    instructions: tuple[str, ...] = ()  # forward and backward for the CPU; none of a cell given in C++


def emit(
    cell: CellNodes, nodes: Sequence[Node], wide: Collection[Node], wide_projections: bool = False
) -> Struct:
    """The cell's struct. It depends only on the function and its declaration.

    Args:
        nodes: what the forward saves.
        wide: which of them take two numbers.
        wide_projections: as in :class:`Struct`.
    """
    declared, leaves = cell.declaration, cell.leaves
    saved, count = saved_numbers(nodes, wide)
    in_packs = cell.over_units or bool(cell.products)
    inputs = {"x": "in.x", "r": "in.r", "p": "in.parameters", "u": "in.steps"}
    places = {leaves["h"][0]: "in.h", cell.cotangents[0]: "grad_h"}
    for i, product in enumerate(cell.products):
        places[product.node] = places[product.back] = f"in.products[{i}]"
    for argument, array in inputs.items():
        places |= {node: f"{array}[{i}]" for i, node in enumerate(leaves[argument])}
    in_backward = {node: place for node, place in places.items() if node not in nodes}
    results = [node for of_argument in cell.gradients.values() for node in of_argument]
    known = [*nodes, *(product.back for product in cell.products)]
    results += [x for product in cell.products for x in (product.value, product.gradient)]
    read = set(ancestors(results, known)) - set(nodes)
    for k, (state, cotangent) in enumerate(zip(leaves["s"], cell.cotangents[1:], strict=True)):
        places[state] = in_backward[state] = f"s{k}"
        in_backward[cotangent] = f"grad_s{k}"
    for leaf in nodes:
        if leaf.op == LEAF and leaf not in leaves["s"]:
            in_backward[leaf] = re.sub(r"\W+", "", places[leaf].removeprefix("in."))
    return struct_of(
        declared,
        "derived from its Python function",
        tuple(map(repr, nodes)),
        count,
        cell.reads_h,
        forward_text(cell, saved, Names(places, in_packs)),
        backward_text(cell, saved, Names(in_backward, in_packs)),
        wide_projections,
        [g for g, node in enumerate(leaves["x"]) if node in read],
        leaves["h"][0] in read,
        HAS_OVER_UNITS * cell.over_units
        + stages_text(cell, saved, count, places, in_backward)
        + saved_states_text(cell, nodes, wide),
    )


def struct_of(
    declared: Declaration,
    origin: str,
    saved: Sequence[str],
    saves: int,
    reads_h: bool,
    forward: list[str],
    backward: list[str],
    wide_projections: bool = False,
    backward_reads: Sequence[int] = (),
    backward_reads_h: bool = False,
    others: str = "",
) -> Struct:
    """Writes the struct with the lines of its two functions. `saved` describes the `saves` numbers."""
    source = STRUCT.format(
        name=re.sub(r"[^ -~]|\\", "?", declared.name),  # goes into a comment, whose line must end here
        origin=origin,
        saved=", ".join(saved) or "nothing",
        gates=declared.gates,
        states=len(declared.states),
        parameters=len(declared.parameters),
        inputs=len(declared.inputs),
        saves=saves,
        recurrent=flag(declared.recurrent),
        separate=flag(declared.separate),
        reads_h=flag(reads_h),
        outputs=outputs_text(declared.output_states),
        wide=flag(wide_projections),
        backward_reads=" || ".join(f"gate == {g}" for g in backward_reads) or "false",
        backward_reads_h=flag(backward_reads_h),
        others=others,
        state_array=max(len(declared.states), 1),
        saved_array=max(saves, 1),
        forward=indented(forward),
        backward=indented(backward),
    )
    return Struct(source, saves, wide_projections)


def indented(lines: list[str]) -> str:
    return "\n".join(line if line.startswith("#") else f"    {line}" for line in lines)


def flag(value: bool) -> str:
    return "true" if value else "false"
