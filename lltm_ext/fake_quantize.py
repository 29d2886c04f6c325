"""Fake quantization: rounds values to integers times a scale, with gradients for the values and the scale.

Training with it prepares a network for integer arithmetic: the forward computes what the integers will give,
the backward follows a straight line, clipped at the ends of the integer range.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lltm_ext._C import fake_quantize as _C  # noqa: F401  registers the ops
from lltm_ext._library import (
    composed,
    differentiable_gradients,
    differentiable_tangents,
    hand_over,
    has_tangents,
    implements_functions,
    ops,
    scripts_as_op,
    takes_over,
    under_transforms,
    vmap_loop,
)

__all__ = ["FakeQuantize", "FakeQuantizeFunction", "fake_quantize"]


def _number(name: str, value: Any, dtype: torch.dtype) -> Tensor:
    if isinstance(value, Tensor) or implements_functions(value):
        return value
    if not isinstance(value, (int, float)):
        raise TypeError(
            f"fake_quantize: expected {name} to be a number or a Tensor, got {type(value).__name__}"
        )
    return torch.tensor(value, dtype=dtype, device="cpu")


def _check_grid(name: str, scale: Any, quant_min: Any, quant_max: Any) -> None:
    for argument, value in {"quant_min": quant_min, "quant_max": quant_max}.items():
        if not isinstance(value, (int, torch.SymInt)):
            raise TypeError(f"{name}: expected {argument} to be an int, got {type(value).__name__}")
    if quant_min > quant_max:
        raise ValueError(
            f"{name}: expected quant_min not above quant_max, "
            f"got quant_min = {quant_min}, quant_max = {quant_max}"
        )
    if isinstance(scale, (int, float)) and not scale > 0:
        raise ValueError(f"{name}: expected scale above 0, got {scale}")
    if isinstance(scale, (int, float)) and scale > torch.finfo(torch.float32).max:
        raise ValueError(f"{name}: expected scale within the range of float32, got {scale}")


def _parameters(scale: Any, zero_point: Any, quant_min: int, quant_max: int) -> tuple[Tensor, Tensor]:
    """Scale and zero point as tensors. A 0-dimensional CPU tensor works with any device."""
    _check_grid("fake_quantize", scale, quant_min, quant_max)
    if isinstance(zero_point, (int, float)) and not quant_min <= zero_point <= quant_max:
        raise ValueError(
            f"fake_quantize: expected zero_point from quant_min = {quant_min} to quant_max = {quant_max}, "
            f"got {zero_point}"
        )
    whole = isinstance(zero_point, int)
    return (
        _number("scale", scale, torch.float32),
        _number("zero_point", zero_point, torch.int64 if whole else torch.float32),
    )


def fake_quantize_reference(
    input: Tensor,
    scale: Tensor | float,
    zero_point: Tensor | float,
    quant_min: int,
    quant_max: int,
    *,
    axis: int | None = None,
    grad_factor: float = 1.0,
) -> Tensor:
    """:func:`fake_quantize` in pure PyTorch."""
    scale, zero_point = _parameters(scale, zero_point, quant_min, quant_max)
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    x = input.to(dtype)

    def prepared(parameter: Tensor) -> Tensor:
        if parameter.numel() == 1:
            return parameter.reshape(()).to(x.device)
        shape = [1] * x.dim()
        shape[axis or 0] = -1
        return parameter.reshape(shape)

    def learning(parameter: Tensor) -> Tensor:
        """Returns the same values, whose gradient is multiplied by grad_factor."""
        scaled = parameter.to(dtype) * grad_factor
        return parameter.to(dtype).detach() + (scaled - scaled.detach())

    scale, zero_point = prepared(scale), prepared(zero_point)
    single = torch.float64 if scale.dtype == torch.float64 else torch.float32
    step, inverse = scale.detach().to(dtype), (1 / scale.detach().to(single)).to(dtype)
    zero = zero_point.detach().to(dtype).round().clamp(quant_min, quant_max)
    low, high = quant_min - zero, quant_max - zero
    steps = (x.detach() * inverse).round()
    inside = (steps >= low) & (steps <= high)
    bound = torch.where(steps > high, high, low)
    values = torch.where(inside, steps, bound) * step
    if not (input.requires_grad or scale.requires_grad or zero_point.requires_grad):
        return values.to(input.dtype)
    # This is the gradient's straight line. Its slope with respect to the scale is the rounding error.
    error = torch.where(inside, steps - x.detach() * inverse, 0)
    shift = zero_point.to(dtype) if zero_point.is_floating_point() else zero
    moved = learning(shift) - shift.detach().to(dtype)
    line = torch.where(inside, x + learning(scale) * error, (bound - moved) * learning(scale))
    return (values + (line - line.detach())).to(input.dtype)


class FakeQuantizeFunction(torch.autograd.Function):
    """``FakeQuantizeFunction.apply(input, scale, zero_point, quant_min, quant_max, axis, grad_factor)``.

    It saves the input, the scale and the zero point. (:func:`fake_quantize` saves one bit per element instead
    if only the input needs a gradient.)
    """

    @classmethod
    def apply(
        cls,
        input: Tensor,
        scale: Tensor | float,
        zero_point: Tensor | float,
        quant_min: int,
        quant_max: int,
        axis: int | None = None,
        grad_factor: float = 1.0,
    ) -> Tensor:
        scale, zero_point = _parameters(scale, zero_point, quant_min, quant_max)
        return super().apply(input, scale, zero_point, quant_min, quant_max, axis, grad_factor)

    @staticmethod
    def forward(input: Tensor, scale: Tensor, zero_point: Tensor, *rest: Any) -> Tensor:
        return ops.fake_quantize(input, scale, zero_point, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.save_for_forward(*inputs[:3])
        ctx.rest = inputs[3:]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        *ends, axis, grad_factor = ctx.rest
        reference = functools.partial(fake_quantize_reference, axis=axis, grad_factor=grad_factor)
        return differentiable_tangents(lambda *x: reference(*x, *ends), ctx.saved_tensors, tangents[:3])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        tensors: tuple[Tensor, Tensor, Tensor] = ctx.saved_tensors
        if not torch.is_grad_enabled():
            gradients = ops.fake_quantize_backward(grad_output, *tensors, *ctx.rest)
            learnt = tensors[2].is_floating_point()
            return (*gradients[: 2 + learnt], *[None] * (5 - learnt))
        return (*_gradients(grad_output, *tensors, *ctx.rest), None, None, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        return _vmap(FakeQuantizeFunction.apply, info, in_dims, *args)


def _gradients(grad_output: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Computes fake_quantize_backward in torch's differentiable ops; gradients of integers are zeros."""
    tensors, (*ends, axis, grad_factor) = args[:3], args[3:]
    learnable = [x for x in tensors if x.is_floating_point()]

    def reference(*floating: Tensor) -> tuple[Tensor]:
        x: Any = (*floating, *tensors[len(floating) :], *ends)
        return (fake_quantize_reference(*x, axis=axis, grad_factor=grad_factor),)

    found = differentiable_gradients(reference, learnable, (grad_output,))
    return tuple(torch.zeros_like(x) if g is None else g for x, g in itertools.zip_longest(tensors, found))


