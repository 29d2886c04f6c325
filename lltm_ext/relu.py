"""relu: max(x, 0)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lltm_ext._activations import ACTIVATIONS
from lltm_ext._C import relu as _C
from lltm_ext._library import in_place, ops, scripts_as_op
from lltm_ext._unary import UnaryOp, call, register, unary_function

__all__ = ["ReLU", "ReLUFunction", "relu", "relu_"]


@scripts_as_op
def relu(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Elementwise rectifier, ``max(input, 0)``. Its gradient at 0 is 0.

    Args:
        input: any shape and strides, on CPU or CUDA; float16, bfloat16, float32 or float64.
        out: where to write the result, of the dtype of ``input`` and any strides, resized if need be; or
            None. Not differentiable.

    Returns:
        A tensor of the shape, dtype and memory format of ``input``; or ``out``. NaN gives NaN.

    Raises:
        TypeError: for another dtype, or no tensor.
        RuntimeError: for another device or layout; for ``out`` where a gradient is required.

    Source: as :func:`torch.relu`.
    """
    return call(relu, _C.call_relu, ReLUFunction, input, out)


def relu_(input: Tensor) -> Tensor:
    """:func:`relu` in place: overwrites ``input`` and returns it. Differentiable."""
    return in_place(relu, ops.relu_, input)


def relu_reference(input: Tensor) -> Tensor:
    """:func:`relu` in pure PyTorch."""
    return torch.relu(input)


ReLUFunction = unary_function("ReLUFunction", relu, ops.relu_backward)
register("relu", UnaryOp(relu_reference, relu_, ReLUFunction, ACTIVATIONS["relu"].gradient))


class ReLU(nn.Module):
    """:func:`relu` as a module, called like :class:`torch.nn.ReLU`; ``inplace``: :func:`relu_`."""

    def __init__(self, inplace: bool = False):
        super().__init__()
        self.inplace = inplace

    def forward(self, input: Tensor) -> Tensor:
        if not self.inplace:
            return relu(input)
        relu_(input)  # in torch.jit.script the op, which returns nothing
        return input

    def extra_repr(self) -> str:
        return "inplace=True" if self.inplace else ""
