"""Elementwise ops made at run time, from a formula in CUDA C++ (see :func:`elementwise`)."""

from __future__ import annotations

import functools
import inspect
import itertools
import keyword
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lltm_ext._C import elementwise as _C
from lltm_ext._formula.text import SEPARATOR, check_text, identifiers, program_text
from lltm_ext._library import composed, hand_over, has_tangents, implements_functions, ops, transforms_active

__all__ = ["elementwise"]

MAX_TENSORS = 8
overridden: Callable[[Any], bool] = torch.overrides.has_torch_function
RESERVED = ("T", "grad", "output")

SIGNATURE = re.compile(r"\s*T\s+([A-Za-z_]\w*)\s*\(([^()]*)\)\s*;?\s*", re.ASCII)
PARAMETER = re.compile(r"\s*T\s+([A-Za-z_]\w*)\s*", re.ASCII)


def parse(signature: str) -> tuple[str, tuple[str, ...]]:
    """Returns ('f', ('x', 'a')) for 'T f(T x, T a)'."""
    match = SIGNATURE.fullmatch(signature)
    parameters = [PARAMETER.fullmatch(part) for part in match[2].split(",")] if match else [None]
    if match is None or None in parameters:
        raise ValueError(f"elementwise: expected a signature like 'T f(T x, T a)', got {signature!r}")
    names = tuple(parameter[1] for parameter in parameters if parameter)
    for name in names:
        if name in RESERVED or keyword.iskeyword(name):
            raise ValueError(f"{match[1]}: no parameter may be called {name}, which has a meaning here")
        if names.count(name) > 1:
            raise ValueError(f"{match[1]}: expected parameters of different names, got {signature!r}")
    return match[1], names


def check_types(signature: Any, backward: Any, scalars: Any) -> None:
    if not isinstance(signature, str):
        raise TypeError(f"elementwise: expected signature to be a str, got {type(signature).__name__}")
    for name, value in {"backward": backward, "scalars": scalars}.items():
        if not isinstance(value, Mapping):
            raise TypeError(f"elementwise: expected {name} to be a mapping, got {type(value).__name__}")
    for name, value in scalars.items():
        if not isinstance(value, (int, float)):
            raise TypeError(
                f"elementwise: expected the default of {name} to be a number, got {type(value).__name__}"
            )