def _vmap(function: Any, info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Tensor, int]:
    """The vmap rule: one call on the whole batch if its slices share the parameters, else one per slice."""
    args = (*args, *(None, 1.0)[len(args) - 5 :])
    input, scale, zero_point, quant_min, quant_max, axis, grad_factor = args
    if in_dims[1] is not None or in_dims[2] is not None:
        return vmap_loop(function)(info, (*in_dims[:3], None, None, None, None), *args)
    if scale.numel() == zero_point.numel() == 1:
        axis = None
    elif axis is None or axis >= 0:
        axis = 1 + (axis or 0)
    batched = input.movedim(in_dims[0] or 0, 0)
    return function(batched, scale, zero_point, quant_min, quant_max, axis, grad_factor), 0


@scripts_as_op
def fake_quantize(
    input: Tensor,
    scale: Tensor | float,
    zero_point: Tensor | float,
    quant_min: int,
    quant_max: int,
    *,
    axis: int | None = None,
    grad_factor: float = 1.0,
) -> Tensor:
    """Rounds to the values that integers from ``quant_min`` to ``quant_max`` can represent.

    ``q = clamp(nearbyint(input / scale) + zero_point, quant_min, quant_max)``, ties to even; the result is
    ``(q - zero_point) * scale``. One kernel forward, one backward (and a small one for the sums).

    Args:
        input: any shape and strides, on CPU or CUDA; float16, bfloat16, float32 or float64. Half types
            compute in float32.
        scale: above 0; a number or a tensor of one element, or one element for each index of ``axis``,
            ``[input.shape[axis]]``. float32 or the dtype of ``input``. A number is taken as float32.
        zero_point: likewise; int32, int64 or floating. It is rounded to an integer and clamped to the range.
            A number outside the range is an error.
        quant_min, quant_max: the integers' range, such as -128 and 127; less than 2^22 apart.
        axis: the dimension that has the channels, if ``scale`` or ``zero_point`` has more than one element;
            0 if not given. May be negative.
        grad_factor: multiplies the gradients of ``scale`` and ``zero_point``. Esser et al. propose
            ``1 / sqrt(input.numel() * quant_max)``.

        All tensors are on one device. A 0-dimensional tensor may be on the CPU and is taken as a number.

    Returns:
        A tensor of the shape, dtype and memory format of ``input``. NaN becomes the lowest value, infinities
        the outermost ones.

    Gradients:
        Of ``input``: the incoming one where ``q`` was not clamped, else 0. If no other gradient is needed,
        only one bit per element is saved. Of ``scale``, summed over its elements: the incoming one times
        ``(result - input) / scale``, or where clamped times ``q - zero_point``. Of ``zero_point``, if it is
        floating: the incoming one times ``-scale`` where clamped. Sums run in a fixed order, so the same call
        gives the same bits. Second derivatives are those of the straight line.

    Raises:
        TypeError: for another dtype, or no tensor.
        ValueError: for ``quant_min`` above ``quant_max``, an axis that does not exist, or a number out of
            range.
        RuntimeError: for another shape, device or layout.

    Source: values as :func:`torch.fake_quantize_per_tensor_affine` and ``_per_channel_affine``, gradients as
    ``torch._fake_quantize_learnable_per_tensor_affine`` and ``_per_channel_affine``. The scale's is of Esser
    et al., "Learned Step Size Quantization", 2019, https://arxiv.org/abs/1902.08153 (compare Jain et al.,
    "Trained Quantization Thresholds", 2019, https://arxiv.org/abs/1903.08066), the zero point's of Bhalgat et
    al., "LSQ+", 2020, https://arxiv.org/abs/2004.09576.
    """
    if takes_over("fake_quantize", "input", input):
        grid = (scale, zero_point, quant_min, quant_max)
        return hand_over(fake_quantize, input, *grid, axis=axis, grad_factor=grad_factor)
    scale, zero_point = _parameters(scale, zero_point, quant_min, quant_max)
    arguments = (input, scale, zero_point, quant_min, quant_max, axis, grad_factor)
    if has_tangents():
        return FakeQuantizeFunction.apply(*arguments)
    return ops.fake_quantize(*arguments)


