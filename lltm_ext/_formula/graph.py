"""The expressions of a recurrent cell: nodes, and the table of the ops that they may use."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Union

import torch
from torch import Tensor
from torch.nn import functional as F

from lltm_ext import _activations as activations

Operand = Union["Node", float]
LEAF, CONSTANT = "leaf", "constant"


class Node:
    """A value of one hidden unit: a leaf, a constant, or an op of other nodes. Operators make new nodes.

    Nodes are numbered in the order in which they are made, so their arguments have smaller numbers.
    """

    __slots__ = ("args", "graph", "index", "label", "op", "value")

    def __init__(self, graph: Graph, op: str, args: tuple[Node, ...], value: float, label: str):
        self.graph, self.op, self.args = graph, op, args
        self.value = value  # a constant's
        self.label = label  # the user's name: x[0], p.b_hn of a leaf; the variable of another node, or ""
        self.index = len(graph.nodes)

    @property
    def boolean(self) -> bool:
        if self.op in (LEAF, CONSTANT):
            return isinstance(self.value, bool)
        return OPS[self.op].boolean or (self.op in ("where", "detach") and self.args[-1].boolean)

    @property
    def is_step(self) -> bool:
        """Whether it jumps where its arguments hardly change."""
        return self.boolean or self.op in ("floor", "round", "fmod")

    def is_constant(self, value: float) -> bool:
        return self.op == CONSTANT and self.value == value

    def __add__(self, other: Operand) -> Node:
        return make("add", self, other)

    def __sub__(self, other: Operand) -> Node:
        return make("sub", self, other)

    def __rsub__(self, other: float) -> Node:
        return make("sub", other, self)

    def __mul__(self, other: Operand) -> Node:
        return make("mul", self, other)

    def __truediv__(self, other: Operand) -> Node:
        return make("div", self, other)

    def __rtruediv__(self, other: float) -> Node:
        return make("div", other, self)

    def __neg__(self) -> Node:
        return make("neg", self)

    def __abs__(self) -> Node:
        return make("abs", self)

    def __lt__(self, other: Operand) -> Node:
        return make("lt", self, other)

    def __le__(self, other: Operand) -> Node:
        return make("le", self, other)

    def __gt__(self, other: Operand) -> Node:
        return make("gt", self, other)

    def __ge__(self, other: Operand) -> Node:
        return make("ge", self, other)

    def __and__(self, other: Operand) -> Node:
        return make("and", self, other)

    __radd__, __rmul__ = __add__, __mul__

    def __repr__(self) -> str:
        """The expression in the user's names, down to three levels."""
        return self.expression(3)

    def expression(self, depth: int) -> str:
        if self.op == CONSTANT:
            return f"{self.value:g}"
        if self.label:
            return self.label
        args = [arg.expression(depth - 1) if depth > 1 else "..." for arg in self.args]
        text = OPS[self.op].text.replace("Math::", "").replace("in.", "")
        if text.startswith(("{", "-", "!")):  # an operator: its arguments may need parentheses
            args = [f"({arg})" if " " in arg and not arg.endswith(")") else arg for arg in args]
        return text.format(*args)


