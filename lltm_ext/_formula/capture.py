"""Captures a recurrent cell's Python function as expressions of one hidden unit.

The function runs once on tensors without dimensions and without data. A TorchDispatchMode sees the aten
ops that it calls and records them as nodes. torch.fx's make_fx does the same by way of torch._dynamo, whose
import takes more than a second, and it also records what a kernel cannot run. Here an op outside the table
is refused when it is called, so that the error points to the user's line.
"""

from __future__ import annotations

import linecache
import re
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lltm_ext._formula.declaration import Declaration, Weight, arguments_of, call, written_function
from lltm_ext._formula.graph import (
    CONSTANT,
    Graph,
    Node,
    Operand,
    ancestors,
    equal,
    exp,
    floor,
    function,
    log,
    make,
    nearest,
    power,
    sign,
    softplus,
    tanh,
    trunc,
    where,
)
from lltm_ext._formula.units import Units

_thread = threading.local()


class Tracer(TorchDispatchMode):
    """Records the ops of a function as nodes of `graph`."""

    def __init__(self, function: Callable[..., Any], graph: Graph):
        super().__init__()
        self.graph = graph
        self.refusal: Exception | None = None
        self._code = written_function(function).__code__
        self._nodes: dict[int, tuple[Tensor, Node]] = {}  # keyed by the id of the tensor, kept alive here

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: torch.compile never sees this mode; keeping it away would import torch._dynamo."""
        return False

    def tensor(self, node: Node) -> Tensor:
        """A tensor that represents the node. It has no data, so that nothing can read a value."""
        x = torch.empty((), dtype=torch.bool if node.boolean else torch.float64, device="meta")
        self._nodes[id(x)] = x, node
        return x

    @classmethod
    def at_work(cls) -> Tracer | None:
        """The capture that runs in this thread, if one does."""
        return getattr(_thread, "tracer", None)

    def __enter__(self) -> Tracer:
        self._before, _thread.tracer = self.at_work(), self
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        _thread.tracer = self._before
        return super().__exit__(*error)

    def straight_through(self, step: Tensor, curve: Tensor) -> Tensor:
        """The values of ``step`` with the gradient of ``curve``."""
        return self.tensor(make("straight_through", self.node(step), self.node(curve)))

    def over_units(self, op: str, *tensors: Tensor) -> Tensor:
        """The node of an op over all units of a row, of values, or of a weight's block and a value."""
        nodes = list(map(self.node, tensors))
        weight = [nodes.pop(0)] if op == "product" else []
        values = list(map(self.graph.number, nodes))
        name = "linear" if weight else op.removeprefix("units_").removesuffix("_of_all")
        if not torch.is_grad_enabled():
            raise RuntimeError(f"calls units.{name} {UNDER_NO_GRAD}")
        if all(value.op == CONSTANT for value in values):
            raise RuntimeError(
                f"calls units.{name} on the number {values[0]!r}, which all units share; it takes a value "
                "that is computed from the arguments"
            )
        return self.tensor(make(op, *weight, *values))

    def node(self, x: Tensor) -> Node:
        if id(x) not in self._nodes:
            frame = self._frame()
            scope = {**frame.f_globals, **frame.f_locals} if frame else {}
            name = next((name for name, value in scope.items() if value is x), "a tensor")
            raise RuntimeError(
                f"uses {name} of shape {list(x.shape)} on {x.device}, which is not computed from the "
                "arguments; declare it in parameters= (trained) or inputs= (given at each step), or write a "
                "Python number"
            )
        return self._nodes[id(x)][1]

    def _frame(self) -> Any:
        """The frame of the user's function."""
        frame: Any = sys._getframe()
        while frame and frame.f_code is not self._code:
            frame = frame.f_back
        return frame

    def name_variables(self) -> None:
        """Gives nodes the names of the user's variables, for texts that a person can read."""
        frame = self._frame()
        for name, value in frame.f_locals.items() if frame else ():
            _, node = self._nodes.get(id(value), (None, None))
            if node and not node.label and re.fullmatch(r"[a-zA-Z][a-zA-Z0-9]*(_[a-zA-Z0-9]+)*", name):
                node.label = name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return self._record(func, args, kwargs or {})
        except Exception as error:
            self.refusal = error  # kept in case the user's function catches it
            raise

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in ("empty", "empty_like"):  # torch's first step of dropout, which the next op gives away
            return func(*args, **kwargs)
        if name == "lift_fresh" and args[0].dim() == 0:  # the function has torch.tensor(0.5) or the like
            return self.tensor(self.graph.constant(args[0].item()))
        self.name_variables()
        if name == "_local_scalar_dense":
            raise RuntimeError(no_value(self.node(args[0])))
        reason = refused(func, name, kwargs)
        if reason:
            raise RuntimeError(reason)
        operands = [self.node(x) if isinstance(x, Tensor) else x for x in args]
        options = {key: self.node(x) if isinstance(x, Tensor) else x for key, x in kwargs.items()}
        check_types(name, operands)
        result = ATEN[name](*operands, **options)
        if name == "log_sigmoid_forward":  # it also returns a buffer for its own backward
            return self.tensor(result), self.tensor(self.graph.constant(0.0))
        return self.tensor(result if isinstance(result, Node) else self.graph.constant(result))


