"""The scan: a linear recurrence over time, h_t = a_t h_{t-1} + b_t, in parallel over time.

Exponential averages, discounted returns, advantages (GAE), minGRU and other gated recurrences are scans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lltm_ext._C import scan as _C  # noqa: F401  registers the ops
from lltm_ext._library import (
    composed,
    hand_over,
    has_tangents,
    implements_functions,
    ops,
    scripts_as_op,
    under_transforms,
    vmap_loop,
)

__all__ = ["ScanFunction", "scan"]

HALVES = (torch.float16, torch.bfloat16)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex, torch.SymInt, torch.SymFloat)) and not isinstance(
        value, bool
    )


def _check(a: Any, b: Any, initial: Any, reset: Any) -> None:
    for name, value in {"a": a, "b": b, "initial": initial}.items():
        if isinstance(value, Tensor) or _is_number(value) or (name == "initial" and value is None):
            continue
        raise TypeError(f"scan: expected {name} to be a Tensor or a number, got {type(value).__name__}")
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        raise TypeError("scan: expected a or b to be a Tensor, got two numbers")
    if reset is not None and not isinstance(reset, Tensor):
        raise TypeError(f"scan: expected reset to be a Tensor or None, got {type(reset).__name__}")


def _category(dtype: torch.dtype) -> int:
    return 2 if dtype.is_complex else int(dtype.is_floating_point)


def _raised(dtype: torch.dtype | None, other: torch.dtype) -> torch.dtype:
    """The dtype after a value that counts only if it is of a higher category: float or complex."""
    if dtype is None:
        return other
    if _category(other) <= _category(dtype):
        return dtype
    return torch.promote_types(
        dtype, torch.complex32 if other.is_complex and dtype.is_floating_point else other
    )


def _result_type(values: Sequence[Any]) -> torch.dtype:
    """torch.result_type of several values, some of them tensors. torch.compile does not trace torch's."""
    found = None
    for has_dims in (True, False):
        common = None
        for x in values:
            if isinstance(x, Tensor) and (x.dim() > 0) == has_dims:
                common = x.dtype if common is None else torch.promote_types(common, x.dtype)
        if common is not None:
            found = _raised(found, common)
    for x in values:
        if isinstance(x, (float, torch.SymFloat)):
            found = _raised(found, torch.get_default_dtype())
        elif isinstance(x, complex):
            found = _raised(found, torch.get_default_dtype().to_complex())
    assert found is not None
    return found


