"""gemm: the product of matrices, or of batches of them, with bias and activation in the same kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lltm_ext._C import gemm as _C  # noqa: F401  registers the ops
from lltm_ext._library import check_tensor, ops, transforms_active, vmap_elementwise, vmap_loop

_ACTIVATIONS = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "elu": torch.nn.functional.elu,
}


def gemm_reference(a: Tensor, b: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """The same function in pure PyTorch; half types round before the bias and before the activation too."""
    product = torch.matmul(a, b)
    if bias is not None:
        product = product + bias
    return product if activation is None else _ACTIVATIONS[activation](product)


class GemmFunction(torch.autograd.Function):
    """``GemmFunction.apply(a, b, bias=None, activation=None, precision="ieee")``.

    Saves the operands that the wanted gradients need, and the output if there is an activation, whose
    derivative follows from it. With ``g = grad_output * activation'(output)`` the gradients are ``g @ b^T``,
    ``a^T @ g`` and the sum of g's rows.
    """

    @staticmethod
    def forward(
        a: Tensor,
        b: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        precision: str = "ieee",
    ) -> Tensor:
        return ops.gemm(a, b, bias, activation=activation, precision=precision)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, str | None, str], output: Tensor
    ) -> None:
        a, b, _, ctx.activation, ctx.precision = inputs
        ctx.save_for_backward(
            a if ctx.needs_input_grad[1] else None,
            b if ctx.needs_input_grad[0] else None,
            output if ctx.activation is not None else None,
        )

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        a, b, output = ctx.saved_tensors
        grad = (
            grad_output
            if output is None
            else ops.gemm_activation_backward(grad_output, output, ctx.activation)
        )
        # Under autocast the operands were cast inside the op; autograd casts the gradients back.
        grad_a = gemm(grad, b.mT.to(grad.dtype), precision=ctx.precision) if ctx.needs_input_grad[0] else None
        grad_b = gemm(a.mT.to(grad.dtype), grad, precision=ctx.precision) if ctx.needs_input_grad[1] else None
        grad_bias = grad.sum(tuple(range(grad.dim() - 1))) if ctx.needs_input_grad[2] else None
        return grad_a, grad_b, grad_bias, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Sequence[int | None],
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        activation: str | None,
        precision: str,
    ) -> tuple[Tensor, int]:
        return _vmap(gemm)(info, in_dims, a, b, bias, activation=activation, precision=precision)


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    precision: str = "ieee",
) -> Tensor:
    """Matrix product, ``activation(a @ b + bias)``.

    Args:
        a: ``[M, K]`` or ``[B, M, K]``, on CPU or CUDA; float16, bfloat16, float32 or float64.
        b: ``[K, N]``, or ``[B, K, N]`` with the batch of ``a``.
        bias: ``[N]``, added to every row; or None.
        activation: None, ``"relu"``, ``"sigmoid"``, ``"tanh"`` or ``"elu"``.
        precision: ``"ieee"``, which is products and sums in float64 for float64, else in float32.

        Any strides: a transposed, expanded or misaligned operand is read where it lies, without a copy. Any
        sizes, 0 too (with K = 0 the product is 0). All tensors are of one dtype and on one device.

    Returns:
        ``[M, N]`` or ``[B, M, N]``, contiguous, of the dtype of ``a``. Bias and activation are applied before
        the one rounding to half types. The same call gives the same bits every time.

    Raises:
        TypeError: for another dtype, dtypes that differ, or no tensor.
        RuntimeError: for other shapes, devices or layouts.
        ValueError: for another activation or precision.

    Source: as :func:`torch.matmul`; blocks and panels on the CPU after Goto and van de Geijn, "Anatomy of
    High-Performance Matrix Multiplication", 2008, https://doi.org/10.1145/1356052.1356053.
    """
    check_tensor("gemm", "a", a)
    check_tensor("gemm", "b", b)
    if bias is not None:
        check_tensor("gemm", "bias", bias)
    if transforms_active():
        return GemmFunction.apply(a, b, bias, activation, precision)
    return ops.gemm(a, b, bias, activation=activation, precision=precision)


def _vmap(product: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    """The vmap rule, on gemm or its op: one call, whose batch is vmap's, and expands what is not mapped."""

    def rule(
        info: Any, in_dims: Sequence[int | None], a: Tensor, b: Tensor, bias: Tensor | None = None, **how: Any
    ) -> tuple[Tensor, int]:
        a_dim, b_dim, bias_dim = (*in_dims, None)[:3]
        dim = a.dim() - (a_dim is not None)
        if bias_dim is not None or dim != b.dim() - (b_dim is not None):
            # A bias for each slice is no bias of the batch. (Operands that do not fit get their error.)
            def one(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
                return product(a, b, bias=bias, **how)

            return vmap_loop(one)(info, (a_dim, b_dim, bias_dim), a, b, bias)
        a = a.expand(info.batch_size, *a.shape) if a_dim is None else a.movedim(a_dim, 0)
        b = b.expand(info.batch_size, *b.shape) if b_dim is None else b.movedim(b_dim, 0)
        if dim != 3:
            return product(a, b, bias=bias, **how), 0
        c = product(a.flatten(0, 1), b.flatten(0, 1), bias=bias, **how)
        return c.unflatten(0, a.shape[:2]), 0

    return rule


torch.library.register_vmap("lltm_ext::gemm", _vmap(ops.gemm))
torch.library.register_vmap(
    "lltm_ext::gemm_activation_backward", vmap_elementwise(ops.gemm_activation_backward)
)
