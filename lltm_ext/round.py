"""Steps with a straight-through gradient: round, floor, ceil, trunc and binarize.

The derivative of a step is 0 almost everywhere, so nothing can be learnt through it. A straight-through
gradient replaces it by that of the identity, or of a smooth curve.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lltm_ext._C import round as _C
from lltm_ext._library import (
    hand_over,
    has_tangents,
    in_place,
    into,
    ops,
    scripts_as_op,
    takes_over,
    vmap_elementwise,
)
from lltm_ext._unary import UnaryOp, call, register, unary_function

__all__ = [
    "Binarize",
    "BinarizeFunction",
    "Ceil",
    "CeilFunction",
    "Floor",
    "FloorFunction",
    "Round",
    "RoundFunction",
    "Trunc",
    "TruncFunction",
    "binarize",
    "binarize_",
    "ceil",
    "ceil_",
    "floor",
    "floor_",
    "round",
    "round_",
    "trunc",
    "trunc_",
]


def _straight_through(step: Tensor, curve: Tensor) -> Tensor:
    """The values of ``step`` with the gradient of ``curve``: the detached difference has none."""
    return curve + (step - curve).detach() if curve.requires_grad else step


@scripts_as_op
def round(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rounds to the nearest integer, ties to even, with the identity as gradient (straight-through).

    Args:
        input: any shape and strides, on CPU or CUDA; float16, bfloat16, float32 or float64.
        out: where to write the result, of the dtype of ``input`` and any strides, resized if need be; or
            None. Not differentiable.

    Returns:
        A tensor of the shape, dtype and memory format of ``input``; or ``out``. NaN and infinities are
        unchanged.

    Raises:
        TypeError: for another dtype, or no tensor.
        RuntimeError: for another device or layout; for ``out`` where a gradient is required.

    Source: values as :func:`torch.round`; the gradient of Bengio et al., "Estimating or Propagating
    Gradients Through Stochastic Neurons for Conditional Computation", 2013, https://arxiv.org/abs/1308.3432.
    """
    return call(round, _C.call_round, RoundFunction, input, out)


def round_(input: Tensor) -> Tensor:
    """:func:`round` in place: overwrites ``input`` and returns it. Differentiable."""
    return in_place(round, ops.round_, input)


def round_reference(input: Tensor) -> Tensor:
    """:func:`round` in pure PyTorch."""
    return _straight_through(torch.round(input), input)


