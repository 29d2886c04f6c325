"""The formulas of a derived cell as instructions, which the CPU interprets (src/custom_cell/formula.h).

A list is a text of words. Each word is a value, numbered from 0: a leaf, a number (``=0.5``), or an op with
the numbers of its arguments (``add,3,4``). The leaves of the forward are those of a cell's function
(``x0``, ``r0``, ``h0``, ``s0``, ``p0``, ``u0``), those of the backward the saved numbers (``v0``), the
gradients of h (``g0``) and of the states (``d0``), and again ``p0`` and ``u0``. After the word ``>`` come
the results, each with the number of its value: of the forward ``h0``, the states and the saved numbers, of
the backward the gradients of the leaves of the forward.

A cell with further products has a list for each stage that ends in products, before the last one. Its results
are what the products take (``f0``), and later lists have the products among their leaves (``q0``): forward
those with values, backward those of gradients with transposed weights. The last list of the backward also has
the values again (``z0``), for the gradients of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lltm_ext._formula.emit import CellNodes, Product, Saved
from lltm_ext._formula.graph import CONSTANT, Node, ancestors

STAGE = " | "


class Instructions:
    """A list under construction."""

    def __init__(self, leaves: Mapping[Node, str]):
        self._leaves = leaves
        self._words: dict[str, int] = {}
        self._places: dict[Node, int] = {}

    def add(self, *word: object) -> int:
        return self._words.setdefault(",".join(map(str, word)), len(self._words))

    def define(self, node: Node, place: int) -> None:
        self._places[node] = place

    def compute(self, targets: Iterable[Node]) -> None:
        for node in ancestors(targets, {**self._places, **self._leaves}):
            if node not in self._places:
                self.define(node, self._add(node))

    def _add(self, node: Node) -> int:
        if node in self._leaves:
            return self.add(self._leaves[node])
        if node.op == CONSTANT:
            return self.add(f"={float(node.value)!r}")
        places = [self._places[arg] for arg in node.args]
        return places[0] if node.op == "detach" else self.add(node.op, *places)

    def place(self, node: Node) -> int:
        return self._places[node]

    def text(self, results: Iterable[tuple[str, int]]) -> str:
        return " ".join([*self._words, ">", *(f"{name},{place}" for name, place in results)])


def forward_instructions(cell: CellNodes, saved: Sequence[Saved]) -> str:
    """The lists of the stages that end in products, and that of the rest."""
    return STAGE.join(
        [*(forward_stage(cell, values) for values in cell.stages), forward_of_results(cell, saved)]
    )


def backward_instructions(cell: CellNodes, saved: Sequence[Saved]) -> str:
    stages = (backward_stage(cell, saved, products) for products in cell.back_stages)
    return STAGE.join([*stages, backward_of_results(cell, saved)])


def forward_code(cell: CellNodes) -> Instructions:
    leaves = {node: f"{k}{i}" for k, nodes in cell.leaves.items() for i, node in enumerate(nodes)}
    return Instructions(leaves | {product.node: f"q{i}" for i, product in enumerate(cell.products)})


def forward_stage(cell: CellNodes, values: Sequence[Node]) -> str:
    code = forward_code(cell)
    code.compute(values)
    return code.text((f"f{cell.fed.index(x)}", code.place(x)) for x in values)


def forward_of_results(cell: CellNodes, saved: Sequence[Saved]) -> str:
    code = forward_code(cell)
    code.compute([*cell.outputs, *(node for x in saved for node in x.nodes)])
    results = [(f"s{i - 1}" if i else "h0", code.place(node)) for i, node in enumerate(cell.outputs)]
    for x in saved:
        place = code.place(x.nodes[0])
        for k, node in enumerate(x.nodes[1:], 1):  # decisions share a number, each has a bit
            bit = code.add("mul", code.place(node), code.add(f"={float(1 << k)}"))
            place = code.add("add", place, bit)
        results.append((f"v{x.first}", place))
    return code.text(results)


def backward_code(cell: CellNodes, saved: Sequence[Saved]) -> Instructions:
    leaves = {node: f"{k}{i}" for k in cell.free for i, node in enumerate(cell.leaves[k])}
    leaves |= {node: f"d{i - 1}" if i else "g0" for i, node in enumerate(cell.cotangents)}
    leaves |= {product.back: f"q{i}" for i, product in enumerate(cell.products)}
    code = Instructions(leaves)
    for x in saved:
        number = code.add(f"v{x.first}")
        for k, node in enumerate(x.nodes):
            code.define(node, code.add("bit", number, k) if len(x.nodes) > 1 else number)
    return code


def backward_stage(cell: CellNodes, saved: Sequence[Saved], products: Sequence[Product]) -> str:
    code = backward_code(cell, saved)
    code.compute(product.gradient for product in products)
    return code.text((f"f{cell.products.index(x)}", code.place(x.gradient)) for x in products)


def backward_of_results(cell: CellNodes, saved: Sequence[Saved]) -> str:
    code, fed = backward_code(cell, saved), cell.fed
    code.compute([*(node for nodes in cell.gradients.values() for node in nodes), *fed])
    gradients = [(f"{k}{i}", node) for k, nodes in cell.gradients.items() for i, node in enumerate(nodes)]
    values = [(f"z{i}", node) for i, node in enumerate(fed)]
    return code.text((name, code.place(node)) for name, node in [*gradients, *values])


def rounding(forward: str, dtype: str) -> str:
    """The lists of a forward that rounds its new h to a dtype."""
    before, stage, last = forward.rpartition(STAGE)
    words, _, results = last.partition(" > ")
    places = dict(result.split(",") for result in results.split())
    rounded = places | {"h0": str(len(words.split()))}
    results = " ".join(map(",".join, rounded.items()))
    return f"{before}{stage}{words} {dtype},{places['h0']} > {results}"
