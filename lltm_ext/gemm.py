"""gemm: the product of matrices, or of batches of them, with bias and activation in the same kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lltm_ext._activations import ACTIVATIONS
from lltm_ext._C import gemm as _C  # noqa: F401  registers the ops
from lltm_ext._library import (
    check_tensor,
    composed,
    differentiable_tangents,
    hand_over,
    has_tangents,
    ops,
    scripts_as_op,
    takes_over,
    under_transforms,
    vmap_elementwise,
    vmap_loop,
)

__all__ = ["GemmFunction", "Linear", "gemm"]

_SAVE_INPUT = tuple(name for name, activation in ACTIVATIONS.items() if activation.saves_input)


def gemm_reference(a: Tensor, b: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """:func:`gemm` in pure PyTorch; half types also round before the bias and before the activation."""
    product = torch.matmul(a, b)
    if bias is not None:
        product = product + bias
    return product if activation is None else ACTIVATIONS[activation].reference(product)


def _outputs_reference(
    a: Tensor, b: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor, ...]:
    """The outputs of :class:`_Product`, in pure PyTorch."""
    output = gemm_reference(a, b, bias, activation)
    return (output, gemm_reference(a, b, bias)) if activation in _SAVE_INPUT else (output,)


class _Product(torch.autograd.Function):
    """Returns ``(c,)``, or ``(c, c before the activation)`` if the derivative needs the latter.

    The latter is an output because setup_context sees only inputs and outputs, and because the double
    backward goes through it.
    """

    @staticmethod
    def forward(
        a: Tensor, b: Tensor, bias: Tensor | None, activation: str | None, precision: str
    ) -> tuple[Tensor, ...]:
        if activation in _SAVE_INPUT:
            return ops.gemm_forward(a, b, bias, activation, precision)
        return (ops.gemm(a, b, bias, activation=activation, precision=precision),)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        a, b, bias, ctx.activation, ctx.precision = inputs
        ctx.shapes = a.shape, b.shape
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            a if ctx.needs_input_grad[1] else None,
            b if ctx.needs_input_grad[0] else None,
            output[-1] if ctx.activation is not None else None,
        )
        ctx.save_for_forward(a, b, bias)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        reference = functools.partial(_outputs_reference, activation=ctx.activation)
        return differentiable_tangents(reference, ctx.saved_tensors, tangents[:3])

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_before: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        a, b, saved = ctx.saved_tensors
        grad_a = grad_b = grad_bias = None
        if grad is not None and saved is not None:
            if ctx.needs_input_grad[2] and grad_before is None:
                grad, grad_bias = ops.gemm_activation_bias_backward(grad, saved, ctx.activation)
            else:
                grad = ops.gemm_activation_backward(grad, saved, ctx.activation)
        if grad_before is not None:
            grad = grad_before if grad is None else grad + grad_before
        if grad is not None:
            # Autocast casts the operands inside the op; autograd casts the gradients back.
            if ctx.needs_input_grad[0]:
                grad_a = gemm(grad, b.mT.to(grad.dtype), precision=ctx.precision).sum_to_size(ctx.shapes[0])
            if ctx.needs_input_grad[1]:
                grad_b = gemm(a.mT.to(grad.dtype), grad, precision=ctx.precision).sum_to_size(ctx.shapes[1])
            if ctx.needs_input_grad[2] and grad_bias is None:
                grad_bias = grad.sum(tuple(range(grad.dim() - 1)))
        return grad_a, grad_b, grad_bias, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[tuple[Tensor, ...], int]:
        return _vmap(lambda *operands: _Product.apply(*operands, *args[3:]))(info, in_dims, *args[:3])


class GemmFunction(_Product):
    """``GemmFunction.apply(a, b, bias=None, activation=None, precision="ieee")``; see :func:`gemm`.

    Saves the operands that the wanted gradients need, and the output of the activation, or its input for
    gelu, gelu_tanh and silu. With ``g = grad_output * activation'`` the gradients are ``g @ b^T``,
    ``a^T @ g`` and the sum of g's rows.
    """

    @classmethod
    def apply(
        cls,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        precision: str = "ieee",
    ) -> Tensor:
        return _Product.apply(a, b, bias, activation, precision)[0]


@scripts_as_op
def gemm(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    precision: str = "ieee",
    out: Tensor | None = None,
) -> Tensor:
    """Matrix product, ``activation(a @ b + bias)``.

    Args:
        a: ``[M, K]`` or ``[B, M, K]``, on CPU or CUDA; float16, bfloat16, float32 or float64.
        b: ``[K, N]`` or ``[B, K, N]``. A single matrix, or a batch of one, serves the other's whole batch.
        bias: ``[N]``, added to every row; or None.
        activation: None, ``"relu"``, ``"sigmoid"``, ``"tanh"``, ``"elu"``, ``"gelu"``, ``"gelu_tanh"`` (its
            approximation by tanh) or ``"silu"``. At -inf the last three are NaN, as in torch; in half types
            on Hopper they may be 0.
        precision: how float32 is multiplied. ``"ieee"``: products and sums in float32. ``"bf16x6"``: each
            value as the sum of three bfloat16, and six of their nine products summed in float32; as exact
            as ``"ieee"`` for finite values from 1e-33 on (smaller ones lose their last bits, infinities may
            give NaN). ``"tf32"``: values rounded to 11 bits, but for products so small that ``"ieee"`` is
            faster. ``"bf16x6"`` is for Hopper, ``"tf32"`` for GPUs from compute capability 8.0 on; other
            GPUs, and other dtypes, compute as ``"ieee"``, and so does ``"bf16x9"``, which once summed all
            nine products. torch's own switches for TF32 make no difference.
        out: where to write the result, of its shape and any strides; or None. Not differentiable.

        Any strides: a transposed operand is read in place, without a copy. (On Hopper an operand in a half
        type whose rows are not a multiple of 16 bytes apart is copied first if that is faster. cuBLAS, which
        multiplies what it multiplies faster, reads a copy of an operand that is contiguous along neither
        dimension. ``"bf16x6"`` reads copies. Long sums of few results take a workspace of at most 64 MiB.)
        Any sizes, including 0 (with K = 0 the product is 0). All tensors have one dtype and are on one
        device.

    Returns:
        ``[M, N]`` or ``[B, M, N]``, contiguous, of the dtype of ``a``; or ``out``. Bias and activation are
        applied before the one rounding to half types; where cuBLAS multiplies, the activation is applied
        after it, and rounded too. The same call gives the same bits every time.

    Raises:
        TypeError: for another dtype, dtypes that differ, or no tensor.
        RuntimeError: for other shapes, devices or layouts; for ``out`` where a gradient is required.
        ValueError: for another activation or precision.

    Source: as :func:`torch.matmul`; blocks and panels on the CPU after Goto and van de Geijn, "Anatomy of
    High-Performance Matrix Multiplication", 2008, https://doi.org/10.1145/1356052.1356053.
    """
    others = takes_over("gemm", "a", a) or takes_over("gemm", "b", b)
    if others or (bias is not None and takes_over("gemm", "bias", bias)):
        return hand_over(gemm, a, b, bias=bias, activation=activation, precision=precision, out=out)
    if out is not None:
        check_tensor("gemm", "out", out)
        ops.gemm_out(a, b, bias, activation, precision, out)
        return out
    if has_tangents():
        return GemmFunction.apply(a, b, bias, activation, precision)
    return ops.gemm(a, b, bias, activation=activation, precision=precision)


class Linear(nn.Module):
    """``activation(input @ weight^T + bias)``: :class:`torch.nn.Linear` and its activation in one kernel.

    Without an activation it is an instance of nn.Linear. With one it is not, because tools that merge, fuse
    or quantize each nn.Linear of a model take it for an affine map.

    Args:
        in_features: the size of the last dimension of the input.
        out_features: the size of the last dimension of the output.
        bias: whether there is a bias.
        activation: as for :func:`gemm`.

    Attributes:
        weight: [out_features, in_features]; bias: [out_features]; initialised as in nn.Linear, whose
        checkpoints load here.

    Shapes:
        input [..., in_features], output [..., out_features].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if activation is not None and not (isinstance(activation, str) and activation in ACTIVATIONS):
            names = ", ".join(repr(name) for name in ACTIVATIONS)
            raise ValueError(f"Linear: expected activation None or one of {names}, got {activation!r}")
        for name, size in {"in_features": in_features, "out_features": out_features}.items():
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"Linear: expected {name} to be an int, got {type(size).__name__}")
            if not 0 <= size < 2**31:
                raise ValueError(f"Linear: expected {name} from 0 to below 2^31, got {size}")
        nn.Module.__init__(self)  # super() may be nn.Linear
        self.activation = activation
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters as nn.Linear does."""
        nn.Linear.reset_parameters(self)  # type: ignore[arg-type]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "activation":
            self._choose_class(value)
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._choose_class(self.activation)

    def _choose_class(self, activation: Any) -> None:
        """Makes this an nn.Linear without an activation, and no nn.Linear with one."""
        cls: Any = type(self)
        is_affine = isinstance(self, nn.Linear)
        if is_affine == (activation is None):
            return
        new = vars(cls).get("_any_activation") if is_affine else _affine(cls)
        if new is None or is_parametrized(self):  # another one changed the class, and would change it back
            expected = "activation None, as it is an" if is_affine else "an activation, as it is no"
            raise RuntimeError(f"{cls.__name__}: expected {expected} nn.Linear, got {activation!r}")
        self.__class__ = new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle names the class that can be imported. __setstate__ makes it affine."""
        cls: Any = type(self)
        if "_any_activation" not in vars(cls):
            return super().__reduce_ex__(protocol)
        # From protocol 2 on, pickle insists on the class of the object.
        function, arguments, *state = cast(tuple[Any, ...], super().__reduce_ex__(0))
        return function, tuple(cls._any_activation if x is cls else x for x in arguments), *state

    def forward(self, input: Tensor) -> Tensor:
        check_tensor("Linear", "input", input)
        if input.layout != torch.strided:
            raise RuntimeError(f"Linear: expected input of layout torch.strided, got {input.layout}")
        if input.dim() == 0 or input.shape[-1] != self.in_features:
            raise RuntimeError(
                f"Linear: expected input of shape [..., in_features] with in_features = {self.in_features}, "
                f"got {list(input.shape)}"
            )
        rows = input.flatten(0, -2) if input.dim() > 1 else input[None]
        output = gemm(rows, self.weight.t(), bias=self.bias, activation=self.activation)
        return output.view(input.shape[:-1] + output.shape[1:])

    def extra_repr(self) -> str:
        activation = "" if self.activation is None else f", activation={self.activation!r}"
        return nn.Linear.extra_repr(self) + activation  # type: ignore[arg-type]