class Graph:
    """All nodes of a cell. Each expression occurs once."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._known: dict[object, Node] = {}

    def leaf(self, label: str) -> Node:
        return self._node(LEAF, (), 0.0, label)

    def constant(self, value: float) -> Node:
        return self._node(CONSTANT, (), value if isinstance(value, bool) else float(value))

    def _node(self, op: str, args: tuple[Node, ...], value: float = 0.0, label: str = "") -> Node:
        # repr tells -0.0 from 0.0, and NaN has the same as NaN.
        key = (op, label, repr(value), *(arg.index for arg in args))
        if key not in self._known:
            self._known[key] = Node(self, op, args, value, label)
            self.nodes.append(self._known[key])
        return self._known[key]

    def make(self, op: str, *operands: Operand) -> Node:
        """Makes the node of an op, folded and simplified."""
        args = [x if isinstance(x, Node) else self.constant(x) for x in operands]
        if OPS[op].takes_numbers:
            args = [self.number(x) for x in args]
        if op == "where" and args[1].boolean != args[2].boolean:
            args[1:] = [self.number(x) for x in args[1:]]
        if op in COMMUTATIVE:  # constants last
            args.sort(key=lambda x: (x.op == CONSTANT, x.index))
        if op not in OVER_UNITS and all(x.op == CONSTANT for x in args):
            return self.constant(OPS[op].torch(*(scalar(x.value) for x in args)).item())
        return simplified(op, args) or self._node(op, tuple(args))

    def number(self, x: Node) -> Node:
        return self.make("where", x, 1.0, 0.0) if x.boolean else x


def make(op: str, *operands: Operand) -> Node:
    return next(x.graph for x in operands if isinstance(x, Node)).make(op, *operands)


def scalar(value: float, like: Tensor | None = None) -> Tensor:
    dtype = torch.bool if isinstance(value, bool) else torch.float64 if like is None else like.dtype
    return torch.full((), value, dtype=dtype, device="cpu" if like is None else like.device)


def simplified(op: str, args: list[Node]) -> Node | None:
    """An equal node that exists or is cheaper, if one of few rules gives it."""
    a, b = args[0], args[-1]
    if (op in ("add", "sub") and b.is_constant(0)) or (op in ("mul", "div", "pow") and b.is_constant(1)):
        return a
    if op == "mul" and b.is_constant(-1):
        return -a
    if op == "neg" and a.op == "neg":
        return a.args[0]
    if op in ("add", "sub") and b.op == "neg":
        return a - b.args[0] if op == "add" else a + b.args[0]
    if op == "add" and a.op == "neg":
        return b - a.args[0]
    if op == "mul" and "neg" in (a.op, b.op):
        return -(a.args[0] * b if a.op == "neg" else a * b.args[0])
    if op == "div" and a.is_constant(1):
        return make("reciprocal", b)
    if op == "where" and a.op == CONSTANT:
        return args[1] if a.value else args[2]
    if op == "where" and args[1] is args[2]:
        return args[1]
    # FastMath's sigmoid has an absolute error, which the logarithm of a small value would blow up.
    if op == "log" and a.op == "sigmoid":
        return -make("softplus", -a.args[0])
    return None


# What it costs to compute a node again in the backward. A saved value costs SAVED, one that is true or false
# DECISION.
CHEAP, FUNCTION, NEVER = 1, 50, 10**9
SAVED, DECISION = 1000, 100


class Op(NamedTuple):
    """An op of nodes.

    NEVER is for ops that blow up errors: their results are not computed again from saved values, which are
    rounded to the type of the tensors. A sigmoid or tanh is harmless there. Comparisons are the worst: near
    their jumps the backward would take another branch than the forward.
    """

    text: str  # C++
    torch: Callable[..., Tensor]  # the same on whole tensors
    gradient: Callable[..., tuple[Node | None, ...]] | None = None  # (grad, output, *args) -> those of args
    cost: int = CHEAP
    boolean: bool = False  # whether the result is true or false
    takes_numbers: bool = True  # whether boolean arguments become 0 and 1


def where(condition: Node, a: Operand, b: Operand) -> Node:
    return make("where", condition, a, b)


def function(name: str) -> Callable[..., Node]:
    return lambda *args: make(name, *args)


sigmoid, tanh, exp, log = function("sigmoid"), function("tanh"), function("exp"), function("log")
sin, cos, equal = function("sin"), function("cos"), function("eq")
sinh, cosh = function("sinh"), function("cosh")
floor, nearest = function("floor"), function("round")
softplus, power, gelu_derivative = function("softplus"), function("pow"), function("gelu_derivative")


def sign(x: Node) -> Node:
    return where(x > 0.0, 1.0, where(x < 0.0, -1.0, 0.0))


def trunc(x: Node) -> Node:
    return where(x < 0.0, -floor(-x), floor(x))


def tie_share(a: Node, b: Node, first: Node) -> Node:
    """The part of the gradient of maximum or minimum that its first argument gets: half of it in ties."""
    return where(equal(a, b), 0.5, where(first, 1.0, 0.0))


def shared(g: Node, share: Node) -> tuple[Node, Node]:
    return g * share, g * (1 - share)


def power_gradient(g: Node, y: Node, a: Node, b: Node) -> tuple[Node, Node]:
    no_power, no_log = equal(b, 0.0), equal(a, 0.0) & (b >= 0.0)  # 0, as torch defines it
    return where(no_power, 0.0, g * (b * power(a, b - 1))), where(no_log, 0.0, g * (y * log(a)))


def straight_through(step: Tensor, curve: Tensor) -> Tensor:
    """The values of ``step`` with the gradient of ``curve``."""
    difference = curve - curve.detach()  # 0, or NaN
    return step + torch.where(difference == 0, difference, 0)


def units_max_gradient(g: Node, y: Node, x: Node) -> tuple[Node]:
    is_largest = equal(x, y)
    return (where(is_largest, make("units_sum", g) / make("units_sum", where(is_largest, 1.0, 0.0)), 0.0),)


def units_var_of_all(*values: Tensor) -> Tensor:
    values = torch.broadcast_tensors(*values)
    return torch.cat(values, -1).var(-1, correction=0, keepdim=True).expand_as(values[0])


def units_var_gradient(g: Node, y: Node, *values: Node) -> tuple[Node, ...]:
    share = 1 / len(values)
    mean = make("units_mean", added(values) * share)
    return tuple((x - mean) * (make("units_mean", g) * (2 * share)) for x in values)


def variance_of_all(*values: Node) -> Node:
    """units_var_of_all: the variance of the units' means, and the mean of the variances within units."""
    share = 1 / len(values)
    mean = added(values) * share
    within = added([(x - mean) * (x - mean) for x in values]) * share
    return make("units_var", mean) + make("units_mean", within)


