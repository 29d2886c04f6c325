"""Turns a recurrent cell's Python function into C++: capture, derivative, what to save for backward, text.

declaration.py is what the user declares. capture.py records the function as nodes (graph.py, with the
table of ops), this file differentiates them and chooses what the forward saves, emit.py writes C++.

The derivative is that of the nodes, by the table, and not torch.func.vjp of the function. Autograd's formulas
would have to be captured too; their ops and decompositions differ between versions of torch. And the table
can take a derivative from the output (1 - t * t), where one saved value serves both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lltm_ext._formula.affine import affine, are_affine_together
from lltm_ext._formula.bounds import is_bounded
from lltm_ext._formula.capture import Captured, capture
from lltm_ext._formula.declaration import Declaration
from lltm_ext._formula.emit import EXCHANGES, CellNodes, Product, Struct, emit, saved_numbers
from lltm_ext._formula.graph import (
    CHEAP,
    CONSTANT,
    DECISION,
    LEAF,
    NEVER,
    OPS,
    OVER_UNITS,
    SAVED,
    Node,
    Tape,
    ancestors,
    for_kernels,
    levels,
)
from lltm_ext._formula.instructions import backward_instructions, forward_instructions

DIFFERENTIABLE = ("x", "r", "h", "s", "p")


def dependents(nodes: Iterable[Node], sources: Iterable[Node], through: Callable[[Node], bool]) -> set[Node]:
    """The sources, and which of the nodes are computed from them by nodes that `through` accepts."""
    found = set(sources)
    for node in sorted(nodes, key=lambda node: node.index):
        if through(node) and not found.isdisjoint(node.args):
            found.add(node)
    return found


def differentiate(
    outputs: Sequence[Node], cotangents: Sequence[Node], leaves: Iterable[Node]
) -> dict[Node, Node]:
    """The gradients of sum(output * cotangent) by the leaves that it depends on, in reverse mode."""
    nodes = ancestors(outputs)
    active = dependents(nodes, leaves, lambda node: node.op in OPS and OPS[node.op].gradient is not None)
    gradients: dict[Node, Node] = {}

    def add(node: Node, gradient: Node) -> None:
        gradients[node] = gradients[node] + gradient if node in gradients else gradient

    for output, cotangent in zip(outputs, cotangents, strict=True):
        if output in active:
            add(output, cotangent)
    for node in reversed(nodes):
        rule = OPS[node.op].gradient if node.op in OPS else None
        if node in gradients and rule:
            for arg, gradient in zip(node.args, rule(gradients[node], node, *node.args), strict=True):
                if gradient is not None and arg in active:
                    add(arg, gradient)
    return gradients


def choose_saved(gradients: Iterable[Node], cotangents: Iterable[Node], free: Iterable[Node]) -> list[Node]:
    """What the forward saves: the cheapest set of values from which backward can compute all that it needs.

    A saved value costs SAVED, or DECISION if it is true or false, because several share one. An op that
    backward computes again costs OPS[op].cost. The cheapest set is a minimum cut. A value is an edge from its
    "in" to its "out" of the capacity that saving it costs. From "out" edges lead to the "in" of the ops that
    read it. The source leads to the "in" of an op with the op's cost, and to that of a value that only the
    forward has with NEVER.
    """
    live = ancestors(gradients)
    changing = dependents(live, cotangents, lambda node: True)  # with the cotangents; only backward has them
    fixed = [node for node in live if node not in changing]
    read = {arg for node in changing for arg in node.args} | set(gradients)
    # A divisor with a rounding error from a cancelled sum would blow up the gradient: it is saved itself.
    divisors = {node.args[1] for node in changing if node.op == "div"}
    exact = [node for node in fixed if node.op == CONSTANT or node in set(free)]
    for node in fixed:
        # Kernels may fuse a product and a sum in different ways, which near a jump decides a comparison.
        known = exact if not node.is_step else [x for x in exact if not x.args or x.is_step]
        if node.args and node.op != "product" and all(arg in known for arg in node.args):
            exact.append(node)

    flow = Flow()
    for node in fixed:
        if node in exact:
            continue
        place, result = ("in", node.index), ("out", node.index)
        if node.op == LEAF or node in divisors:
            cost = NEVER
        elif node.op == "div" and node.args[1] in exact:
            cost = CHEAP  # keeps the relative error
        else:
            cost = OPS[node.op].cost
        flow.add("source", place, cost)
        flow.add(place, result, DECISION if node.boolean else SAVED)
        if node in read:
            flow.add(result, "sink", NEVER)
        for arg in node.args:
            if arg not in exact:
                flow.add(("out", arg.index), place, NEVER)
    before = flow.source_side()
    chosen = [node for node in fixed if ("in", node.index) in before and ("out", node.index) not in before]
    return sorted(chosen, key=lambda node: (node.op == LEAF, node.index))


def errors_cancel(
    saved: Iterable[Node], results: Iterable[Node], leaves: Mapping[str, Iterable[Node]]
) -> tuple[Node, ...]:
    """Which saved values half types would round too coarsely.

    In y = a / b the gradients of a and b grow like 1 and -y. Where both depend on one value, as in a weighted
    mean or x / (1 + |x|), a large part of them cancels. What is left is as small as the rounding errors of y
    and, if a and b are states, of these.
    """
    nodes = ancestors(results)
    carried, varying = (
        dependents(nodes, (x for k in sources for x in leaves[k]), lambda node: not node.boolean)
        for sources in ("s", "xrhs")
    )
    quotients = {x for x in varying if x.op in ("div", "reciprocal", "rsqrt") and x.args[-1] in varying}
    of_states = any(x.args[-1] in carried for x in quotients)
    return tuple(x for x in saved if x in quotients or (of_states and x in carried and x.op == LEAF))


def jumps(outputs: Iterable[Node], leaves: Mapping[str, Iterable[Node]]) -> bool:
    """Whether comparisons choose among a unit's formulas, as `where`, relu and abs do.

    From projections that are rounded to a half type they choose otherwise now and then, and all later steps
    follow. Only a choice of the largest of two values, as in a logarithm of a sum, hardly changes then.
    """
    sources = (x for k in "xrhs" for x in leaves[k])
    nodes = ancestors(outputs)
    varying = dependents(nodes, sources, lambda node: True)

    def chooses(node: Node) -> bool:
        if node.op in ("maximum", "minimum"):
            return any(x not in varying for x in node.args)
        return node.is_step or node.op in ("relu", "abs")

    return any(chooses(node) for node in nodes if node in varying)


class Flow:
    """A network, for a minimum cut between "source" and "sink" (Edmonds and Karp)."""

    def __init__(self) -> None:
        self._capacity: dict[Any, dict[Any, int]] = {"source": {}, "sink": {}}

    def add(self, a: Any, b: Any, capacity: int) -> None:
        self._capacity.setdefault(a, {})[b] = capacity
        self._capacity.setdefault(b, {}).setdefault(a, 0)

    def _search(self) -> dict[Any, Any]:
        """Returns each place that the source still reaches, with the place before it on a shortest path."""
        before: dict[Any, Any] = {"source": None}
        queue = deque(["source"])
        while queue:
            a = queue.popleft()
            for b, capacity in self._capacity[a].items():
                if capacity > 0 and b not in before:
                    before[b] = a
                    queue.append(b)
        return before

    def source_side(self) -> set[Any]:
        """Finds the source's side of the minimum cut. The capacities become what a maximum flow leaves."""
        while "sink" in (before := self._search()):
            path = ["sink"]
            while path[-1] != "source":
                path.append(before[path[-1]])
            edges = list(zip(path[1:], path, strict=False))
            amount = min(self._capacity[a][b] for a, b in edges)
            for a, b in edges:
                self._capacity[a][b] -= amount
                self._capacity[b][a] += amount
        return set(before)