@functools.cache
def _affine(cls: type[Linear]) -> Any:
    """The subclass of ``cls`` that is an nn.Linear too, which users see as ``cls``."""
    seen = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (cls, nn.Linear), seen | {"_any_activation": cls})


def _vmap(product: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """The vmap rule of gemm's op or Function: one call, with vmap's batch as its own."""

    def rule(
        info: Any, in_dims: Sequence[int | None], a: Tensor, b: Tensor, bias: Tensor | None = None, **how: Any
    ) -> tuple[Any, Any]:
        a_dim, b_dim, bias_dim = (*in_dims, None)[:3]
        a_is_batch, b_is_batch = (x.dim() - (d is not None) == 3 for x, d in ((a, a_dim), (b, b_dim)))
        first_a, first_b = (x if d is None else x.movedim(d, 0) for x, d in ((a, a_dim), (b, b_dim)))
        if bias_dim is None and not a_is_batch and not b_is_batch:
            return _with_dims(product(first_a, first_b, bias, **how))
        if bias_dim is None and a_is_batch and b_is_batch and first_a.shape[-3] == first_b.shape[-3]:
            batches = [
                (x.expand(info.batch_size, *x.shape) if d is None else x).flatten(0, 1)
                for x, d in ((first_a, a_dim), (first_b, b_dim))
            ]
            found, dims = _with_dims(product(*batches, bias, **how))
            return torch.utils._pytree.tree_map(lambda c: c.unflatten(0, (info.batch_size, -1)), found), dims
        # gemm takes one bias for the whole batch. (Operands that do not fit raise their error here too.)
        return vmap_loop(functools.partial(product, **how))(info, (a_dim, b_dim, bias_dim), a, b, bias)

    return rule


def _with_dims(outputs: Any) -> tuple[Any, Any]:
    return outputs, 0 if isinstance(outputs, Tensor) else (0,) * len(outputs)


@functools.partial(under_transforms, "gemm")
def _under_transforms(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    precision: str = "ieee",
) -> Tensor:
    return GemmFunction.apply(a, b, bias, activation, precision)


@functools.partial(composed, "gemm_activation_backward")
def activation_backward(grad_output: Tensor, saved: Tensor, activation: str) -> Tensor:
    return ACTIVATIONS[activation].gradient(grad_output, saved)


torch.library.register_vmap(
    "lltm_ext::gemm_activation_backward", vmap_elementwise(ops.gemm_activation_backward)
)


@functools.partial(torch.library.register_vmap, "lltm_ext::gemm_activation_bias_backward")
def _vmap_activation_bias_backward(
    info: Any, in_dims: Sequence[int | None], *args: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    grad, _ = vmap_elementwise(ops.gemm_activation_backward)(info, in_dims, *args)
    return (grad, grad.sum(tuple(range(1, grad.dim() - 1)))), (0, 0)
