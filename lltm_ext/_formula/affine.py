"""Whether the new states of a cell are affine in its old ones, so that its steps are a scan over time.

The new states are A times the old ones plus b, where A and b read no state: what is computed from x,
parameters and inputs of the step alone may be any function. Only states that a step hands on to themselves
count, maybe by way of others: h may be any function of the new states if no step reads it. States that depend
on each other mix in one A, which is a component. A component may read those before it as it likes: theirs is
a scan of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from lltm_ext._formula.graph import Node, ancestors, where

MOST_STATES = 4  # that mix: a product of two A of n states takes n^3 multiplications


class Component(NamedTuple):
    """States that depend on each other: new = coefficients @ old + rests."""

    states: tuple[int, ...]  # 0 is h, and the other states follow
    coefficients: tuple[tuple[Node, ...], ...]  # a row for each new state
    rests: tuple[Node, ...]


class Sum(NamedTuple):
    """A value as the sum of coefficient * state, and a rest without states."""

    coefficients: dict[Node, Node]
    rest: Node


class NotAffineError(Exception):
    pass


def affine(
    leaves: Mapping[str, Sequence[Node]], outputs: Sequence[Node], recurrent: bool
) -> tuple[Component, ...]:
    """The components of a cell in an order in which they can be computed; none if it is not affine.

    Args:
        leaves, outputs: as :class:`~lltm_ext._formula.derive.Derived` has them.
        recurrent: whether x contains a product with h. It mixes all units, so such a cell is not affine.
    """
    old = [*leaves["h"], *leaves["s"]]
    try:
        components = [] if recurrent else cycles(old, outputs)
        return tuple(component_of(states, old, outputs) for states in components)
    except NotAffineError:
        return ()


def are_affine_together(states: Sequence[Node], outputs: Sequence[Node], recurrent: bool) -> bool:
    """Whether the new states are affine in all of the old ones at once, so that steps in a row are one map.

    Components can be affine each by itself without this: one may read an earlier one in any way.
    """
    try:
        if states:
            sums_of(outputs, states)
    except NotAffineError:
        return False
    return not recurrent


def cycles(old: Sequence[Node], outputs: Sequence[Node]) -> list[tuple[int, ...]]:
    """The states that depend on themselves: those of one cycle together, after what they read."""
    count = range(len(old))
    reads = [{j for j in count if old[j] in ancestors([output])} for output in outputs]
    for k in count:  # by way of other states
        for i in count:
            reads[i] |= reads[k] if k in reads[i] else set()
    groups = {tuple(j for j in count if j in reads[i] and i in reads[j]) for i in count if i in reads[i]}
    return sorted(groups, key=lambda states: (len(reads[states[0]]), states))


def component_of(states: tuple[int, ...], old: Sequence[Node], outputs: Sequence[Node]) -> Component:
    if len(states) > MOST_STATES:
        raise NotAffineError
    sums = sums_of([outputs[i] for i in states], [old[i] for i in states])
    zero = old[0].graph.constant(0.0)
    rows = (tuple(x.coefficients.get(old[j], zero) for j in states) for x in sums)
    return Component(states, tuple(rows), tuple(x.rest for x in sums))


def sums_of(targets: Sequence[Node], states: Sequence[Node]) -> list[Sum]:
    """The targets as sums of states. All other leaves count as values without states."""
    graph = targets[0].graph
    zero, one = graph.constant(0.0), graph.constant(1.0)
    found = {state: Sum({state: one}, zero) for state in states}
    for node in ancestors(targets):
        args = [found[x] for x in node.args]
        if node not in found:
            is_free = not any(x.coefficients for x in args)
            found[node] = Sum({}, node) if is_free else sum_of(node, args, zero)
    return [found[x] for x in targets]


def sum_of(node: Node, args: Sequence[Sum], zero: Node) -> Sum:
    """A node that reads states, as a sum."""
    free = [not x.coefficients for x in args]
    if node.op == "neg":
        return scaled(args[0], lambda x: -x)
    if node.op == "add":
        return added(*args)
    if node.op == "sub":
        return added(args[0], scaled(args[1], lambda x: -x))
    if node.op == "mul" and any(free):
        state, factor = args if free[1] else reversed(args)
        return scaled(state, lambda x: x * factor.rest)
    if node.op == "div" and free[1]:
        return scaled(args[0], lambda x: x / args[1].rest)
    if node.op == "where" and free[0]:
        condition, a, b = args
        chosen = {
            state: where(condition.rest, a.coefficients.get(state, zero), b.coefficients.get(state, zero))
            for state in (*a.coefficients, *b.coefficients)
        }
        return Sum(chosen, where(condition.rest, a.rest, b.rest))
    raise NotAffineError


def scaled(x: Sum, by: Callable[[Node], Node]) -> Sum:
    rest = x.rest if x.rest.is_constant(0) else by(x.rest)
    return Sum({state: by(coefficient) for state, coefficient in x.coefficients.items()}, rest)


def added(a: Sum, b: Sum) -> Sum:
    both = dict(a.coefficients)
    for state, coefficient in b.coefficients.items():
        both[state] = both[state] + coefficient if state in both else coefficient
    return Sum(both, b.rest + a.rest if a.rest.is_constant(0) else a.rest + b.rest)
