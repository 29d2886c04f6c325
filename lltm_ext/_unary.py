"""What elementwise ops of one tensor share.

Each op declares itself once by :func:`register`. The selftest, the portable library and the tests read the
declarations in ``UNARY_OPS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lltm_ext._library import (
    composed,
    describe,
    hand_over,
    has_tangents,
    into,
    is_plain,
    ops,
    scripts_as_op,
    takes_over,
    under_transforms,
    vmap_elementwise,
)

Gradient = Callable[..., Tensor]


class UnaryOp(NamedTuple):
    """A declared op. Its parameters, if any, follow the input in each function."""

    reference: Callable[..., Tensor]
    in_place: Callable[..., Tensor]
    Function: type[torch.autograd.Function]
    # What the op <name>_backward computes of (grad_output, saved tensor, *parameters), in torch's
    # differentiable ops; None where the gradient passes unchanged, without an op.
    gradient: Gradient | None
    saves_input: bool = False  # whether backward needs the input instead of the output


UNARY_OPS: dict[str, UnaryOp] = {}


def register(name: str, op: UnaryOp) -> None:
    """Adds a declaration, and the rules of its dispatcher ops under torch.func and for second derivatives."""

    def in_place(*args: Any) -> None:
        op.in_place(*args)

    UNARY_OPS[name] = op
    scripts_as_op(op.in_place)
    under_transforms(name, op.Function.apply)
    under_transforms(f"{name}_", in_place)
    if op.gradient:
        backward = f"{name}_backward"
        composed(backward, op.gradient)
        torch.library.register_vmap(f"lltm_ext::{backward}", vmap_elementwise(getattr(ops, backward)))


def call(
    function: Callable[..., Tensor],
    binding: Callable[[Tensor], Tensor],
    Function: type[torch.autograd.Function],
    input: Tensor,
    out: Tensor | None,
) -> Tensor:
    """Runs the op of a public function without parameters, by the way that its input needs.

    Args:
        binding: ``_C.call_<name>``, which takes half the host time of ``torch.ops``.
        Function: for forward-mode AD, which cannot enter a C++ autograd function.
    """
    name = function.__name__
    if takes_over(name, "input", input):
        return hand_over(function, input, out=out)
    if out is not None:
        return into(function, getattr(ops, f"{name}_out"), out, input)
    if is_plain(input):
        return binding(input)
    return Function.apply(input) if has_tangents() else getattr(ops, name)(input)


def unary_function(
    class_name: str, function: Callable[[Tensor], Tensor], backward: Callable[[Tensor, Tensor], Tensor] | None
) -> type[torch.autograd.Function]:
    """The autograd Function of an op without parameters.

    Args:
        class_name: its name.
        function: the op's public function, which gives the dispatcher op its name.
        backward: the dispatcher op of (grad_output, output); None: the gradient passes unchanged.
    """
    op = getattr(ops, function.__name__)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(input: Tensor) -> Tensor:
            return op(input)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
            if backward is not None:
                ctx.save_for_backward(output)
                ctx.save_for_forward(output)

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:
            return grad_output if backward is None else backward(grad_output, *ctx.saved_tensors)

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            # The gradient of a complex function takes the conjugate of its derivative.
            return Function.backward(ctx, tangent.conj()).conj() if backward else tangent.clone()

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None], input: Tensor) -> tuple[Tensor, int]:
            return vmap_elementwise(function)(info, in_dims, input)

    saves = "its output" if backward else "nothing; passes the gradient on unchanged"
    describe(Function, function.__module__, class_name, f"``{class_name}.apply(input)``. Saves {saves}.")
    return Function