def products_of(
    outputs: Sequence[Node], gradients: Mapping[Node, Node], weights: Sequence[Node], h: Node
) -> tuple[Product, ...]:
    """The products of a step besides that with h, in the order in which the forward computes them.

    Those of h itself come first, and those of one value one after the other.

    Args:
        outputs: as captured.
        gradients: by the nodes of which they are, without what serves gradients only.
    """
    captured = [node for node in ancestors(outputs) if node.op == "product"]
    nodes, zero = for_kernels(captured), outputs[0].graph.constant(0.0)
    found = [gradients.get(node, zero) for node in captured]  # two of equal values may differ in them
    forward, backward = levels(nodes, ["product"]), levels(found, ["product_back"])
    products = [
        Product(node, weights.index(node.args[0]), gradient, forward[node] - 1, backward[gradient])
        for node, gradient in zip(nodes, found, strict=True)
    ]
    waits = levels(nodes, EXCHANGES)

    def order(x: Product) -> tuple[int, bool, int, int]:
        return waits[x.value], x.value is not h, x.value.index, x.block

    return tuple(sorted(products, key=order))


class Derived:
    """A cell as nodes: forward, backward, what is saved between them.

    Attributes:
        declaration: the declaration that was given.
        leaves: the nodes of x, r, h, s, p, u and w.
        products: the products of a step besides that with h.
        over_units: whether something else of the cell is computed over all units of a row.
        outputs: the nodes of the new h and the new states.
        cotangents: the nodes of their gradients.
        gradients: the nodes of the gradients of x, r, h, s and p; a constant 0 where there is none.
        saved: the nodes that forward saves.
        wide: those of them that keep the precision of float32 in half types.
        jumps: whether comparisons choose among its formulas.
        struct: the C++ struct.
        half_struct: that for half types, which differs if ``wide`` has nodes or the cell ``jumps``.
        affine: the components of the states, if the new ones are affine in the old ones; else none.
        runs_in_parallel: whether kernels run segments of steps of its forward in parallel.
        bounded: whether h is at most 1 in size after every step, or NaN.
    """

    def __init__(self, captured: Captured, declaration: Declaration):
        self.declaration = declaration
        self.graph, self.leaves, self._captured = captured
        self.cotangents = [self.graph.leaf(f"grad_{name}") for name in ("h", *declaration.states)]
        inputs = [node for argument in (*DIFFERENTIABLE, "w") for node in self.leaves[argument]]
        found = differentiate(self._captured, self.cotangents, inputs)
        found = dict(zip(found, for_kernels(list(found.values())), strict=True))
        self.outputs = for_kernels(self._captured)
        zero = self.graph.constant(0.0)
        self.gradients = {
            argument: [found.get(node, zero) for node in self.leaves[argument]] for argument in DIFFERENTIABLE
        }
        self.products = products_of(self._captured, found, self.leaves["w"], *self.leaves["h"])
        self._results = [node for nodes in self.gradients.values() for node in nodes]
        self._results += [x for product in self.products for x in (product.value, product.gradient)]
        self.over_units = any(node.op in OVER_UNITS for node in ancestors([*self.outputs, *self._results]))
        self._nodes = CellNodes(
            declaration,
            self.leaves,
            self.outputs,
            self.cotangents,
            self.gradients,
            self.reads_h,
            self.over_units,
            self.products,
        )
        self.saved, self.wide = self._choose_saved()
        self.struct = self._emit(self.saved)
        self.jumps = jumps(self.outputs, self.leaves)
        self.half_struct = self.struct
        if self.wide or self.jumps:
            self.half_struct = self._emit(self.saved, self.wide, self.jumps)
        self._known = [node for nodes in self.leaves.values() for node in nodes]
        self._step = Tape(self._captured, self._known)
        self.affine = affine(self.leaves, self.outputs, declaration.recurrent)
        h = slice(0 if self.reads_h else 1, None)
        live = [*self.leaves["h"], *self.leaves["s"]][h]
        self.runs_in_parallel = are_affine_together(live, self.outputs[h], declaration.recurrent)
        self.bounded = is_bounded(self.outputs[0])

    def with_inputs_as_gates(self) -> Derived:
        """The cell that reads the inputs of its steps as further gates, and so has gradients of them.

        The product with h does not reach these gates.
        """
        declared, inputs = self.declaration, self.leaves["u"]
        leaves = self.leaves | {"x": [*self.leaves["x"], *inputs], "u": []}
        if declared.separate:
            leaves["r"] = [*leaves["r"], *(self.graph.leaf(f"r of {u!r}") for u in inputs)]
        declared = declared._replace(gates=declared.gates + len(inputs), inputs=())
        return Derived(Captured(self.graph, leaves, self._captured), declared)

    def _choose_saved(self) -> tuple[list[Node], tuple[Node, ...]]:
        """What the forward saves, and which values of it half types would round too coarsely."""
        free = [node for argument in self._nodes.free + "w" for node in self.leaves[argument]]
        if self.declaration.recurrent:
            saved = choose_saved(self._results, self.cotangents, free)
            return saved, errors_cancel(saved, [*self.outputs, *saved], self.leaves)
        # The backward computes everything again: from what the forward read, and with its decisions.
        states = self.leaves["s"]
        decisions = choose_saved(self._results, self.cotangents, [*free, *states])
        live = ancestors(self._results, decisions)
        read = tuple(s for s in states if s in live)
        of_states = dependents(live, read, lambda node: not node.boolean)
        coarse = any(node.op in OPS and OPS[node.op].cost == NEVER for node in of_states)
        return [*decisions, *read], read if coarse else ()

    def _emit(self, saved: Sequence[Node], wide: Sequence[Node] = (), jumps: bool = False) -> Struct:
        numbers, _ = saved_numbers(saved, wide)
        both = forward_instructions(self._nodes, numbers), backward_instructions(self._nodes, numbers)
        return emit(self._nodes, saved, wide, jumps)._replace(instructions=both)

    @property
    def fed(self) -> list[Node]:
        """The values that products take, each once."""
        return self._nodes.fed

    def sizes_of_calls(self, without: Collection[int] = ()) -> tuple[int, int, int, int]:
        """Of whole steps: products of h, most outputs of a call, most inputs and outputs of a back call.

        Args:
            without: blocks of weights. Calls that multiply no others do not count.
        """
        forward, backward = self._nodes.calls, self._nodes.back_calls(self.saved)
        of_h = len(self.products) - sum(len(call.products) for call in forward)
        counted, counted_back = (
            [call for call in calls if any(x.block not in without for x in call.products)]
            for calls in (forward, backward)
        )
        return (
            of_h,
            max((call.outputs for call in counted), default=0),
            max((call.inputs for call in counted_back), default=0),
            max((call.outputs for call in counted_back), default=0),
        )

    @property
    def saved_names(self) -> tuple[str, ...]:
        """What forward saves, in the user's names."""
        return tuple(map(repr, self.saved))

    @property
    def reads_h(self) -> bool:
        """Whether the cell uses the previous h, besides in its product."""
        return self.leaves["h"][0] in ancestors([*self.outputs, *self._results])

    @property
    def zeros_stay(self) -> bool:
        """Whether a unit stays zero whose inputs, states and parameters are, and so do its gradients."""
        if self.over_units or self.products:
            return False
        zero = torch.zeros((), dtype=torch.float64, device="cpu")
        values = {argument: [zero] * len(nodes) for argument, nodes in self.leaves.items()}
        outputs, saved = self.forward(values)
        gradients = self.backward(saved, values, [zero] * len(outputs))
        found = [*outputs, *(x for of_argument in gradients.values() for x in of_argument)]
        return not any(x.any() for x in found)  # NaN is not zero

    @property
    def forward_ops(self) -> int:
        return count_ops(ancestors([*self.outputs, *self.saved]))

    @property
    def backward_ops(self) -> int:
        return count_ops(set(ancestors(self._results, self.saved)) - set(self.saved))

    def step_like(self, x: Tensor) -> Callable[[Mapping[str, Sequence[Tensor]]], list[Tensor]]:
        """The function that computes [new h, *new states] of whole tensors for x, r, h, s, p and u.

        Args:
            x: any of the tensors: the cell's numbers get its dtype and device.
        """
        constants, arguments = self._step.constants(x), [k for k, nodes in self.leaves.items() if nodes]

        def step(values: Mapping[str, Sequence[Tensor]]) -> list[Tensor]:
            if values["u"] and (self.over_units or self.products):  # a row's one number is that of all units
                values = {**values, "u": [u.expand_as(values["h"][0]) for u in values["u"]]}
            return self._step.run([x for argument in arguments for x in values[argument]], constants)

        return step

    def forward(self, values: Mapping[str, Sequence[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
        """Returns ([new h, *new states], saved) of whole tensors x, r, h, s, p, u, by torch's functions."""
        known = [x for argument, nodes in self.leaves.items() if nodes for x in values[argument]]
        results = run([*self.outputs, *self.saved], self._known, known)
        return results[: len(self.outputs)], results[len(self.outputs) :]

    def backward(
        self, saved: Sequence[Tensor], values: Mapping[str, Sequence[Tensor]], grads: Sequence[Tensor]
    ) -> dict[str, list[Tensor]]:
        """Returns the gradients of x, r, h, s and p, those of p not summed over the batch. `values` has p, u
        and, without a product, x and h; the other arguments are what forward saved, and the gradients of the
        new h and the new states.
        """
        free = {
            node: x
            for k in self._nodes.free + "w"
            for node, x in zip(self.leaves[k], values.get(k, ()), strict=True)
        }
        known = free | dict(zip((*self.saved, *self.cotangents), (*saved, *grads), strict=True))
        targets = [node for nodes in self.gradients.values() for node in nodes]
        results = iter(run(targets, list(known), list(known.values())))
        return {argument: [next(results) for _ in nodes] for argument, nodes in self.gradients.items()}


def run(targets: Sequence[Node], known: Sequence[Node], values: Sequence[Tensor]) -> list[Tensor]:
    """Computes the targets. Their numbers get the dtype and the device of the last value."""
    tape = Tape(targets, known)
    return tape.run(values, tape.constants(values[-1]))


def count_ops(nodes: Iterable[Node]) -> int:
    return sum(node.op not in (LEAF, CONSTANT) for node in nodes)


def derive(function: Callable[..., Any], declaration: Declaration) -> Derived:
    """Derives a cell from its function of any of x, r, h, s, p and u (see lltm_ext.recurrence).

    Raises:
        TypeError, ValueError, RuntimeError, IndexError, AttributeError: for what cannot be a cell, with the
            cell's name, the reason, and the line of the user's text.
    """
    return Derived(capture(function, declaration), declaration)
