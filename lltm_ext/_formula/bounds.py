"""The range of a value, whatever a step reads: kernels may exchange an h of known size in fewer bytes."""

from __future__ import annotations

import math
from itertools import product

from lltm_ext._formula.graph import CONSTANT, Node, ancestors

Range = tuple[float, float]

ANY: Range = (-math.inf, math.inf)
RANGES: dict[str, Range] = {
    "sigmoid": (0, 1),
    "tanh": (-1, 1),
    "sin": (-1, 1),
    "cos": (-1, 1),
    "erf": (-1, 1),
}


def is_bounded(target: Node) -> bool:
    """Whether a value is at most 1 in size, or NaN."""
    ranges: dict[Node, Range] = {}
    for node in ancestors([target]):
        ranges[node] = range_of(node, [ranges[x] for x in node.args])
    return max(map(abs, ranges[target])) <= 1


def range_of(node: Node, args: list[Range]) -> Range:
    if node.op == CONSTANT:
        return float(node.value), float(node.value)
    if node.boolean:
        return 0, 1
    if node.op == "neg":
        return -args[0][1], -args[0][0]
    if node.op in ("detach", "where"):  # a condition comes first
        return min(low for low, _ in args[-2:]), max(high for _, high in args[-2:])
    if node.op == "add":
        return args[0][0] + args[1][0], args[0][1] + args[1][1]
    if node.op == "sub":
        return args[0][0] - args[1][1], args[0][1] - args[1][0]
    if node.op == "mul" and all(math.isfinite(x) for ends in args for x in ends):
        ends = [x * y for x, y in product(*args)]
        return min(ends), max(ends)
    return RANGES.get(node.op, ANY)