def added(values: Sequence[Node]) -> Node:
    total = values[0]
    for x in values[1:]:
        total = total + x
    return total


def softplus_of(x: Tensor) -> Tensor:
    return -F.logsigmoid(-x)  # F.softplus is linear from 20 on


COMMUTATIVE = ("add", "mul", "maximum", "minimum", "eq", "ne", "and", "or", "logaddexp")

# Derivatives take the output where it determines them, so that one saved value serves both.
OPS = {
    "add": Op("{0} + {1}", torch.add, lambda g, y, a, b: (g, g)),
    "sub": Op("{0} - {1}", torch.sub, lambda g, y, a, b: (g, -g)),
    "mul": Op("{0} * {1}", torch.mul, lambda g, y, a, b: (g * b, g * a)),
    "div": Op("Math::divide({0}, {1})", torch.div, lambda g, y, a, b: (g / b, -(g / b * y)), NEVER),
    "reciprocal": Op("Math::divide(A(1), {0})", torch.reciprocal, lambda g, y, x: (-(g * y * y),), NEVER),
    "neg": Op("-{0}", torch.neg, lambda g, y, x: (-g,)),
    "abs": Op("Math::abs({0})", torch.abs, lambda g, y, x: (g * sign(x),)),
    "detach": Op("{0}", torch.detach, takes_numbers=False),
    "maximum": Op("maximum({0}, {1})", torch.maximum, lambda g, y, a, b: shared(g, tie_share(a, b, a > b))),
    "minimum": Op("minimum({0}, {1})", torch.minimum, lambda g, y, a, b: shared(g, tie_share(a, b, a < b))),
    "where": Op(
        "{0} ? {1} : {2}",
        torch.where,
        lambda g, y, c, a, b: (None, where(c, g, 0.0), where(c, 0.0, g)),
        takes_numbers=False,
    ),
    "lt": Op("{0} < {1}", torch.lt, cost=NEVER, boolean=True),
    "le": Op("{0} <= {1}", torch.le, cost=NEVER, boolean=True),
    "gt": Op("{0} > {1}", torch.gt, cost=NEVER, boolean=True),
    "ge": Op("{0} >= {1}", torch.ge, cost=NEVER, boolean=True),
    "eq": Op("{0} == {1}", torch.eq, cost=NEVER, boolean=True, takes_numbers=False),
    "ne": Op("{0} != {1}", torch.ne, cost=NEVER, boolean=True, takes_numbers=False),
    "and": Op("{0} && {1}", torch.logical_and, boolean=True, takes_numbers=False),
    "or": Op("{0} || {1}", torch.logical_or, boolean=True, takes_numbers=False),
    "not": Op("!{0}", torch.logical_not, boolean=True, takes_numbers=False),
    "sigmoid": Op("Math::sigmoid({0})", torch.sigmoid, lambda g, y, x: (g * (y * (1 - y)),), FUNCTION),
    "tanh": Op("Math::tanh({0})", torch.tanh, lambda g, y, x: (g * (1 - y * y),), FUNCTION),
    "relu": Op("relu({0})", torch.relu, lambda g, y, x: (where(y <= 0.0, 0.0, g),)),
    "elu": Op("Math::elu({0})", F.elu, lambda g, y, x: (g * (make("minimum", y, 0.0) + 1),), FUNCTION),
    "silu": Op(
        "Math::silu({0})", F.silu, lambda g, y, x: (g * activations.silu_derivative(x, sigmoid),), FUNCTION
    ),
    "gelu": Op("Math::gelu({0})", F.gelu, lambda g, y, x: (g * gelu_derivative(x),), FUNCTION),
    "gelu_derivative": Op("Math::gelu_derivative({0})", activations.gelu_derivative, cost=FUNCTION),
    "gelu_tanh": Op(
        "Math::gelu_tanh({0})",
        lambda x: F.gelu(x, approximate="tanh"),
        lambda g, y, x: (g * activations.gelu_tanh_derivative(x, tanh),),
        FUNCTION,
    ),
    "softplus": Op("Math::softplus({0})", softplus_of, lambda g, y, x: (g * sigmoid(x),), FUNCTION),
    "logaddexp": Op(
        "Math::logaddexp({0}, {1})",
        torch.logaddexp,
        lambda g, y, a, b: (g * sigmoid(a - b), g * sigmoid(-(a - b))),
        FUNCTION,
    ),
    "exp": Op("Math::exp({0})", torch.exp, lambda g, y, x: (g * y,), NEVER),
    "expm1": Op("Math::expm1({0})", torch.expm1, lambda g, y, x: (g * exp(x),), NEVER),
    "log": Op("Math::log({0})", torch.log, lambda g, y, x: (g / x,), NEVER),
    "log1p": Op("Math::log1p({0})", torch.log1p, lambda g, y, x: (g / (x + 1),), NEVER),
    "sqrt": Op("Math::sqrt({0})", torch.sqrt, lambda g, y, x: (0.5 * g / y,), NEVER),
    "rsqrt": Op("Math::rsqrt({0})", torch.rsqrt, lambda g, y, x: (-0.5 * g * y * y * y,), NEVER),
    "pow": Op("Math::pow({0}, {1})", torch.pow, power_gradient, NEVER),
    "sin": Op("Math::sin({0})", torch.sin, lambda g, y, x: (g * cos(x),), NEVER),
    "cos": Op("Math::cos({0})", torch.cos, lambda g, y, x: (-(g * sin(x)),), NEVER),
    "sinh": Op("Math::sinh({0})", torch.sinh, lambda g, y, x: (g * cosh(x),), NEVER),
    "cosh": Op("Math::cosh({0})", torch.cosh, lambda g, y, x: (g * sinh(x),), NEVER),
    "atan": Op("Math::atan({0})", torch.atan, lambda g, y, x: (g / (x * x + 1),), NEVER),
    "floor": Op("Math::floor({0})", torch.floor, cost=NEVER),
    "round": Op("Math::round({0})", torch.round, cost=NEVER),
    "fmod": Op("Math::fmod({0}, {1})", torch.fmod, lambda g, y, a, b: (g, -(g * trunc(a / b))), NEVER),
    # The values of the first argument with the gradient of the second one. Kernels never see it.
    "straight_through": Op("{0}", straight_through, lambda g, y, step, curve: (None, g)),
    "erf": Op(
        "Math::erf({0})", torch.erf, lambda g, y, x: (g * (2 / math.sqrt(math.pi) * exp(-(x * x))),), NEVER
    ),
    # Over all units of a row. Each unit has the result, and so a gradient of its own, which add up.
    "units_sum": Op(
        "in.units.sum({0})",
        lambda x: x.sum(-1, keepdim=True).expand_as(x),
        lambda g, y, x: (make("units_sum", g),),
        NEVER,
    ),
    "units_mean": Op(
        "in.units.mean({0})",
        lambda x: x.mean(-1, keepdim=True).expand_as(x),
        lambda g, y, x: (make("units_mean", g),),
        NEVER,
    ),
    # The mean of (x - mean) * (x - mean), for which kernels do not wait for the mean first.
    "units_var": Op(
        "in.units.var({0})",
        lambda x: x.var(-1, correction=0, keepdim=True).expand_as(x),
        units_var_gradient,
        NEVER,
    ),
    # Of all units' values of several expressions. Kernels never see it.
    "units_var_of_all": Op("in.units.var(...)", units_var_of_all, units_var_gradient, NEVER),
    "units_max": Op(
        "in.units.max({0})",
        lambda x: x.amax(-1, keepdim=True).expand_as(x),
        units_max_gradient,
        NEVER,
    ),
    # Of the units up to this one, and from this one on.
    "units_cumsum": Op(
        "in.units.cumsum({0})",
        lambda x: x.cumsum(-1),
        lambda g, y, x: (make("units_cumsum_back", g),),
        NEVER,
    ),
    "units_cumsum_back": Op(
        "in.units.cumsum_back({0})",
        lambda x: x.flip(-1).cumsum(-1).flip(-1),
        lambda g, y, x: (make("units_cumsum", g),),
        NEVER,
    ),
    # With a block [H, H] of a weight, whose gradient is no value of a unit, so no node (Derived.products).
    "product": Op(
        "product({0}, {1})",
        lambda w, v: v @ w.t(),
        lambda g, y, w, v: (None, make("product_back", w, g)),
        NEVER,
        takes_numbers=False,
    ),
    "product_back": Op("product_back({0}, {1})", torch.Tensor.__rmatmul__, None, NEVER, takes_numbers=False),
}
OVER_UNITS = [name for name in OPS if name.startswith("units_")]


