"""What native modules register in C++ and the portable library cannot (see _portable.py).

Each op of the library gets its kernels for Autograd and for autocast, and the shapes of its outputs for fake
tensors. Its derivative is the ``torch.autograd.Function`` that torch.func's transforms use too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lltm_ext._activations import ACTIVATIONS
from lltm_ext._library import differentiable_gradients, ops
from lltm_ext._loop import zero_state
from lltm_ext._sequence import SEQUENCE_OPS, SequenceOp, one_bias
from lltm_ext._unary import UNARY_OPS, UnaryOp
from lltm_ext.gemm import _Product
from lltm_ext.lltm import _CellFunction

Kernel = Callable[..., Any]

_library = torch.library.Library("lltm_ext", "IMPL")
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)
_ERRORS = {"TypeError": TypeError, "ValueError": ValueError}


def arguments_of(name: str) -> Any:
    """The arguments of the op, as its schema declares them."""
    return getattr(ops, name).default._schema.arguments


# ---- errors


def typed(error: RuntimeError) -> Exception:
    """The error with its type, which the stable ABI puts into the message of a RuntimeError."""
    kind, _, message = str(error).partition(": ")
    return _ERRORS[kind](message) if kind in _ERRORS else error


# ---- autograd


def tensors_of(args: Iterable[Any]) -> Iterator[Tensor]:
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from tensors_of(x)


def needs_grad(*args: Any) -> bool:
    """Whether autograd must see a call. A forward-mode tangent counts too: the Function has its rule."""
    forward_ad = torch.autograd.forward_ad
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors_of(args)):
        return True
    return forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None for x in tensors_of(args)
    )


def below_autograd(name: str, *args: Any, **kwargs: Any) -> Any:
    try:
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(ops, name)(*args, **kwargs)
    except RuntimeError as error:
        raise typed(error) from None


def apply_of(function: Any) -> Kernel:
    """``function.apply`` for calls under no transform, without torch's inspection of the signature, which
    takes longer than a small op."""
    apply: Kernel = super(torch.autograd.Function, function).apply
    return apply


def recording(name: str, recorded: Kernel, checks: bool = False) -> Kernel:
    """The op, and where a gradient is wanted, the first results of ``recorded``, called with all arguments.

    ``checks``: the op's checks come first, for a ``recorded`` that makes none.
    """
    defaults = [(argument.name, argument.default_value) for argument in arguments_of(name)]
    returns = len(getattr(ops, name).default._schema.returns)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not needs_grad(*args, *kwargs.values()):
            return below_autograd(name, *args, **kwargs)
        if checks:
            check_on_meta(name, args)
        found = recorded(*args, *(kwargs.get(argument, value) for argument, value in defaults[len(args) :]))
        return found if isinstance(found, Tensor) else found[0] if returns == 1 else found[:returns]

    return kernel


def note_change(x: Tensor) -> None:
    """Tells autograd, which may have saved the old values."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def check_in_place(x: Tensor) -> None:
    """Autograd's own error, before anything is written."""
    owner = x._base if x._is_view() else x
    if torch.is_grad_enabled() and owner is not None and owner.is_leaf and owner.requires_grad:
        what = "leaf" if owner is x else "view of a leaf"
        raise RuntimeError(f"a {what} Variable that requires grad is being used in an in-place operation.")


def in_place(name: str, op: UnaryOp) -> Kernel:
    """``<name>_`` with the gradient of ``name``."""
    function: Any = op.Function

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: Tensor, *args: Any) -> Tensor:
            before = input.clone() if op.saves_input else input
            ctx.mark_dirty(input)
            below_autograd(f"{name}_", input, *args)
            function.setup_context(ctx, (before, *args), input)
            return input

        backward = staticmethod(function.backward)

    def kernel(input: Tensor, *args: Any) -> None:
        if needs_grad(input):
            check_in_place(input)
            InPlace.apply(input, *args)
        else:
            below_autograd(f"{name}_", input, *args)
            note_change(input)

    return kernel


