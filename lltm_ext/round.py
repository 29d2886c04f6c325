"""Rounding with a straight-through gradient: round and binarize."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lltm_ext._C import round as _C  # noqa: F401  registers the ops
from lltm_ext._library import check_tensor, ops, transforms_active, vmap_elementwise


def round_reference(input: Tensor) -> Tensor:
    """The same function in pure PyTorch: the detached difference leaves the identity as gradient."""
    return input + (torch.round(input) - input).detach() if input.requires_grad else torch.round(input)


def binarize_reference(input: Tensor, threshold: float = 0.5) -> Tensor:
    """The same function in pure PyTorch."""
    binary = (input > threshold).to(input.dtype)
    return input + (binary - input).detach() if input.requires_grad else binary


class RoundFunction(torch.autograd.Function):
    """``RoundFunction.apply(input)``. Saves nothing; hands the gradient on as it came."""

    @staticmethod
    def forward(input: Tensor) -> Tensor:
        return ops.round(input)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None], input: Tensor) -> tuple[Tensor, int]:
        return vmap_elementwise(round)(info, in_dims, input)


class BinarizeFunction(torch.autograd.Function):
    """``BinarizeFunction.apply(input, threshold)``. Saves nothing; hands the gradient on as it came."""

    @staticmethod
    def forward(input: Tensor, threshold: float = 0.5) -> Tensor:
        return ops.binarize(input, threshold)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, None], input: Tensor, threshold: float
    ) -> tuple[Tensor, int]:
        return vmap_elementwise(binarize)(info, in_dims, input, threshold)


def round(input: Tensor) -> Tensor:
    """Rounds to the nearest integer, ties to even, with the identity as gradient (straight-through).

    Args:
        input: any shape and strides, on CPU or CUDA; float16, bfloat16, float32 or float64.

    Returns:
        A tensor of the shape, dtype and memory format of ``input``. NaN and infinities stay what they are.

    Raises:
        TypeError: for another dtype, or no tensor.
        RuntimeError: for another device or layout.

    Source: values as :func:`torch.round`; the gradient of Bengio et al., "Estimating or Propagating
    Gradients Through Stochastic Neurons for Conditional Computation", 2013, https://arxiv.org/abs/1308.3432.
    """
    check_tensor("round", "input", input)
    return RoundFunction.apply(input) if transforms_active() else ops.round(input)


def binarize(input: Tensor, threshold: float = 0.5) -> Tensor:
    """1 where ``input > threshold``, else 0, with the identity as gradient (straight-through).

    Args:
        input: any shape and strides, on CPU or CUDA; float16, bfloat16, float32 or float64.
        threshold: compared in the dtype that the op computes in (float32 for half types).

    Returns:
        A tensor of the shape, dtype and memory format of ``input``. NaN gives 0.

    Raises:
        TypeError: for another dtype, or no tensor.
        RuntimeError: for another device or layout.

    Source: as :func:`round`.
    """
    check_tensor("binarize", "input", input)
    return BinarizeFunction.apply(input, threshold) if transforms_active() else ops.binarize(input, threshold)


class Round(nn.Module):
    """:func:`round` as a module."""

    def forward(self, input: Tensor) -> Tensor:
        return round(input)


torch.library.register_vmap("lltm_ext::round", vmap_elementwise(ops.round))
torch.library.register_vmap("lltm_ext::binarize", vmap_elementwise(ops.binarize))