def no_value(node: Node) -> str:
    if node.boolean:
        return (
            f"branches (if, and, or, max, min) on {node!r}, which is not known when the cell is compiled; "
            "use torch.where(condition, a, b), torch.maximum or torch.minimum"
        )
    return (
        f"reads the value of {node!r} (.item(), float(), an if, a function of math), which is not known when "
        "the cell is compiled; use torch's functions"
    )


def refused(func: Any, name: str, kwargs: Mapping[str, Any]) -> str:
    """Why an op cannot be part of a cell, and what can be done; "" if it can."""
    called = f"calls {re.sub('^(_|native_)', '', name)}"
    if torch.Tag.nondeterministic_seeded in func.tags:
        return (
            f"{called}, which draws random numbers, as dropout does; draw a mask outside and pass it to the "
            "step by inputs=('mask',)"
        )
    if not torch.is_grad_enabled():
        if function := autograd_function():
            return (
                f"calls the torch.autograd.Function {function}, whose backward the capture cannot see; write "
                "lltm_ext.spike(v) or lltm_ext.round(v), or step + slope.detach() * (v - v.detach()) "
                "for the values of step and the gradient slope"
            )
        return f"{called} {UNDER_NO_GRAD}"
    if name in ATEN and not func._schema.is_mutable:
        return ""
    if func._schema.is_mutable:
        return f"{called}, which changes a tensor in place; write a = a + b instead of a += b or a.add_(b)"
    if reason := reason_of(name):
        return f"{called}, {reason}"
    ops = [op for op in ATEN if hasattr(torch, op) or hasattr(F, op)]
    return f"{called}, which is none of the ops of a cell: {', '.join(sorted(ops))}"


def autograd_function() -> str:
    """The name of the torch.autograd.Function that runs, or ""."""
    frame: Any = sys._getframe()
    while frame and not (frame.f_code.co_name == "apply" and "cls" in frame.f_locals):
        frame = frame.f_back
    return frame.f_locals["cls"].__name__ if frame else ""


def reason_of(name: str) -> str:
    """Why an op of this name is none of a cell, if it is of one of a few kinds; else ""."""
    return next((reason for pattern, reason in REASONS if re.fullmatch(pattern, name)), "")


UNDER_NO_GRAD = "under torch.no_grad(), which the backward would not see; use .detach()"
ONE_UNIT = "the function computes one hidden unit of one row"
REASONS = (
    (
        "(mean|sum|prod|max|min|amax|amin|norm|linalg_.*|var|std|var_mean|logsumexp|any|all|cum.*|argm.*|sort|topk"
        "|_?(log_)?softmax|.*(layer|group|batch|rms)_norm|cat|stack)(_.*)?",
        f"a reduction over units or values side by side; {ONE_UNIT}, so combine values by +, *, "
        "torch.maximum, and write units.mean(v), units.layer_norm(v) and so on, with the argument units, for "
        "what is over all units of a row",
    ),
    (
        "(.*mm|.*mv|dot|vdot|matmul|einsum|.*conv.*|linear|bilinear|outer)",
        f"a product over units; {ONE_UNIT}. Besides the product of weight_hh with the previous h, "
        "units.linear(v, w.name) multiplies by a weight that the cell declares, weights=('name',)",
    ),
    (
        "(view|reshape|_?unsafe_view|expand|(un)?squeeze|select|slice|index.*|gather|permute|t|transpose|split.*"
        "|unbind|repeat|roll|flip)(_.*)?",
        f"which changes a shape; {ONE_UNIT}, on tensors without dimensions",
    ),
    (
        "zeros|ones|full|new_.*|arange|lift_fresh|eye|linspace",
        "which makes a tensor; write a Python number, which is a constant",
    ),
)