class Elementwise:
    """What :func:`elementwise` makes: a function of tensors and numbers, called by position or by name."""

    def __init__(
        self,
        signature: str,
        forward: str,
        backward: Mapping[str, str],
        scalars: Mapping[str, float],
        cpu: Callable[..., Tensor] | None,
    ):
        check_types(signature, backward, scalars)
        name, parameters = parse(signature)
        for what, text in {
            "forward": forward,
            **{f"backward of {p}": b for p, b in backward.items()},
        }.items():
            check_text(name, what, text)
        tensors = tuple(p for p in parameters if p not in scalars)
        for p in scalars:
            if p not in parameters:
                raise ValueError(f"{name}: the signature has no parameter {p!r}, which scalars names")
        if not 1 <= len(tensors) <= MAX_TENSORS:
            raise ValueError(f"{name}: expected 1 to {MAX_TENSORS} tensors, got {len(tensors)}")
        for p in backward:
            if p not in tensors:
                raise ValueError(f"{name}: the signature has no tensor {p!r}, which backward names")

        self.__name__ = name
        self.cpu = cpu
        self.tensors = tensors
        self.uses = {p: operands_of(body, tensors) for p, body in backward.items()}
        fields = [name, ",".join(tensors), ",".join(p for p in parameters if p in scalars), forward]
        for p, body in backward.items():
            fields += [p, ",".join(self.uses[p]), body]
        self.program = program_text(fields)

        required: Any = inspect.Parameter.empty
        self._defaults: tuple[Any, ...] = tuple(
            float(scalars[p]) if p in scalars else required for p in parameters
        )
        self._tensors = tuple(i for i, p in enumerate(parameters) if p not in scalars)
        self._scalars = tuple(i for i, p in enumerate(parameters) if p in scalars)
        self._places = {p: i for i, p in enumerate(parameters)}
        self._numbers = tuple(self._defaults[i] for i in self._scalars)
        self._leading = len(tensors) if parameters[: len(tensors)] == tensors else None
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        named = [
            inspect.Parameter(p, kind, default=default)
            for p, default in zip(parameters, self._defaults, strict=True)
        ]
        # A number with a default may precede a tensor, which has none: then only keywords can skip it.
        first = next((i for i, p in enumerate(named) if p.default is not required), len(named))
        if any(p.default is required for p in named[first:]):
            named = [p.replace(default=required) for p in named]
        self.__signature__ = inspect.Signature(named, return_annotation=Tensor)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        tensors: Sequence[Any] = args
        scalars: Sequence[float] = self._numbers
        if len(args) != self._leading or kwargs:  # else there are only tensors, and numbers have defaults
            values = self._values(args, kwargs)
            tensors = [values[i] for i in self._tensors]
            scalars = [self._number(values[i]) for i in self._scalars]
        for x in tensors:
            if not isinstance(x, Tensor):
                if any(map(implements_functions, tensors)):
                    return hand_over(self, *args, **kwargs)
                raise self._no_tensor(tensors)
        if tensors[0].is_cpu:
            if self.cpu is None:
                raise RuntimeError(
                    f"{self.__name__}: expected {self.tensors[0]} on a CUDA device, got cpu "
                    "(cpu= of lltm_ext.elementwise takes a function for CPU tensors)"
                )
            return self.cpu(*self._values(args, kwargs))
        if transforms_active() or has_tangents():
            return ElementwiseFunction.apply(formula_of(self.program), tuple(scalars), *tensors)
        if torch.compiler.is_compiling() or overridden(tensors):
            return ops.elementwise(tensors, scalars, self.program)
        return _C.call(tensors, scalars, self.program)

    def _values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Returns the values of all parameters, in their order."""
        if len(args) > len(self._defaults):
            raise TypeError(
                f"{self.__name__}: expected at most {len(self._defaults)} arguments, got {len(args)}"
            )
        values = [*args, *self._defaults[len(args) :]]
        for name, value in kwargs.items():
            place = self._places.get(name)
            if place is None:
                raise TypeError(f"{self.__name__}: has no parameter {name!r}")
            if place < len(args):
                raise TypeError(f"{self.__name__}: got {name} twice")
            values[place] = value
        return values

    def _number(self, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            names = ", ".join(p for p, i in self._places.items() if i in self._scalars)
            raise type(error)(f"{self.__name__}: expected a number for each of {names}: {error}") from error

    def _no_tensor(self, values: Sequence[Any]) -> TypeError:
        for name, value in zip(self.tensors, values, strict=True):
            if value is inspect.Parameter.empty:
                return TypeError(f"{self.__name__}: the argument {name} is missing")
            if not isinstance(value, Tensor):
                break
        return TypeError(f"{self.__name__}: expected {name} to be a Tensor, got {type(value).__name__}")

    @property
    def source(self) -> str:
        """The CUDA C++ that is compiled, for float32: the forward's kernels, then those of all gradients."""
        texts = [_C.source(self.program, torch.float32)]
        if self.uses:
            wanted = [i for i, p in enumerate(self.tensors) if p in self.uses]
            texts.append(_C.source(self.program, torch.float32, wanted))
        return "\n".join(texts)

    def gradcheck(self, *args: Any, device: torch.device | str | None = None, **kwargs: Any) -> bool:
        """Compares the gradients with finite differences, in float64; returns True or raises an error.

        Args:
            args, kwargs: as for a call; tensors are converted to float64. Without any, random tensors of
                shape [3, 4], positive and negative; give your own if the formula is not defined for all
                numbers, or not differentiable everywhere.
            device: of the random tensors; None: the current CUDA device, or the CPU if there is none.

        Raises:
            RuntimeError: for a gradient that differs; for an op without gradients. Tensors without a gradient
                are held fixed.
        """
        if not args and not any(p in kwargs for p in self.tensors):
            device = device or ("cuda" if torch.cuda.is_available() else "cpu")
            of_cpu: Any = {"generator": torch.Generator().manual_seed(0), "device": "cpu"}
            kwargs |= {p: torch.randn(3, 4, dtype=torch.float64, **of_cpu).to(device) for p in self.tensors}
        values = self._values(args, kwargs)
        checked = [
            values[i].detach().to(torch.float64, copy=True).requires_grad_(p in self.uses)
            for i, p in zip(self._tensors, self.tensors, strict=True)
        ]
        if not self.uses:
            raise RuntimeError(f"{self.__name__}: has no backward to check")

        def of_tensors(*tensors: Tensor) -> Tensor:
            given = list(values)
            for i, x in zip(self._tensors, tensors, strict=True):
                given[i] = x
            return self(*given)

        return torch.autograd.gradcheck(of_tensors, checked, nondet_tol=0.0)

    def __repr__(self) -> str:
        parameters = ", ".join(
            f"T {p}" if default is inspect.Parameter.empty else f"T {p}={default:g}"
            for p, default in zip(self._places, self._defaults, strict=True)
        )
        gradients = ", ".join(self.uses) or "none"
        return f"<lltm_ext.elementwise T {self.__name__}({parameters}), gradients: {gradients}>"


