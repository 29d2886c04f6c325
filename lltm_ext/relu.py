"""relu: max(x, 0)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lltm_ext._C import relu as _C
from lltm_ext._library import check_tensor, in_place, into, is_plain, ops, transforms_active, vmap_elementwise


def relu_reference(input: Tensor) -> Tensor:
    """The same function in pure PyTorch."""
    return torch.relu(input)


class ReLUFunction(torch.autograd.Function):
    """``ReLUFunction.apply(input)``. Saves its output; its derivative is 1 above 0, else 0."""

    @staticmethod
    def forward(input: Tensor) -> Tensor:
        return ops.relu(input)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (output,) = ctx.saved_tensors
        return ops.relu_backward(grad_output, output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None], input: Tensor) -> tuple[Tensor, int]:
        return vmap_elementwise(relu)(info, in_dims, input)


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
    check_tensor("relu", "input", input)
    if out is not None:
        return into(relu, ops.relu_out, out, input)
    if is_plain(input):
        return _C.call_relu(input)
    return ReLUFunction.apply(input) if transforms_active() else ops.relu(input)


def relu_(input: Tensor) -> Tensor:
    """:func:`relu` in place: overwrites ``input`` and returns it. Differentiable."""
    return in_place(relu, ops.relu_, input)


class ReLU(nn.Module):
    """:func:`relu` as a module, called like :class:`torch.nn.ReLU`; ``inplace``: :func:`relu_`."""

    def __init__(self, inplace: bool = False):
        super().__init__()
        self.inplace = inplace

    def forward(self, input: Tensor) -> Tensor:
        return relu_(input) if self.inplace else relu(input)

    def extra_repr(self) -> str:
        return "inplace=True" if self.inplace else ""


torch.library.register_vmap("lltm_ext::relu", vmap_elementwise(ops.relu))
torch.library.register_vmap("lltm_ext::relu_backward", vmap_elementwise(ops.relu_backward))