def check_types(name: str, operands: Sequence[Any]) -> None:
    nodes = [x for x in operands if isinstance(x, Node)]
    logical = name.startswith("bitwise_")
    if name in ("where", "masked_fill"):
        condition = nodes[0 if name == "where" else 1]
        if not condition.boolean:
            raise RuntimeError(
                f"calls {name} on {condition!r}, a number; write a condition like {condition!r} > 0"
            )
    elif logical and not all(x.boolean for x in nodes):
        raise RuntimeError(f"calls {name} on numbers; it takes conditions like x[0] > 0")
    elif nodes and all(x.boolean for x in nodes) and name in ("add", "sub", "mul", "rsub", "neg"):
        raise RuntimeError(f"calls {name} on conditions only; combine them by & and |")


def cast(x: Node, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any) -> Node:
    if device is not None and device.type != "meta":
        raise RuntimeError(
            "reads a value or moves it to a device (.tolist(), .cpu()); write the cell in torch's ops"
        )
    if dtype is torch.bool:
        return as_bool(x)
    if dtype is not None and x.boolean and dtype.is_floating_point:
        return where(x, 1.0, 0.0)
    if dtype in (None, torch.float64):
        return x
    raise RuntimeError(
        f"converts to {dtype}; a cell has one type, that of the arithmetic, which the engine chooses"
    )


def as_bool(x: Operand) -> Node:
    return x if isinstance(x, Node) and x.boolean else make("ne", x, 0.0)


def clamp(x: Node, low: Operand | None = None, high: Operand | None = None, **bounds: Any) -> Node:
    """Clamps x. Unlike maximum and minimum, it passes the whole gradient at a bound, as torch up to 2.14."""
    low, high = bounds.get("min", low), bounds.get("max", high)
    x = x if low is None else where(make("lt", x, low), low, x)
    return x if high is None else where(make("gt", x, high), high, x)


