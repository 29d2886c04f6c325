"""sigmoid: 1 / (1 + e^-x)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lltm_ext._C import sigmoid as _C
from lltm_ext._library import check_tensor, in_place, into, is_plain, ops, transforms_active, vmap_elementwise


def sigmoid_reference(input: Tensor) -> Tensor:
    """The same function in pure PyTorch."""
    return torch.sigmoid(input)


class SigmoidFunction(torch.autograd.Function):
    """``SigmoidFunction.apply(input)``. Saves its output; its derivative is ``output * (1 - output)``."""

    @staticmethod
    def forward(input: Tensor) -> Tensor:
        return ops.sigmoid(input)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (output,) = ctx.saved_tensors
        return ops.sigmoid_backward(grad_output, output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None], input: Tensor) -> tuple[Tensor, int]:
        return vmap_elementwise(sigmoid)(info, in_dims, input)


def sigmoid(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Elementwise logistic function, ``1 / (1 + exp(-input))``.

    Args:
        input: any shape and strides, on CPU or CUDA; float16, bfloat16, float32, float64,
            complex64 or complex128.
        out: where to write the result, of the dtype of ``input`` and any strides, resized if need be; or
            None. Not differentiable.

    Returns:
        A tensor of the shape, dtype and memory format of ``input``; or ``out``. Half types compute in
        float32. On a GPU float32 is within 2 units in the last place. NaN gives NaN, infinity 1 and
        -infinity 0.

    Raises:
        TypeError: for another dtype, or no tensor.
        RuntimeError: for another device or layout; for ``out`` where a gradient is required.

    Source: as :func:`torch.sigmoid`.
    """
    check_tensor("sigmoid", "input", input)
    if out is not None:
        return into(sigmoid, ops.sigmoid_out, out, input)
    if is_plain(input):
        return _C.call_sigmoid(input)
    return SigmoidFunction.apply(input) if transforms_active() else ops.sigmoid(input)


def sigmoid_(input: Tensor) -> Tensor:
    """:func:`sigmoid` in place: overwrites ``input`` and returns it. Differentiable."""
    return in_place(sigmoid, ops.sigmoid_, input)


class Sigmoid(nn.Module):
    """:func:`sigmoid` as a module, called like :class:`torch.nn.Sigmoid`."""

    def forward(self, input: Tensor) -> Tensor:
        return sigmoid(input)


torch.library.register_vmap("lltm_ext::sigmoid", vmap_elementwise(ops.sigmoid))
torch.library.register_vmap("lltm_ext::sigmoid_backward", vmap_elementwise(ops.sigmoid_backward))