def operands_of(body: str, tensors: tuple[str, ...]) -> tuple[str, ...]:
    """Which tensors, and "output", a backward names: what it reads and the forward must save."""
    named = identifiers(body)
    return tuple(p for p in (*tensors, "output") if p in named)


class Formula(NamedTuple):
    """What a program says about its derivatives."""

    name: str
    tensors: tuple[str, ...]
    uses: dict[str, tuple[str, ...]]  # for each tensor with a gradient, the operands that it reads
    program: str

    def used_by(self, tensors: Iterable[str]) -> set[str]:
        """The operands that the gradients of these tensors read."""
        tensors = tuple(tensors)
        for p in tensors:
            if p not in self.uses:
                raise RuntimeError(
                    f"{self.name}: a gradient with respect to {p} is required, "
                    f"but its backward has no formula for {p}"
                )
        return {operand for p in tensors for operand in self.uses[p]}


@functools.lru_cache
def formula_of(program: str) -> Formula:
    name, tensors, _, _, *gradients = program.split(SEPARATOR)
    uses = zip(
        gradients[::3], (tuple(filter(None, names.split(","))) for names in gradients[1::3]), strict=True
    )
    return Formula(name, tuple(tensors.split(",")), dict(uses), program)


class ElementwiseFunction(torch.autograd.Function):
    """``ElementwiseFunction.apply(op, scalars, *tensors)``: the op under transforms and with tangents."""

    @staticmethod
    def forward(op: Formula, scalars: tuple[float, ...], *tensors: Tensor) -> Tensor:
        return ops.elementwise(tensors, scalars, op.program)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.op, ctx.scalars, *tensors = inputs
        ctx.shapes = [x.shape for x in tensors]
        ctx.dtypes = [x.dtype for x in tensors]
        names = ctx.op.tensors
        used = ctx.op.used_by(itertools.compress(names, ctx.needs_input_grad[2:]))
        operands = zip((*names, "output"), (*tensors, output), strict=True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(x if p in used else None for p, x in operands))
        ctx.save_for_forward(*tensors, output)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        op, saved = ctx.op, dict(zip((*ctx.op.tensors, "output"), ctx.saved_tensors, strict=True))
        terms = []
        for i, (p, tangent) in enumerate(zip(op.tensors, tangents[2:], strict=True)):
            if tangent is None:
                continue
            if p not in op.uses:
                raise RuntimeError(
                    f"{op.name}: a jvp with respect to {p} is required, but its backward has no formula "
                    f"for {p}"
                )
            operands = [x for name, x in saved.items() if name in op.uses[p]]
            along = tangent.expand_as(saved["output"]).to(saved["output"].dtype)
            terms += ElementwiseBackwardFunction.apply(op, ctx.scalars, (i,), along, *operands)
        return functools.reduce(torch.add, terms)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Any, ...]:
        if grad_output is None:
            return (None,) * (2 + len(ctx.op.tensors))
        names = ctx.op.tensors
        wanted = [i for i in range(len(names)) if ctx.needs_input_grad[2 + i]]
        used = ctx.op.used_by([names[i] for i in wanted])
        operands = [x for p, x in zip((*names, "output"), ctx.saved_tensors, strict=True) if p in used]
        found = ElementwiseBackwardFunction.apply(ctx.op, ctx.scalars, tuple(wanted), grad_output, *operands)
        gradients: list[Tensor | None] = [None] * len(names)
        for i, gradient in zip(wanted, found, strict=True):
            gradients[i] = gradient.sum_to_size(ctx.shapes[i]).to(ctx.dtypes[i])
        return None, None, *gradients

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], op: Formula, scalars: Any, *tensors: Tensor) -> Any:
        return ElementwiseFunction.apply(op, scalars, *batched(in_dims[2:], tensors)), 0


class ElementwiseBackwardFunction(torch.autograd.Function):
    """The gradients of an op, in the output's sizes. They have no derivatives themselves."""

    @staticmethod
    def forward(
        op: Formula, scalars: tuple[float, ...], wanted: tuple[int, ...], grad: Tensor, *used: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(ops.elementwise_backward(grad, used, scalars, op.program, wanted))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name = inputs[0].name

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.name}: its gradient cannot be differentiated again: "
            "an op made at run time has first derivatives only"
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], op: Any, scalars: Any, wanted: Any, *operands: Tensor
    ) -> Any:
        operands = batched_gradient(info.batch_size, in_dims[3:], operands)
        return ElementwiseBackwardFunction.apply(op, scalars, wanted, *operands), (0,) * len(wanted)