def writing_out(name: str) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> None:
        if needs_grad(*args):
            raise RuntimeError(f"{name}: with out= there is no gradient, but an argument requires it")
        below_autograd(f"{name}_out", *args)
        note_change(args[-1])

    return kernel


def on_lazy(name: str) -> None:
    """For tensors whose memory holds the negative or the conjugate, as implement_lazy in C++."""

    def kernel(*args: Any) -> None:
        plain = [x.resolve_conj().resolve_neg() if isinstance(x, Tensor) else x for x in args]
        written = -1 if name.endswith("_out") else 0
        target, result = args[written], plain[written]
        getattr(ops, name)(*plain)
        if target is not result:
            target.resize_(result.shape)
            target.copy_(result)

    for key in ("Conjugate", "Negative"):
        _library.impl(name, kernel, key)


def activation_backward(grad_output: Tensor, saved: Tensor, activation: str) -> Tensor:
    return ACTIVATIONS[activation].gradient(grad_output, saved)


def activation_bias_backward(grad_output: Tensor, saved: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    grad = activation_backward(grad_output, saved, activation)
    return grad, grad.sum(tuple(range(grad.dim() - 1)))


def bidirectional(name: str, op: SequenceOp) -> Kernel:
    """Both directions of a layer, side by side in one launch where that is faster."""
    forward_op, backward_op = (getattr(ops, f"{name}_bidirectional_{way}") for way in ("forward", "backward"))

    class BothFunction(torch.autograd.Function):
        """``(split, batch_sizes, algorithm, input, *forward, *reverse)``: ``inputs[split:]`` are reverse."""

        @staticmethod
        def forward(
            ctx: Any, split: int, batch_sizes: list[int] | None, algorithm: str, *inputs: Tensor
        ) -> tuple[Tensor, ...]:
            y = forward_op(inputs[0], inputs[1:split], inputs[split:], batch_sizes, algorithm)
            ctx.how = split, batch_sizes, algorithm
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*inputs, y[0], *y[3:6], *y[8:])
            return *y[:3], *y[5:8]

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            split, *how = ctx.how
            inputs, saved = ctx.saved_tensors[:-6], ctx.saved_tensors[-6:]
            found: Sequence[Tensor | None] = [None] * len(inputs)
            if all(g is None for g in grads):
                pass
            elif torch.is_grad_enabled():
                found = differentiable_gradients(functools.partial(composed, split, how[0]), inputs, grads)
            else:
                needed = ctx.needs_input_grad[3:]
                wanted = needed[0], any(needed[5:split]) or any(needed[split + 4 :])
                gradients = backward_op(
                    grads, inputs[0], inputs[1:split], inputs[split:], saved, *how, *wanted
                )
                given = [*range(split), *range(6, 6 + len(inputs) - split)]  # either bias may be missing
                found = [
                    gradients[i] if is_needed else None for i, is_needed in zip(given, needed, strict=True)
                ]
            return None, None, None, *found

    def composed(
        split: int, batch_sizes: list[int] | None, input: Tensor, *others: Tensor
    ) -> tuple[Tensor, ...]:
        directions = (others[: split - 1], False), (others[split - 1 :], True)
        return tuple(
            y
            for tensors, reverse in directions
            for y in op.Function.composed(input, *(*tensors, None)[:5], batch_sizes, reverse, None)
        )

    def recorded(input: Tensor, forward: Any, reverse: Any, *how: Any) -> list[list[Tensor]]:
        return [list(BothFunction.apply(1 + len(forward), *how, input, *forward, *reverse))]

    return recorded


# ---- autocast


def cast(x: Any, is_cell: bool = False) -> Any:
    """To autocast's dtype, which applies to floating point other than float64.

    A cell state, in a direction's list the second tensor, stays in float32 or in autocast's dtype; the other
    half type becomes float32.
    """
    if isinstance(x, (list, tuple)):
        return [cast(each, i == 1) for i, each in enumerate(x)]
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(torch.float32 if is_cell and x.dtype != dtype else dtype)