def _promoted(a: Any, b: Any, initial: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """The arguments as tensors of their common dtype. With half types, an a without dimensions is float32."""
    like = a if isinstance(a, Tensor) else b
    dtype = _result_type((a, b, initial))

    def tensor(value: Any, dtype: torch.dtype) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(dtype)
        return torch.full((), value, dtype=dtype, device=like.device)

    scalar = not isinstance(a, Tensor) or a.dim() == 0
    of_a = torch.float32 if scalar and dtype in HALVES else dtype
    return tensor(a, of_a), tensor(b, dtype), None if initial is None else tensor(initial, dtype)


def aligned(reset: Tensor, dim: int) -> Tensor:
    """The resets with the dimensions of the steps, of which they have the first."""
    return reset.reshape(*reset.shape, *[1] * (dim - reset.dim()))


def scan_reference(
    a: Tensor | complex,
    b: Tensor | complex,
    initial: Tensor | complex | None = None,
    *,
    reset: Tensor | None = None,
    reverse: bool = False,
) -> Tensor:
    """:func:`scan` in pure PyTorch: a loop over the steps."""
    a, b, initial = _promoted(a, b, initial)
    dtype, compute = b.dtype, torch.float32 if b.dtype in HALVES else b.dtype
    shape = torch.broadcast_shapes(a.shape, b.shape)
    a, b = a.to(compute).expand(shape), b.to(compute).expand(shape)
    h = b.new_zeros(shape[1:]) if initial is None else initial.to(compute).expand(shape[1:])
    resets = None if reset is None else aligned(reset, len(shape)).expand(shape)
    states: dict[int, Tensor] = {}
    for t in reversed(range(shape[0])) if reverse else range(shape[0]):
        h = a[t] * h + b[t] if resets is None else torch.where(resets[t], b[t], a[t] * h + b[t])
        states[t] = h
    if not states:
        return (a * b).to(dtype)
    return torch.stack([states[t] for t in range(shape[0])]).to(dtype)


def _before(h: Tensor, initial: Tensor | None, reset: Tensor | None, reverse: bool) -> Tensor:
    """The state before each step, 0 where it is reset."""
    first = h.new_zeros(h.shape[1:]) if initial is None else initial.expand(h.shape[1:])
    states = [h[1:], first[None]] if reverse else [first[None], h[:-1]]
    before = torch.cat(states) if h.shape[0] else h
    return before if reset is None else before.masked_fill(aligned(reset, h.dim()), 0)


def _gradients(
    grad: Tensor,
    a: Tensor,
    initial: Tensor | None,
    reset: Tensor | None,
    h: Tensor | None,
    reverse: bool,
    of_initial: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes scan_backward by scan and torch's differentiable ops."""
    steps = grad.shape[0]
    all_a = a.reshape(*[1] * (grad.dim() - a.dim()), *a.shape)
    all_a = all_a.expand(steps, *all_a.shape[1:]).conj()
    resets = None
    if reset is not None:
        resets = aligned(reset, grad.dim())
        resets = resets.expand(steps, *resets.shape[1:])

    def after(x: Tensor) -> Tensor:
        """What step t + 1 has; the last one has zeros."""
        end = x.new_zeros((min(steps, 1), *x.shape[1:]))
        return torch.cat([end, x[:-1]] if reverse else [x[1:], end])

    of_b = ops.scan(after(all_a), grad, None, None if resets is None else after(resets), not reverse)
    none = grad.new_empty(0)
    of_a = of_first = none
    if h is not None:
        of_a = (of_b * _before(h, initial, reset, reverse).conj()).to(a.dtype)
    if of_initial and steps == 0:
        of_first = grad.new_zeros(grad.shape[1:])
    elif of_initial:
        t = steps - 1 if reverse else 0
        of_first = (all_a[t] * of_b[t]).to(grad.dtype)
        if resets is not None:
            of_first = of_first.masked_fill(resets[t], 0)
    return of_a, of_b, of_first


def _filled(args: Sequence[Any]) -> list[Any]:
    """The arguments with the defaults of those left out."""
    return [*args, *[None, None, False][len(args) - 2 :]]


class ScanFunction(torch.autograd.Function):
    """``ScanFunction.apply(a, b, initial, reset, reverse)``. It saves all but ``b``, and the result."""

    @staticmethod
    def forward(
        a: Tensor,
        b: Tensor,
        initial: Tensor | None = None,
        reset: Tensor | None = None,
        reverse: bool = False,
    ) -> Tensor:
        return ops.scan(a, b, initial, reset, reverse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, initial, reset, reverse = _filled(inputs)
        ctx.save_for_backward(a, initial, reset, output)
        ctx.save_for_forward(a, initial, reset, output)
        ctx.shape_of_b, ctx.reverse, ctx.inputs = b.shape, reverse, len(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, initial, reset, h = ctx.saved_tensors
        needs_a, needs_b, *others = ctx.needs_input_grad
        of_initial = initial is not None and others[0]
        rule = _gradients if torch.is_grad_enabled() else ops.scan_backward
        of_a, of_b, of_first = rule(grad, a, initial, reset, h if needs_a else None, ctx.reverse, of_initial)
        found = (
            of_a.sum_to_size(a.shape) if needs_a else None,
            of_b.sum_to_size(ctx.shape_of_b) if needs_b else None,
            of_first.sum_to_size(initial.shape) if of_initial else None,
            None,
            None,
        )
        return found[: ctx.inputs]

    @staticmethod
    def jvp(ctx: Any, of_a: Tensor | None, of_b: Tensor | None, *others: Any) -> Tensor:
        a, initial, reset, h = ctx.saved_tensors
        of_initial = others[0] if others and initial is not None else None
        moved = h.new_zeros(h.shape) if of_b is None else of_b.expand(h.shape)
        if of_a is not None:
            moved = moved + (of_a * _before(h, initial, reset, ctx.reverse)).to(h.dtype)
        return ScanFunction.apply(a, moved, of_initial, reset, ctx.reverse)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        return _vmap(ScanFunction.apply, info, in_dims, *args)


def _vmap(function: Any, info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Tensor, int]:
    """The vmap rule: the slices become the first dimension of the steps, after time."""
    a, b, initial, reset, reverse = _filled(args)
    dims = (*in_dims, *[None] * (5 - len(in_dims)))
    dim = max(x.dim() - (d is not None) for x, d in zip((a, b), dims, strict=False))

    def batched(x: Tensor, d: int | None, dim: int) -> Tensor:
        """Slices first, then ``dim`` dimensions."""
        x = x[None] if d is None else x.movedim(d, 0)
        return x.reshape(x.shape[0], *[1] * (dim + 1 - x.dim()), *x.shape[1:])

    def of_steps(x: Tensor, d: int | None) -> Tensor:
        return batched(x, d, dim).movedim(0, 1)

    first = None if initial is None else batched(initial, dims[2], dim - 1)
    resets = reset
    if reset is not None:
        resets = reset.unsqueeze(1) if dims[3] is None else reset.movedim(dims[3], 1)
    all_b = of_steps(b, dims[1])
    if dims[0] is None and dims[1] is None:
        all_b = all_b.expand(all_b.shape[0], info.batch_size, *all_b.shape[2:])
    return function(of_steps(a, dims[0]), all_b, first, resets, reverse), 1


@scripts_as_op
def scan(
    a: Tensor | complex,
    b: Tensor | complex,
    initial: Tensor | complex | None = None,
    *,
    reset: Tensor | None = None,
    reverse: bool = False,
) -> Tensor:
    """The linear recurrence ``h[t] = a[t] * h[t - 1] + b[t]`` over the first dimension. Returns all ``h``.

    One pass over the data on CUDA, in parallel over time where there are few channels (elements of a step).

    Args:
        a, b: the coefficients, [T, ...], on CPU or CUDA; float16, bfloat16, float32, float64, complex64 or
            complex128, of any strides. They broadcast against each other as in torch: a number, [H],
            [T, B, 1]. The common shape is that of the steps; its first dimension is time.
        initial: the state before the first step, of a shape that broadcasts to one step; zeros if None.
        reset: bool, [T], [T, B] and so on: the first dimensions of the steps, or 1 there. Where it is true
            the state that the step continues is replaced by zeros, that before the first step too:
            ``h[t] = b[t]``.
        reverse: time runs from the last step to the first: ``h[t] = a[t] * h[t + 1] + b[t]``, with
            ``initial`` after the last step. ``reset`` then marks the last step of an episode; that of the
            recurrent layers always marks the first.

        The dtypes are promoted as in torch, also under autocast. A number and an ``a`` without dimensions
        keep the precision of float32 where the other tensors have half types.

    Returns:
        The states, of the shape of the steps. The strides are those of ``b`` if it has this shape, else those
        of ``a``.

    Gradients:
        Of ``a``, ``b`` and ``initial``, in one pass too; then those of a broadcast argument are summed. So an
        ``a`` of few elements has a gradient of all steps for a moment. All derivatives of higher order.

    Numerics:
        Half types compute in float32 and round each state once, for the result. On CUDA, parts of the time
        are combined in float64. With ``u`` the unit roundoff of the type that is computed in (twice that of
        complex numbers), an element differs from the exact one by at most ``2 u n s`` and the final rounding,
        where ``s`` is the same scan of absolute values and ``n`` the number of steps since the last reset.
        States that overflow, and infinite or NaN coefficients, give what the loop gives. The same call gives
        the same bits.

    Raises:
        TypeError: for another dtype, or no tensor.
        RuntimeError: for another shape, device or layout.

    Source: Blelloch, "Prefix Sums and Their Applications", 1990, section 1.4.1.
    """
    if any(not isinstance(x, Tensor) and implements_functions(x) for x in (a, b, initial, reset)):
        return hand_over(scan, a, b, initial, reset=reset, reverse=reverse)
    _check(a, b, initial, reset)
    arguments = (*_promoted(a, b, initial), reset, reverse)
    if has_tangents():
        return ScanFunction.apply(*arguments)
    return ops.scan(*arguments)


under_transforms("scan", ScanFunction.apply)
composed("scan_backward", _gradients)
torch.library.register_vmap("lltm_ext::scan_backward", vmap_loop(ops.scan_backward))