def elu(x: Node, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Node:
    y = make("elu", x * input_scale)
    return scale * (y if alpha == 1 and input_scale == 1 else where(x > 0.0, x, alpha * y))


def lower_pow(a: Operand, b: Operand) -> Operand:
    """Computes a ** b, by multiplications for the common exponents."""
    if isinstance(a, Node) and not isinstance(b, Node):
        products: dict[float, Callable[[], Operand]] = {
            0.0: lambda: 1.0,
            0.5: lambda: make("sqrt", a),
            2.0: lambda: a * a,
            3.0: lambda: a * a * a,
            -0.5: lambda: make("rsqrt", a),
            -1.0: lambda: make("reciprocal", a),
        }
        if float(b) in products:
            return products[float(b)]()
    return power(a, b)


def scaled_softplus(x: Node, beta: float = 1, threshold: float = 20) -> Node:
    y = softplus(x * beta) / beta
    return y if threshold >= 20 else where(x * beta > threshold, x, y)  # they differ by less than 3e-9 there


def heaviside(x: Node, at_zero: Operand) -> Node:
    return where(equal(x, 0.0), at_zero, where(x > 0.0, 1.0, 0.0))


def round_to(x: Node, decimals: int = 0) -> Node:
    if decimals != 0:
        raise RuntimeError("calls round with decimals; multiply by a power of ten before and divide after")
    return nearest(x)


def divided(a: Operand, b: Operand, rounding_mode: str | None = None) -> Node:
    if rounding_mode != "floor":
        quotient = make("div", a, b)
        return trunc(quotient) if rounding_mode else quotient
    rest = make("fmod", a, b)  # a / b may round up to an integer
    is_below = make("ne", rest, 0.0) & make(
        "ne", make("lt", b, 0.0) if isinstance(b, Node) else b < 0, rest < 0.0
    )
    return nearest((a - rest) / b - where(is_below, 1.0, 0.0))


def ceil(x: Node) -> Node:
    return -floor(-x)


def stepped(step: Callable[[Node], Node]) -> Callable[[Node], Node]:
    """A step of :mod:`lltm_ext.round`, which has the gradient of the identity."""
    return lambda x: make("straight_through", step(x), x)


def binarize(
    x: Node, threshold: float = 0.5, low: float = 0.0, high: float = 1.0, grad: str = "identity"
) -> Node:
    half = (high - low) / 2
    curves: dict[str, Callable[[], Operand]] = {
        "identity": lambda: x,
        "clipped": lambda: where(abs(x - threshold) <= half, x, 0.0),
        "tanh": lambda: half * tanh((x - threshold) / half),
    }
    return make("straight_through", where(x > threshold, high, low), curves[grad]())


SAME = (
    "mul neg abs maximum minimum where lt le gt ge eq ne sigmoid tanh relu exp expm1 log log1p sqrt "
    "rsqrt sin cos sinh cosh atan erf reciprocal logaddexp detach floor fmod"
)
ATEN: dict[str, Callable[..., Any]] = {
    **{name: function(name) for name in SAME.split()},
    "div": divided,
    "floor_divide": lambda a, b: divided(a, b, "floor"),
    "sign": sign,
    "sgn": sign,
    "ceil": ceil,
    "trunc": trunc,
    "frac": lambda x: x - trunc(x),
    "round": round_to,
    "heaviside": heaviside,
    "add": lambda a, b, alpha=1: a + b * alpha if alpha != 1 else make("add", a, b),
    "sub": lambda a, b, alpha=1: a - b * alpha if alpha != 1 else make("sub", a, b),
    "rsub": lambda a, b, alpha=1: b - a * alpha,
    "addcmul": lambda x, a, b, value=1: x + value * (a * b),
    "addcdiv": lambda x, a, b, value=1: x + value * (a / b),
    "lerp": lambda a, b, weight: a + weight * (b - a),
    "pow": lower_pow,
    "exp2": lambda x: exp(x * 0.6931471805599453),
    "log2": lambda x: log(x) * 1.4426950408889634,
    "log10": lambda x: log(x) * 0.4342944819032518,
    "clamp": clamp,
    "clamp_min": clamp,
    "clamp_max": lambda x, high: clamp(x, None, high),
    "hardtanh": lambda x, low=-1, high=1: where(x <= low, low, where(x >= high, high, x)),
    "hardsigmoid": lambda x: where(x <= -3.0, 0.0, where(x >= 3.0, 1.0, (x + 3) / 6)),
    "hardswish": lambda x: where(x <= -3.0, 0.0, where(x >= 3.0, x, x * ((x + 3) / 6))),
    "threshold": lambda x, threshold, value: where(x <= threshold, value, x),
    "leaky_relu": lambda x, slope=0.01: where(x > 0.0, x, x * slope),
    "elu": elu,
    "celu": lambda x, alpha=1: elu(x, alpha, 1, 1 / alpha),
    "silu": function("silu"),
    "mish": lambda x: x * tanh(softplus(x)),
    "gelu": lambda x, approximate="none": make("gelu_tanh" if approximate == "tanh" else "gelu", x),
    "softplus": scaled_softplus,
    "log_sigmoid_forward": lambda x: -softplus(-x),
    "logical_and": lambda a, b: make("and", as_bool(a), as_bool(b)),
    "logical_or": lambda a, b: make("or", as_bool(a), as_bool(b)),
    "logical_not": lambda x: make("not", as_bool(x)),
    "logical_xor": lambda a, b: make("ne", as_bool(a), as_bool(b)),
    "bitwise_and": function("and"),
    "bitwise_or": function("or"),
    "bitwise_xor": function("ne"),
    "bitwise_not": function("not"),
    "isnan": lambda x: make("ne", x, x),
    "masked_fill": lambda x, mask, value: where(mask, value, x),
    "scalar_tensor": lambda value, **_: value,
    "zeros_like": lambda x, **_: 0.0,
    "ones_like": lambda x, **_: 1.0,
    "full_like": lambda x, value, **_: value,
    "clone": lambda x, **_: x,
    "alias": lambda x: x,
    "_to_copy": cast,
    "lltm_ext::round": stepped(nearest),
    "lltm_ext::floor": stepped(floor),
    "lltm_ext::ceil": stepped(ceil),
    "lltm_ext::trunc": stepped(trunc),
    "lltm_ext::binarize": binarize,
}


class Captured(NamedTuple):
    graph: Graph
    leaves: dict[str, list[Node]]  # those of x, r, h, s, p, u and w that the declaration has
    outputs: list[Node]  # the new h, the new states


def capture(function: Callable[..., Any], declared: Declaration) -> Captured:
    """Captures the function as nodes.

    Raises:
        TypeError, ValueError, RuntimeError, IndexError, AttributeError: for what cannot be a cell, with the
            cell's name, the reason, and the line of the user's text.
    """
    taken = arguments_of(function, declared)
    graph = Graph()
    mode = Tracer(function, graph)
    leaves = {
        argument: [
            graph.leaf(f"{argument}.{name}" if name else f"{argument}[{i}]")
            for i, name in enumerate(declared.names(argument))
        ]
        for argument in ("x", "r", "s", "p", "u", "w")
        if argument != "r" or declared.separate
    }
    leaves |= {"h": [graph.leaf("h")]} | ({} if declared.separate else {"r": []})
    values: dict[str, Any] = {argument: [mode.tensor(x) for x in nodes] for argument, nodes in leaves.items()}
    values |= {"h": values["h"][0], "units": Units(mode.over_units)}
    try:
        with torch.inference_mode(False), torch.enable_grad(), mode:
            h, states = call(function, declared, taken, values)
        if mode.refusal:
            raise mode.refusal
        outputs = [mode.node(x) for x in (h, *states)]
        check_weights_are_used(declared.weights_of(leaves["w"]), outputs)
    except KINDS as error:
        kind = next(kind for kind in KINDS if isinstance(error, kind))
        raise kind(f"{declared.name}: {explained(error)}{line_of(error, function)}") from error
    for name, node in zip(("h", *declared.states), outputs, strict=True):
        if node.boolean:
            raise TypeError(
                f"{declared.name}: expected the new {name} to be a number, got the condition {node!r}"
            )
    return Captured(graph, leaves, outputs)


def check_weights_are_used(weights: Mapping[str, Weight], outputs: Sequence[Node]) -> None:
    live = ancestors(outputs)
    for name, weight in weights.items():
        if not any(block in live for block in weight.blocks):
            raise ValueError(
                f"expected the function to use its weights, but nothing depends on units.linear(v, w.{name})"
            )


KINDS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)
OWN = str(Path(__file__).parent)
INTERNAL = (OWN, str(Path(torch.__file__).parent))


