"""Elementwise ops of one tensor, each declared once.

:func:`unary_op` makes the Python side of an op from one declaration. The selftest, the portable library and
the tests read the declarations in ``UNARY_OPS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from lltm_ext._library import (
    check_tensor,
    describe,
    has_tangents,
    in_place,
    into,
    is_plain,
    ops,
    under_transforms,
    vmap_elementwise,
)

F = TypeVar("F", bound=Callable[..., Tensor])
Gradient = Callable[..., Tensor]


class UnaryOp(NamedTuple):
    """A declared op. Its parameters, if any, follow the input in each function."""

    reference: Callable[..., Tensor]
    in_place: Callable[..., Tensor]
    Function: type[torch.autograd.Function]
    # What the op <name>_backward computes of (grad_output, saved tensor, *parameters), in torch's
    # differentiable ops; None where the gradient passes unchanged, without an op.
    gradient: Gradient | None
    saves_input: bool = False  # instead of the output


UNARY_OPS: dict[str, UnaryOp] = {}


class OfInput(Protocol):
    """The type of a function without parameters."""

    def __call__(self, input: Tensor) -> Tensor: ...


def forms(name: str) -> tuple[OfInput, OfInput, type[torch.autograd.Function]]:
    """The reference, the in-place form and the autograd Function that :func:`unary_op` made."""
    return UNARY_OPS[name][:3]


def register(name: str, op: UnaryOp) -> None:
    """Adds a declaration, and the rules of its dispatcher ops under torch.func."""

    def in_place(*args: Any) -> None:
        op.in_place(*args)

    UNARY_OPS[name] = op
    under_transforms(name, op.Function.apply)
    under_transforms(f"{name}_", in_place)
    if op.gradient:
        backward = f"{name}_backward"
        torch.library.register_vmap(f"lltm_ext::{backward}", vmap_elementwise(getattr(ops, backward)))


def unary_op(
    call: Callable[[Tensor], Tensor], function_class: str, gradient: Gradient | None = None
) -> Callable[[F], F]:
    """Declares an op: decorates its reference in pure PyTorch, with the signature ``(input, *, out=None)``.

    Returns the function that runs the op, under the name and docstring of the reference; :func:`forms` has
    the rest.

    Args:
        call: the binding ``_C.call_<name>``, which takes half the host time of ``torch.ops``.
        function_class: the name of the autograd Function.
        gradient: as in :class:`UnaryOp`, of the output.
    """

    def declare(reference: F) -> F:
        name, module = reference.__name__, reference.__module__
        op, op_in_place, op_out = (getattr(ops, name + form) for form in ("", "_", "_out"))
        op_backward = getattr(ops, f"{name}_backward") if gradient else None

        def function(input: Tensor, *, out: Tensor | None = None) -> Tensor:
            check_tensor(name, "input", input)
            if out is not None:
                return into(function, op_out, out, input)
            if is_plain(input):
                return call(input)
            return Function.apply(input) if has_tangents() else op(input)

        def function_(input: Tensor) -> Tensor:
            return in_place(function, op_in_place, input)

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(input: Tensor) -> Tensor:
                return op(input)

            @staticmethod
            def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
                if op_backward is not None:
                    ctx.save_for_backward(output)
                    ctx.save_for_forward(output)

            @staticmethod
            def backward(ctx: Any, grad_output: Tensor) -> Tensor:
                return grad_output if op_backward is None else op_backward(grad_output, *ctx.saved_tensors)

            @staticmethod
            def jvp(ctx: Any, tangent: Tensor) -> Tensor:
                # The gradient of a complex function takes the conjugate of its derivative.
                return Function.backward(ctx, tangent.conj()).conj() if op_backward else tangent.clone()

            @staticmethod
            def vmap(info: Any, in_dims: tuple[int | None], input: Tensor) -> tuple[Tensor, int]:
                return vmap_elementwise(function)(info, in_dims, input)

        saves = "its output" if gradient else "nothing; passes the gradient on unchanged"
        describe(function, module, name, reference.__doc__)
        describe(reference, module, f"{name}_reference", f":func:`{name}` in pure PyTorch.")
        describe(function_, module, f"{name}_", IN_PLACE_DOC.format(name=name))
        describe(Function, module, function_class, f"``{function_class}.apply(input)``. Saves {saves}.")
        register(name, UnaryOp(reference, function_, Function, gradient))
        return function  # type: ignore[return-value]

    return declare


IN_PLACE_DOC = ":func:`{name}` in place: overwrites ``input`` and returns it. Differentiable."
