"""sigmoid: 1 / (1 + e^-x)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lltm_ext._activations import ACTIVATIONS
from lltm_ext._C import sigmoid as _C
from lltm_ext._library import in_place, ops, scripts_as_op
from lltm_ext._unary import UnaryOp, call, register, unary_function

__all__ = ["Sigmoid", "SigmoidFunction", "sigmoid", "sigmoid_"]


@scripts_as_op
def sigmoid(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Elementwise logistic function, ``1 / (1 + exp(-input))``. Its derivative is ``output * (1 - output)``.

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
    return call(sigmoid, _C.call_sigmoid, SigmoidFunction, input, out)


def sigmoid_(input: Tensor) -> Tensor:
    """:func:`sigmoid` in place: overwrites ``input`` and returns it. Differentiable."""
    return in_place(sigmoid, ops.sigmoid_, input)


def sigmoid_reference(input: Tensor) -> Tensor:
    """:func:`sigmoid` in pure PyTorch."""
    return torch.sigmoid(input)


SigmoidFunction = unary_function("SigmoidFunction", sigmoid, ops.sigmoid_backward)
register("sigmoid", UnaryOp(sigmoid_reference, sigmoid_, SigmoidFunction, ACTIVATIONS["sigmoid"].gradient))


class Sigmoid(nn.Module):
    """:func:`sigmoid` as a module, called like :class:`torch.nn.Sigmoid`."""

    def forward(self, input: Tensor) -> Tensor:
        return sigmoid(input)