def ancestors(targets: Iterable[Node], known: Iterable[Node] = ()) -> list[Node]:
    """The targets and all they are computed from, arguments first, not looking behind `known` nodes."""
    found: set[Node] = set()
    stop, stack = set(known), list(targets)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += () if node in stop else node.args
    return sorted(found, key=lambda node: node.index)


def for_kernels(nodes: Sequence[Node]) -> list[Node]:
    """The same values, without what serves their gradients only, by the ops that kernels have."""
    found: dict[Node, Node] = {}
    for node in ancestors(nodes):
        args = [found[arg] for arg in node.args]
        if node.op == "straight_through":
            found[node] = args[0]
        elif node.op == "units_var_of_all":
            found[node] = variance_of_all(*args)
        elif args == list(node.args):
            found[node] = node
        else:
            found[node] = node.graph.make(node.op, *args)
            found[node].label = found[node].label or node.label
    return [found[node] for node in nodes]


def levels(nodes: Iterable[Node], ops: Collection[str], known: Collection[Node] = ()) -> dict[Node, int]:
    """The most of such ops on a path to each node and its ancestors, itself included, after `known` nodes."""
    found: dict[Node, int] = {}
    for node in ancestors(nodes, known):
        args = () if node in known else node.args
        found[node] = max((found[arg] for arg in args), default=0) + (node.op in ops and node not in known)
    return found


class Tape:
    """The computation of nodes as a list of calls of torch's functions on whole tensors.

    Args:
        targets: the nodes to compute.
        known: the nodes whose values a run is given.
    """

    def __init__(self, targets: Sequence[Node], known: Sequence[Node]):
        place = {node: i for i, node in enumerate(known)}
        nodes = [node for node in ancestors(targets, known) if node not in place]
        self._constants = [node.value for node in nodes if node.op == CONSTANT]
        for node in sorted(nodes, key=lambda node: node.op != CONSTANT):  # stable, so arguments stay first
            place[node] = len(place)
        computed = [node for node in nodes if node.op != CONSTANT]
        self._calls = [(OPS[node.op].torch, [place[arg] for arg in node.args]) for node in computed]
        self._targets = [place[node] for node in targets]

    def constants(self, like: Tensor) -> list[Tensor]:
        """The numbers of a run, in the dtype and on the device of ``like``."""
        return [scalar(value, like) for value in self._constants]

    def run(self, known: Iterable[Tensor], constants: Iterable[Tensor]) -> list[Tensor]:
        values = [*known, *constants]
        for function, args in self._calls:
            values.append(function(*[values[i] for i in args]))
        return [values[i] for i in self._targets]