def on_autocast(name: str, casts: bool) -> None:
    """Autocast is off in the call: the library's own calls must not cast."""
    are_cells = [argument.name in ("c0", "old_cell") for argument in arguments_of(name)]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if casts:
            args = tuple(cast(x, is_cell) for x, is_cell in zip(args, are_cells, strict=False))
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return getattr(ops, name)(*args, **kwargs)

    for key in ("AutocastCPU", "AutocastCUDA"):
        _library.impl(name, kernel, key)


# ---- fake tensors: shapes of the outputs from those of the arguments


def dense(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def resized(input: Tensor, *args: Any) -> None:
    if args[-1].shape != input.shape:
        args[-1].resize_(input.shape)


def shape_gemm(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    batches = [x.shape[0] for x in (a, b) if x.dim() == 3]
    batch = [next((n for n in batches if n != 1), 1)] if batches else []
    return a.new_empty(*batch, a.shape[-2], b.shape[-1])


def shape_cell_backward(*args: Any) -> tuple[Tensor | None, ...]:
    """None for what is not needed."""
    _, _, new_cell, _, input, weights, old_h, *needed = args
    of_input, of_h, of_cell = (
        dense(x) if wanted else None for x, wanted in zip((input, old_h, new_cell), needed, strict=True)
    )
    return of_input, dense(weights), weights.new_empty(weights.shape[0]), of_h, of_cell


def shape_sequence(input: Tensor, *direction: Any) -> tuple[Tensor, ...]:
    h0, c0, _, weight_hh, *others = direction
    hidden, batch_sizes = weight_hh.shape[1], others[1] if len(others) > 1 else None
    states = (zero_state(input, hidden, batch_sizes) if x is None else dense(x) for x in (h0, c0))
    return input.new_empty(*input.shape[:-1], hidden), *states


def shape_sequence_forward(input: Tensor, *direction: Any) -> tuple[Tensor, ...]:
    """Followed by the gates and ``extra``, which has one value per unit for LLTM and LSTM."""
    gates, extra = (input.new_empty(*input.shape[:-1], n) for n in direction[3].shape)
    return *shape_sequence(input, *direction), gates, extra


def shape_gradients(input: Tensor, direction: Sequence[Tensor], *needed: bool) -> tuple[Tensor, ...]:
    of_input, of_bias = needed
    rows = direction[3].shape[0] if of_bias else 0
    first = dense(input) if of_input else input.new_empty(0)
    of_direction = (input.new_empty(0) if x is None else dense(x) for x in direction[:4])
    return first, *of_direction, direction[3].new_empty(rows)


def with_one_bias(function: Any) -> Kernel:
    """The Function of a sequence op, which takes the sum of the op's biases."""
    apply = apply_of(function)

    def recorded(*args: Any) -> Any:
        return apply(*args[:5], one_bias(args[5], args[10]), *args[6:10])

    return recorded


def shape_both(shapes: Callable[..., tuple[Tensor, ...]]) -> Kernel:
    return lambda input, forward, reverse, *args: [*shapes(input, *forward), *shapes(input, *reverse)]


def shape_both_backward(_: Any, input: Tensor, forward: Any, reverse: Any, *args: Any) -> list[Tensor]:
    needed = args[-2:]
    return [*shape_gradients(input, forward, *needed), *shape_gradients(input, reverse, *needed)[1:]]


def meta(x: Any) -> Any:
    """Meta tensors with the sizes and strides of those in ``x``."""
    if isinstance(x, (list, tuple)):
        return [meta(each) for each in x]
    if not isinstance(x, Tensor):
        return x
    if x.layout != torch.strided:
        return torch.empty(x.shape, dtype=x.dtype, layout=x.layout, device="meta")
    sizes, strides = ([int(n) for n in dims] for dims in (x.shape, x.stride()))
    return torch.empty_strided(sizes, strides, dtype=x.dtype, device="meta")


def check_devices(name: str, args: Sequence[Any]) -> None:
    """Raises unless all tensors are on one device, which meta tensors do not show."""
    first = next(tensors_of(args))
    for argument, x in zip(arguments_of(name), args, strict=False):
        if isinstance(x, Tensor) and x.device != first.device:
            raise RuntimeError(
                f"{name.removesuffix('_out')}: expected {argument.name} on {first.device}, got {x.device}"
            )


def check_on_meta(name: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> None:
    """Makes the library's own checks, so that a traced call raises the errors of a real one."""
    # Imported here because it imports sympy, which takes half a second. Tracing has imported it already.
    from torch.fx.experimental.symbolic_shapes import has_free_symbols

    check_devices(name, args)
    if any(has_free_symbols(x) for x in tensors_of(args)):
        return  # the library cannot see symbolic sizes; it checks them when it runs
    try:
        with _disable_current_modes():
            getattr(torch.ops.lltm_ext_checks, name)(*meta(args), **(kwargs or {}))
    except RuntimeError as error:
        raise typed(error) from None


# ---- torch's settings


def rnn_allows_tf32() -> bool:
    rnn: Any = torch.backends.cudnn.rnn
    return bool(rnn.fp32_precision == "tf32")


_own = torch.library.Library("lltm_ext", "FRAGMENT")
_own.define("rnn_allows_tf32() -> bool")
_own.impl("rnn_allows_tf32", rnn_allows_tf32, "CompositeExplicitAutograd")


# ---- the ops


def define(
    name: str, autograd: Kernel | None = None, shapes: Kernel | None = None, casts: bool = False
) -> None:
    """Registers the kernels of an op. Without ``autograd`` it is no part of a graph, but called by one."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        check_on_meta(name, args, kwargs)
        return shapes and shapes(*args, **kwargs)

    _library.impl(name, autograd or functools.partial(below_autograd, name), "Autograd")
    on_autocast(name, casts)
    if shapes is not None:
        torch.library.register_fake(f"lltm_ext::{name}", fake, lib=_library, _stacklevel=0)


def nothing(*args: Any) -> None:
    return None


def of_first(input: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(input)


def of_second(grad_output: Tensor, saved: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(saved)


for _name, _unary in UNARY_OPS.items():
    define(_name, recording(_name, apply_of(_unary.Function)), of_first)
    define(f"{_name}_", in_place(_name, _unary), nothing)
    define(f"{_name}_out", writing_out(_name), resized)
    on_lazy(f"{_name}_")
    on_lazy(f"{_name}_out")
    if _unary.gradient is not None:
        _name += "_backward"
        define(_name, recording(_name, _unary.gradient, checks=True), of_second)

for _name, _sequence in SEQUENCE_OPS.items():
    _both = f"{_name}_bidirectional"
    define(_name, recording(_name, with_one_bias(_sequence.Function)), shape_sequence, casts=True)
    define(f"{_name}_forward", None, shape_sequence_forward)
    define(f"{_name}_backward", None, lambda *args: shape_gradients(args[3], args[4:8], *args[14:16]))
    define(f"{_name}_algorithm", casts=True)
    define(_both, recording(_both, bidirectional(_name, _sequence)), shape_both(shape_sequence), casts=True)
    define(f"{_both}_forward", None, shape_both(shape_sequence_forward))
    define(f"{_both}_backward", None, shape_both_backward)

define("gemm", recording("gemm", apply_of(_Product)), shape_gemm, casts=True)
define("gemm_out", writing_out("gemm"), nothing)
on_lazy("gemm_out")
define("gemm_forward", None, lambda *args: (shape_gemm(*args), shape_gemm(*args)))
_name = "gemm_activation_backward"
define(_name, recording(_name, activation_backward, checks=True), of_second)
_name = "gemm_activation_bias_backward"
define(
    _name,
    recording(_name, activation_bias_backward, checks=True),
    lambda _, saved, *args: (torch.empty_like(saved), saved.new_empty(saved.shape[-1])),
)
define(
    "lltm_cell",
    recording("lltm_cell", apply_of(_CellFunction)),
    lambda input, weights, bias, h, c: (dense(h), dense(c)),
    casts=True,
)
define(
    "lltm_cell_forward",
    None,
    lambda input, weights, bias, h, c: (dense(h), dense(c), h.new_empty(3, *h.shape)),
)
define("lltm_cell_backward", None, shape_cell_backward)
