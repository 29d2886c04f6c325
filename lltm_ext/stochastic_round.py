"""Stochastic rounding of float32 to the half types: up or down at random, right on average."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lltm_ext._C import stochastic_round as _C  # noqa: F401  registers the op
from lltm_ext._library import hand_over, has_tangents, ops, scripts_as_op, takes_over, under_transforms

__all__ = ["StochasticRound", "StochasticRoundFunction", "stochastic_round"]


def stochastic_round_reference(input: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The two values that :func:`stochastic_round` may give, and how likely the upper one is.

    Returns:
        ``(down, up, probability)``: the neighbours of ``input`` in ``dtype``, towards and away from zero, and
        in float64 the probability of ``up``, ``|input - down| / |up - down|``. If only one value is possible,
        both are that value and the probability is 0: if ``dtype`` holds ``input`` exactly, for NaN and
        infinities, and beyond the largest finite value.
    """
    nearest = input.to(dtype)
    x = input.double()
    outside = ~(x.abs() <= torch.finfo(dtype).max)
    away = nearest.double().abs() > x.abs()
    bits = nearest.view(torch.int16)  # integers in the order of the magnitudes
    down = torch.where(away & ~outside, bits - 1, bits).view(dtype)
    exact = outside | (down.double() == x)
    up = torch.where(exact, down.view(torch.int16), down.view(torch.int16) + 1).view(dtype)
    distance = (x - down.double()).abs() / (up.double() - down.double()).abs()
    return down, up, torch.where(exact, 0.0, distance)


class StochasticRoundFunction(torch.autograd.Function):
    """``StochasticRoundFunction.apply(input, dtype, generator=None)``.

    It saves nothing, and passes the gradient on in float32.
    """

    @staticmethod
    def forward(input: Tensor, dtype: torch.dtype, generator: torch.Generator | None = None) -> Tensor:
        return ops.stochastic_round(input, dtype, generator=generator)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.inputs, ctx.dtype = len(inputs), output.dtype

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return tangent.to(ctx.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return grad_output.float(), *[None] * (ctx.inputs - 1)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Tensor, int]:
        return _vmap(StochasticRoundFunction.apply, info, in_dims, *args)


def _vmap(
    function: Callable[..., Tensor], info: Any, in_dims: Any, input: Tensor, *how: Any, **options: Any
) -> tuple[Tensor, int]:
    """The vmap rule: one call on the whole batch, in which each slice has its own random bits."""
    if info.randomness != "different":
        raise RuntimeError(
            f"stochastic_round: expected vmap with randomness='different', got randomness='{info.randomness}'"
        )
    return function(input.movedim(in_dims[0] or 0, 0), *how, **options), 0


@scripts_as_op
def stochastic_round(
    input: Tensor, dtype: torch.dtype, *, generator: torch.Generator | None = None
) -> Tensor:
    """Rounds float32 to one of its two neighbours in a half type, at random and right on average.

    The nearer neighbour is the likelier, so that the expected result is ``input``. A small update to a large
    bfloat16 weight then has its effect on average; rounding to nearest would lose it every time.

    Args:
        input: float32, any shape and strides, on CPU or CUDA.
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        generator: the source of the random numbers, on the device of ``input``; None: torch's default.

    Returns:
        A tensor of ``dtype``, with the shape and memory format of ``input``. Values that ``dtype`` holds
        exactly do not change, nor do NaN and infinities; beyond its largest finite value ``input`` is rounded
        as by ``Tensor.to``. The probability is exact, except for float16 below 2^-14, where it has 16 bits.
        The gradient is the incoming one, in float32 (straight-through).

        The same seed gives the same bits on one device and for one order of the elements in memory. CPU and
        CUDA, eager and compiled, may differ. A CUDA graph takes new numbers at each replay. Under vmap with
        ``randomness="different"`` each slice of a batched input has its own numbers.

    Raises:
        TypeError: for another dtype of either, or no tensor.
        RuntimeError: for another device or layout, a generator on another device, or a vmap with another
            ``randomness``.

    Source: Gupta et al., "Deep Learning with Limited Numerical Precision", 2015,
    https://arxiv.org/abs/1502.02551; the random numbers of Salmon et al., "Parallel Random Numbers: As Easy
    as 1, 2, 3", 2011, https://doi.org/10.1145/2063384.2063405.
    """
    if takes_over("stochastic_round", "input", input):
        return hand_over(stochastic_round, input, dtype, generator=generator)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"stochastic_round: expected dtype to be a torch.dtype, got {type(dtype).__name__}")
    if has_tangents():
        return StochasticRoundFunction.apply(input, dtype, generator)
    return ops.stochastic_round(input, dtype, generator=generator)


class StochasticRound(nn.Module):
    """:func:`stochastic_round` as a module."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, input: Tensor) -> Tensor:
        return stochastic_round(input, self.dtype)

    def extra_repr(self) -> str:
        return f"dtype={self.dtype}"


@functools.partial(under_transforms, "stochastic_round")
def _under_transforms(
    input: Tensor, dtype: torch.dtype, *, generator: torch.Generator | None = None
) -> Tensor:
    return StochasticRoundFunction.apply(input, dtype, generator)