def batched(in_dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Moves the vmapped dimension first, before all dimensions that the tensors are broadcast to."""
    rank = max(x.dim() - (d is not None) for x, d in zip(tensors, in_dims, strict=True))
    return [
        x if d is None else x.movedim(d, 0)[(slice(None),) + (None,) * (rank + 1 - x.dim())]
        for x, d in zip(tensors, in_dims, strict=True)
    ]


def batched_gradient(
    size: int, in_dims: tuple[int | None, ...], operands: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Like :func:`batched` for a gradient and its operands: the results have the sizes of the gradient."""
    grad, d = operands[0], in_dims[0]
    if d is None:
        grad, d = grad.expand(size, *grad.shape), 0
    return tuple(batched((d, *in_dims[1:]), (grad, *operands[1:])))


def elementwise(
    signature: str,
    forward: str,
    *,
    backward: Mapping[str, str] | None = None,
    scalars: Mapping[str, float] | None = None,
    cpu: Callable[..., Tensor] | None = None,
) -> Elementwise:
    """A differentiable elementwise op of your own, from its formula in CUDA C++.

    The first call compiles the formula with the NVRTC that torch ships (no toolkit is needed), into the same
    vectorised kernels as this package's own ops; binaries are cached on disk for other processes. Ctrl-C ends
    the wait for the compiler. The op broadcasts, promotes dtypes as torch does, keeps strides, runs on the
    current stream, and works with CUDA graphs, ``torch.compile``, ``torch.export`` and ``torch.func``::

        softsign = lltm_ext.elementwise(
            "T softsign(T x, T a)",
            forward="return x / (a + fabs(x));",
            backward={"x": "T d = a + fabs(x); return grad * a / (d * d);"},
            scalars={"a": 1.0},
        )
        y = softsign(x, a=2.0)

    Args:
        signature: the op's name and its parameters, all of type ``T``, the type of the arithmetic: float for
            float16, bfloat16 and float32, double for float64. 1 to 8 of them are tensors.
        forward: the body of the function. It may call CUDA's mathematical functions (``exp``, ``fabs``,
            ``max``, ...), which take either type. Write ``T(0.5)``: a plain ``0.5`` is a double and makes
            float arithmetic slower.
        backward: for each tensor that has a gradient, the body of a function that returns it. It may use the
            parameters, ``grad`` (the incoming gradient) and ``output`` (the forward's result). Tensors that
            it does not name are not saved. A tensor without an entry must not require a gradient.
        scalars: the parameters that are numbers, with their defaults. They have no gradient.
        cpu: a function of the same parameters for CPU tensors, in torch's ops, which also give its gradient.
            None: CPU tensors raise an error.

    Returns:
        A function of the parameters, by position or by name: tensors of float16, bfloat16, float32 or
        float64 on one CUDA device, with shapes that broadcast to one, and Python numbers. It returns a tensor
        of that shape, with the memory layout of the first full-sized tensor. ``gradcheck()`` compares its
        gradients with finite differences; ``source`` is the CUDA C++ around the formula.

    Raises:
        TypeError: for a signature or a formula that is no text.
        ValueError: for a signature that does not parse, for names in ``scalars`` and ``backward`` that it
            does not have, or for a formula of more than 65536 characters.

        A call raises RuntimeError for a formula that does not compile, with the compiler's message, the file
        "forward" or "backward of x", and the line in your text; for a device, a layout or shapes that do not
        fit; for a gradient without a formula, or a derivative of a gradient; and TypeError for another dtype,
        or no tensor.

    Loading an exported program compiles and runs its formulas: load only programs that you trust.
    """
    return Elementwise(signature, forward, backward or {}, scalars or {}, cpu)


def vmap_rule(info: Any, in_dims: Any, inputs: Any, scalars: Any, program: str) -> tuple[Tensor, int]:
    return ops.elementwise(batched(tuple(in_dims[0]), tuple(inputs)), scalars, program), 0


def vmap_backward_rule(
    info: Any, in_dims: Any, grad_output: Tensor, used: Any, scalars: Any, program: str, wanted: Any
) -> Any:
    dims = (in_dims[0], *in_dims[1]) if used else (in_dims[0],)
    operands = batched_gradient(info.batch_size, dims, (grad_output, *used))
    found = ops.elementwise_backward(operands[0], list(operands[1:]), scalars, program, wanted)
    return found, [0] * len(found)


@functools.partial(composed, "elementwise_backward")
def composed_backward(
    grad_output: Tensor, used: Sequence[Tensor], scalars: Any, program: str, wanted: Any
) -> list[Tensor]:
    return [*ElementwiseBackwardFunction.apply(formula_of(program), scalars, wanted, grad_output, *used)]


torch.library.register_vmap("lltm_ext::elementwise", vmap_rule)
torch.library.register_vmap("lltm_ext::elementwise_backward", vmap_backward_rule)