def explained(error: BaseException) -> str:
    """The message of an error, with the reason of one that torch raises before the capture sees an op."""
    if isinstance(error, TypeError) and "to numpy" in str(error):
        return "converts a tensor to NumPy, which a kernel does not have; use torch's functions"
    message = str(error).partition("\n")[0]
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    if isinstance(error, IndexError) and "0-dim tensor" in message:
        return "indexes a value: x[0] is one number of one unit; write x[0] and x[1], without further indices"
    if isinstance(error, TypeError) and "Values" in message:  # x itself instead of x[0]
        called = message.partition("(")[0]
        return f"calls {called} on several values at once, {reason_of(called) or ONE_UNIT}"
    if isinstance(error, RuntimeError) and not raised_in.startswith(OWN):
        name = next((word for word in ("linear", "matmul", "conv") if word in message), "")
        if reason := reason_of(name):
            return f"calls {name}, {reason}"
        return f"{message} ({ONE_UNIT}, on tensors without dimensions and values)"
    return str(error)


def line_of(error: BaseException, function: Callable[..., Any]) -> str:
    """The innermost line of the user's text that an error passed through, or the function's first line."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(INTERNAL):
            return f"\n  {frame.filename}:{frame.lineno}: {frame.line}"
    code = written_function(function).__code__
    line = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return f"\n  {code.co_filename}:{code.co_firstlineno}: {line}"