class FakeQuantize(nn.Module):
    """:func:`fake_quantize` as a module that learns its scale, its zero point, both or neither.

    Args:
        quant_min, quant_max: the integers' range.
        scale, zero_point: their initial values.
        num_channels: how many of each there are, one for each index of ``axis``; None: one for all.
        axis: the dimension that has the channels.
        learn_scale, learn_zero_point: whether they are parameters instead of buffers.
        grad_factor: multiplies their gradients.
        device, dtype: of scale and zero point; the dtype is float32 unless given.
    """

    if TYPE_CHECKING:  # torch.jit.script does not read postponed annotations
        scale: Tensor
        zero_point: Tensor

    def __init__(
        self,
        quant_min: int,
        quant_max: int,
        scale: float = 1.0,
        zero_point: float = 0.0,
        num_channels: int | None = None,
        axis: int = 0,
        learn_scale: bool = True,
        learn_zero_point: bool = False,
        grad_factor: float = 1.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        _check_grid("FakeQuantize", scale, quant_min, quant_max)
        for name, value in {"scale": scale, "zero_point": zero_point}.items():
            if not isinstance(value, (int, float)):
                raise TypeError(f"FakeQuantize: expected {name} to be a number, got {type(value).__name__}")
        if num_channels is not None and not isinstance(num_channels, int):
            got = type(num_channels).__name__
            raise TypeError(f"FakeQuantize: expected num_channels to be an int or None, got {got}")
        if num_channels is not None and num_channels < 1:
            raise ValueError(f"FakeQuantize: expected num_channels to be positive, got {num_channels}")
        self.quant_min, self.quant_max = quant_min, quant_max
        self.num_channels, self.axis, self.grad_factor = num_channels, axis, grad_factor
        learnt = {"scale": learn_scale, "zero_point": learn_zero_point}
        for name, value in {"scale": scale, "zero_point": zero_point}.items():
            values = torch.full((num_channels or 1,), value, device=device, dtype=dtype or torch.float32)
            if learnt[name]:
                self.register_parameter(name, nn.Parameter(values))
            else:
                self.register_buffer(name, values)

    def forward(self, input: Tensor) -> Tensor:
        grid = (self.scale, self.zero_point, self.quant_min, self.quant_max)
        axis = None if self.num_channels is None else self.axis
        return fake_quantize(input, *grid, axis=axis, grad_factor=self.grad_factor)

    def extra_repr(self) -> str:
        channels = (
            "" if self.num_channels is None else f", num_channels={self.num_channels}, axis={self.axis}"
        )
        learnt = "".join(f", learn_{name}={name in self._parameters}" for name in ("scale", "zero_point"))
        return f"quant_min={self.quant_min}, quant_max={self.quant_max}{channels}{learnt}"


def _vmap_mask_backward(
    info: Any, in_dims: Sequence[Any], grad_output: Tensor, mask: Tensor, strides: Sequence[int]
) -> tuple[Tensor, int]:
    def of_slice(gradient: Tensor, bits: Tensor) -> Tensor:
        return ops.fake_quantize_mask_backward(gradient, bits, strides)

    return vmap_loop(of_slice)(info, in_dims[:2], grad_output, mask)


under_transforms("fake_quantize", FakeQuantizeFunction.apply)
composed("fake_quantize_backward", _gradients)
torch.library.register_vmap("lltm_ext::fake_quantize_with_mask", vmap_loop(ops.fake_quantize_with_mask))
torch.library.register_vmap("lltm_ext::fake_quantize_mask_backward", _vmap_mask_backward)
torch.library.register_vmap("lltm_ext::fake_quantize_backward", vmap_loop(ops.fake_quantize_backward))