@scripts_as_op
def floor(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The largest integer that is not above ``input``, with the identity as gradient.

    Arguments, result and errors as of :func:`round`; values as :func:`torch.floor`.
    """
    return call(floor, _C.call_floor, FloorFunction, input, out)


def floor_(input: Tensor) -> Tensor:
    """:func:`floor` in place: overwrites ``input`` and returns it. Differentiable."""
    return in_place(floor, ops.floor_, input)


def floor_reference(input: Tensor) -> Tensor:
    """:func:`floor` in pure PyTorch."""
    return _straight_through(torch.floor(input), input)


@scripts_as_op
def ceil(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The smallest integer that is not below ``input``, with the identity as gradient.

    Arguments, result and errors as of :func:`round`; values as :func:`torch.ceil`.
    """
    return call(ceil, _C.call_ceil, CeilFunction, input, out)


def ceil_(input: Tensor) -> Tensor:
    """:func:`ceil` in place: overwrites ``input`` and returns it. Differentiable."""
    return in_place(ceil, ops.ceil_, input)


def ceil_reference(input: Tensor) -> Tensor:
    """:func:`ceil` in pure PyTorch."""
    return _straight_through(torch.ceil(input), input)


@scripts_as_op
def trunc(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``input`` without its fractional part, with the identity as gradient.

    Arguments, result and errors as of :func:`round`; values as :func:`torch.trunc`.
    """
    return call(trunc, _C.call_trunc, TruncFunction, input, out)


def trunc_(input: Tensor) -> Tensor:
    """:func:`trunc` in place: overwrites ``input`` and returns it. Differentiable."""
    return in_place(trunc, ops.trunc_, input)


def trunc_reference(input: Tensor) -> Tensor:
    """:func:`trunc` in pure PyTorch."""
    return _straight_through(torch.trunc(input), input)


RoundFunction = unary_function("RoundFunction", round, backward=None)
register("round", UnaryOp(round_reference, round_, RoundFunction, gradient=None))
FloorFunction = unary_function("FloorFunction", floor, backward=None)
register("floor", UnaryOp(floor_reference, floor_, FloorFunction, gradient=None))
CeilFunction = unary_function("CeilFunction", ceil, backward=None)
register("ceil", UnaryOp(ceil_reference, ceil_, CeilFunction, gradient=None))
TruncFunction = unary_function("TruncFunction", trunc, backward=None)
register("trunc", UnaryOp(trunc_reference, trunc_, TruncFunction, gradient=None))


straight_through_round = round  # the name round is torch's function to torch.jit.script


class Round(nn.Module):
    """:func:`round` as a module."""

    def forward(self, input: Tensor) -> Tensor:
        return straight_through_round(input)


class Floor(nn.Module):
    """:func:`floor` as a module."""

    def forward(self, input: Tensor) -> Tensor:
        return floor(input)


class Ceil(nn.Module):
    """:func:`ceil` as a module."""

    def forward(self, input: Tensor) -> Tensor:
        return ceil(input)


class Trunc(nn.Module):
    """:func:`trunc` as a module."""

    def forward(self, input: Tensor) -> Tensor:
        return trunc(input)


def binarize_reference(
    input: Tensor, threshold: float = 0.5, low: float = 0.0, high: float = 1.0, grad: str = "identity"
) -> Tensor:
    """:func:`binarize` in pure PyTorch."""
    x = input if input.dtype == torch.float64 else input.float()
    half = (high - low) / 2
    curves: dict[str, Callable[[], Tensor]] = {
        "identity": lambda: x,
        # The slope is 1 at the ends of the ramp too. torch.clamp's gradient there differs between versions.
        "clipped": lambda: torch.where((x - threshold).abs() <= half, x, 0.0),
        "tanh": lambda: half * torch.tanh((x - threshold) / half),
    }
    step = torch.where(x > threshold, high, low).to(x.dtype)
    return _straight_through(step, curves[grad]()).to(input.dtype)


class BinarizeFunction(torch.autograd.Function):
    """``BinarizeFunction.apply(input, threshold, low, high, grad)``.

    With ``"identity"`` it saves nothing and passes the gradient on unchanged; otherwise it saves its input.
    """

    @staticmethod
    def forward(
        input: Tensor, threshold: float = 0.5, low: float = 0.0, high: float = 1.0, grad: str = "identity"
    ) -> Tensor:
        return ops.binarize(input, threshold, low, high, grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        # Holds only what the caller gave; the rest has its default.
        defaults = (0.5, 0.0, 1.0, "identity")
        ctx.how = inputs[1:] + defaults[len(inputs) - 1 :]
        ctx.inputs = len(inputs)
        saved = [] if ctx.how[-1] == "identity" else inputs[:1]
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: under activation checkpointing each access unpacks them
        gradient = ops.binarize_backward(grad_output, *saved, *ctx.how) if saved else grad_output
        return gradient, *[None] * (ctx.inputs - 1)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        saved = ctx.saved_tensors
        return ops.binarize_backward(tangent, *saved, *ctx.how) if saved else tangent.clone()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return vmap_elementwise(binarize)(info, in_dims, *inputs)


@scripts_as_op
def binarize(
    input: Tensor,
    threshold: float = 0.5,
    low: float = 0.0,
    high: float = 1.0,
    grad: str = "identity",
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``high`` where ``input > threshold``, else ``low``, with a straight-through gradient.

    Args:
        input: any shape and strides, on CPU or CUDA; float16, bfloat16, float32 or float64.
        threshold: compared in the dtype that the op computes in (float32 for half types).
        low, high: the two values; ``low < high``.
        grad: what the gradient is taken to be, with ``half = (high - low) / 2``: that of ``"identity"``;
            ``"clipped"``, of a ramp, 1 where ``|input - threshold| <= half``, else 0; ``"tanh"``, of
            ``half * tanh((input - threshold) / half)``.
        out: where to write the result, of the dtype of ``input`` and any strides, resized if need be; or
            None. Not differentiable.

    Returns:
        A tensor of the shape, dtype and memory format of ``input``; or ``out``. NaN gives ``low``.

    Raises:
        TypeError: for another dtype, or no tensor.
        ValueError: for another ``grad``, or ``low`` not below ``high``.
        RuntimeError: for another device or layout; for ``out`` where a gradient is required.

    Source: identity, Bengio et al., 2013, https://arxiv.org/abs/1308.3432; clipped, Hubara et al., "Binarized
    Neural Networks", 2016, https://arxiv.org/abs/1602.02830 (with threshold 0, low -1, high 1); tanh, Gong et
    al., "Differentiable Soft Quantization", 2019, https://arxiv.org/abs/1908.05033.
    """
    if takes_over("binarize", "input", input):
        return hand_over(binarize, input, threshold, low, high, grad, out=out)
    if out is not None:
        return into(binarize, ops.binarize_out, out, input, threshold, low, high, grad)
    if has_tangents():
        return BinarizeFunction.apply(input, threshold, low, high, grad)
    return ops.binarize(input, threshold, low, high, grad)


def binarize_(
    input: Tensor, threshold: float = 0.5, low: float = 0.0, high: float = 1.0, grad: str = "identity"
) -> Tensor:
    """:func:`binarize` in place: overwrites ``input`` and returns it. Differentiable.

    A gradient other than the identity needs the old values, so a copy of them is kept.
    """
    saves_input = grad != "identity"
    return in_place(binarize, ops.binarize_, input, threshold, low, high, grad, saves_input=saves_input)


class Binarize(nn.Module):
    """:func:`binarize` as a module."""

    def __init__(self, threshold: float = 0.5, low: float = 0.0, high: float = 1.0, grad: str = "identity"):
        super().__init__()
        self.threshold, self.low, self.high, self.grad = float(threshold), float(low), float(high), grad

    def forward(self, input: Tensor) -> Tensor:
        return binarize(input, self.threshold, self.low, self.high, self.grad)

    def extra_repr(self) -> str:
        return f"threshold={self.threshold}, low={self.low}, high={self.high}, grad={self.grad!r}"


def _gradient(
    grad_output: Tensor, input: Tensor, threshold: float, low: float, high: float, grad: str
) -> Tensor:
    half = (high - low) / 2
    if grad == "clipped":
        return grad_output.masked_fill(~((input - threshold).abs() <= half), 0)
    if grad == "tanh":
        return grad_output * (1 - torch.tanh((input - threshold) / half).square())
    return grad_output.view_as(grad_output)


register("binarize", UnaryOp(binarize_reference, binarize_, BinarizeFunction, _gradient, saves_input=True))
