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
from lltm_ext._sequence import SEQUENCE_OPS, SequenceOp
from lltm_ext._unary import UNARY_OPS, UnaryOp
from lltm_ext.gemm import _Product
from lltm_ext.lltm import _CellFunction

Kernel = Callable[..., Any]

_library = torch.library.Library("lltm_ext", "IMPL")
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)
_ERRORS = {"TypeError: ": TypeError, "ValueError: ": ValueError}


# ---- errors


def typed(error: RuntimeError) -> Exception:
    """The error with its type, which the stable ABI puts into the message of a RuntimeError."""
    for prefix, kind in _ERRORS.items():
        if str(error).startswith(prefix):
            return kind(str(error).removeprefix(prefix))
    return error


# ---- autograd


def tensors_of(args: Iterable[Any]) -> Iterator[Tensor]:
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from tensors_of(x)


def needs_grad(*args: Any) -> bool:
    """Whether autograd must see a call. A forward-mode tangent counts: it meets autograd's own error."""
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


def recording(name: str, recorded: Kernel) -> Kernel:
    """The op, and ``recorded`` where a gradient is wanted."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if needs_grad(*args, *kwargs.values()):
            return recorded(*args, **kwargs)
        return below_autograd(name, *args, **kwargs)

    return kernel


def checked(name: str, composed: Kernel) -> Kernel:
    """``composed``, which passes meta tensors through too, after the checks of the op ``name``."""

    def kernel(*args: Any) -> Any:
        check_on_meta(name, args)
        return composed(*args)

    return recording(name, kernel)


def note_change(x: Tensor) -> None:
    """So that a backward which needs the old values notices."""
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


def activation_backward(grad_output: Tensor, saved: Tensor, activation: str) -> Tensor:
    return ACTIVATIONS[activation].gradient(grad_output, saved)


def activation_bias_backward(grad_output: Tensor, saved: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    grad = activation_backward(grad_output, saved, activation)
    return grad, grad.sum(tuple(range(grad.dim() - 1)))


def gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    precision: str = "ieee",
) -> Tensor:
    return apply_of(_Product)(a, b, bias, activation, precision)[0]


def lltm_cell(*args: Any) -> tuple[Tensor, Tensor]:
    return apply_of(_CellFunction)(*args)[:2]


def sequence(function: Any) -> Kernel:
    apply = apply_of(function)

    def kernel(
        input: Tensor,
        h0: Tensor,
        c0: Tensor,
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias: Tensor | None = None,
        batch_sizes: list[int] | None = None,
        reverse: bool = False,
        algorithm: str = "auto",
    ) -> tuple[Tensor, ...]:
        tensors = (input, h0, c0, weight_ih, weight_hh, bias)
        return apply(*tensors, batch_sizes, reverse, algorithm)[:3]

    return kernel


def bidirectional(name: str, op: SequenceOp) -> Kernel:
    """Both directions of a layer, side by side in one launch where that is faster."""
    forward_op, backward_op = (getattr(ops, f"{name}_bidirectional_{way}") for way in ("forward", "backward"))

    class BothFunction(torch.autograd.Function):
        """``(batch_sizes, algorithm, split, input, *onward, *reverse)``: ``split`` are not reverse."""

        @staticmethod
        def forward(
            ctx: Any, batch_sizes: list[int] | None, algorithm: str, split: int, *inputs: Tensor
        ) -> tuple[Tensor, ...]:
            y = forward_op(inputs[0], inputs[1:split], inputs[split:], batch_sizes, algorithm)
            ctx.batch_sizes, ctx.algorithm, ctx.split = batch_sizes, algorithm, split
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*inputs, y[0], *y[3:6], *y[8:])
            return *y[:3], *y[5:8]

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            inputs, saved, split = ctx.saved_tensors[:-6], ctx.saved_tensors[-6:], ctx.split
            needed = ctx.needs_input_grad[3:]
            found: Sequence[Tensor | None] = [None] * len(inputs)
            if torch.is_grad_enabled() and any(g is not None for g in grads):
                found = differentiable_gradients(functools.partial(composed, ctx), inputs, grads)
            elif any(g is not None for g in grads):
                of_bias = any(needed[5:split]) or any(needed[split + 4 :])
                directions = inputs[1:split], inputs[split:]
                gradients = backward_op(
                    grads, inputs[0], *directions, saved, ctx.batch_sizes, ctx.algorithm, needed[0], of_bias
                )
                given = [*range(split), *range(6, 6 + len(directions[1]))]  # of two biases, one may be none
                found = [gradients[i] if wanted else None for i, wanted in zip(given, needed, strict=True)]
            return None, None, None, *found

    def composed(ctx: Any, input: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        directions = others[: ctx.split - 1], others[ctx.split - 1 :]
        return tuple(
            y
            for tensors, reverse in zip(directions, (False, True), strict=True)
            for y in op.Function.composed(input, *(*tensors, None)[:5], ctx.batch_sizes, reverse)
        )

    def kernel(
        input: Tensor,
        onward: Sequence[Tensor],
        reverse: Sequence[Tensor],
        batch_sizes: list[int] | None = None,
        algorithm: str = "auto",
    ) -> list[Tensor]:
        return list(BothFunction.apply(batch_sizes, algorithm, 1 + len(onward), input, *onward, *reverse))

    return kernel


# ---- autocast


def cast(x: Any) -> Any:
    """To autocast's dtype, which applies to floating point other than float64."""
    if isinstance(x, (list, tuple)):
        return [cast(each) for each in x]
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def on_autocast(name: str, of_args: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
    """``of_args`` casts the arguments. Autocast is off in the call: the library's own calls must not cast."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        args = tuple(of_args(args))
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return getattr(ops, name)(*args, **kwargs)

    for key in ("AutocastCPU", "AutocastCUDA"):
        _library.impl(name, kernel, key)


def cast_cell(x: Any) -> Any:
    """A cell state keeps its dtype, best float32, unless that is the other half type."""
    half = isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if half and x.dtype != torch.get_autocast_dtype(x.device.type) else x


def all_with(*cells: int) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Casts all arguments, those at these places as cell states."""
    return lambda args: [cast_cell(x) if i in cells else cast(x) for i, x in enumerate(args)]


def of_directions(args: Sequence[Any]) -> Sequence[Any]:
    defaults: list[Any] = [None, "auto"]
    input, *directions, batch_sizes, algorithm = [*args, *defaults[len(args) - 3 :]]
    lists = [
        [cast_cell(x) if i == 1 else cast(x) for i, x in enumerate(direction)] for direction in directions
    ]
    return cast(input), *lists, batch_sizes, algorithm


# ---- fake tensors: shapes of the outputs from those of the arguments


def dense(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def of_input(input: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(input)


def of_last(grad_output: Tensor, output: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(output)


def nothing(*args: Any) -> None:
    return None


def resized(input: Tensor, *args: Any) -> None:
    if args[-1].shape != input.shape:
        args[-1].resize_(input.shape)


def shape_gemm(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    batches = [x.shape[0] for x in (a, b) if x.dim() == 3]
    batch = [next((n for n in batches if n != 1), 1)] if batches else []
    return a.new_empty(*batch, a.shape[-2], b.shape[-1])


def shape_gemm_forward(*args: Any) -> tuple[Tensor, Tensor]:
    return shape_gemm(*args), shape_gemm(*args)


def shape_bias_backward(grad_output: Tensor, saved: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(saved), saved.new_empty(saved.shape[-1])


def shape_cell(input: Tensor, weights: Tensor, bias: Any, old_h: Tensor, old_cell: Tensor) -> Any:
    return dense(old_h), dense(old_cell)


def shape_cell_forward(input: Tensor, weights: Tensor, bias: Any, old_h: Tensor, old_cell: Tensor) -> Any:
    batch, hidden = old_h.shape
    return dense(old_h), dense(old_cell), old_h.new_empty(3, batch, hidden)


def shape_cell_backward(
    grad_h: Any,
    grad_cell: Any,
    new_cell: Tensor,
    gates: Any,
    input: Tensor,
    weights: Tensor,
    old_h: Tensor,
    *needed: bool,
) -> Any:
    """Of what is not needed, None."""
    of_input, of_h, of_cell = (
        dense(x) if wanted else None for x, wanted in zip((input, old_h, new_cell), needed, strict=True)
    )
    return of_input, dense(weights), weights.new_empty(weights.shape[0]), of_h, of_cell


def shape_sequence(input: Tensor, h0: Tensor, c0: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return input.new_empty(*input.shape[:-1], h0.shape[1]), dense(h0), dense(c0)


def shape_sequence_forward(
    input: Tensor, h0: Tensor, c0: Tensor, weight_ih: Tensor, weight_hh: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    """Of both cells ``extra`` is one value a unit."""
    rows = input.shape[:-1]
    gates, extra = input.new_empty(*rows, weight_hh.shape[0]), input.new_empty(*rows, h0.shape[1])
    return *shape_sequence(input, h0, c0), gates, extra


def shape_gradients(
    input: Tensor, direction: Sequence[Tensor], input_needs_grad: bool, bias_needs_grad: bool
) -> list[Tensor]:
    weight_hh = direction[3]
    return [
        dense(input) if input_needs_grad else input.new_empty(0),
        *(dense(x) for x in direction[:4]),
        weight_hh.new_empty(weight_hh.shape[0] if bias_needs_grad else 0),
    ]


def shape_sequence_backward(*args: Any) -> tuple[Tensor, ...]:
    return tuple(shape_gradients(args[3], args[4:8], *args[-2:]))


def shape_both(
    input: Tensor, onward: Sequence[Tensor], reverse: Sequence[Tensor], *args: Any
) -> list[Tensor]:
    return [x for direction in (onward, reverse) for x in shape_sequence(input, *direction[:2])]


def shape_both_forward(
    input: Tensor, onward: Sequence[Tensor], reverse: Sequence[Tensor], *args: Any
) -> list[Tensor]:
    return [x for direction in (onward, reverse) for x in shape_sequence_forward(input, *direction)]


def shape_both_backward(grad_outputs: Any, input: Tensor, onward: Any, reverse: Any, *args: Any) -> Any:
    of_each = [shape_gradients(input, direction, *args[-2:]) for direction in (onward, reverse)]
    return of_each[0] + of_each[1][1:]


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
    """That all tensors are on one device, which meta tensors do not show."""
    first = next(tensors_of(args))
    for argument, x in zip(getattr(ops, name).default._schema.arguments, args, strict=False):
        if isinstance(x, Tensor) and x.device != first.device:
            raise RuntimeError(
                f"{name.removesuffix('_out')}: expected {argument.name} on {first.device}, got {x.device}"
            )


def check_on_meta(name: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> None:
    """The library's own checks, so that a traced call raises the errors of a real one."""
    # Imported here: it brings sympy, half a second of import time. Whoever traces has it already.
    from torch.fx.experimental.symbolic_shapes import has_free_symbols

    check_devices(name, args)
    if any(has_free_symbols(x) for x in tensors_of(args)):
        return  # the library cannot see symbolic sizes; it checks them when it runs
    try:
        with _disable_current_modes():
            getattr(torch.ops.lltm_ext_checks, name)(*meta(args), **(kwargs or {}))
    except RuntimeError as error:
        raise typed(error) from None


def on_fake(name: str, shapes: Kernel) -> None:
    @functools.wraps(shapes)
    def fake(*args: Any, **kwargs: Any) -> Any:
        check_on_meta(name, args, kwargs)
        return shapes(*args, **kwargs)

    torch.library.register_fake(f"lltm_ext::{name}", fake, lib=_library, _stacklevel=0)


# ---- the ops


def define(
    name: str,
    autograd: Kernel | None = None,
    shapes: Kernel | None = None,
    cast: Callable[[Sequence[Any]], Sequence[Any]] = lambda args: args,
) -> None:
    """Registers the kernels of an op. Without ``autograd`` it is no part of a graph, but called by one."""
    _library.impl(name, autograd or functools.partial(below_autograd, name), "Autograd")
    on_autocast(name, cast)
    if shapes is not None:
        on_fake(name, shapes)


def define_unary(name: str, op: UnaryOp) -> None:
    define(name, recording(name, apply_of(op.Function)), of_input)
    define(f"{name}_", in_place(name, op), nothing)
    define(f"{name}_out", writing_out(name), resized)
    if op.gradient is not None:
        define(f"{name}_backward", checked(f"{name}_backward", op.gradient), of_last)


def define_sequence(name: str, op: SequenceOp) -> None:
    define(name, recording(name, sequence(op.Function)), shape_sequence, all_with(2))
    define(f"{name}_forward", None, shape_sequence_forward)
    define(f"{name}_backward", None, shape_sequence_backward)
    define(f"{name}_algorithm", None, None, all_with(2))
    both = f"{name}_bidirectional"
    define(both, recording(both, bidirectional(name, op)), shape_both, of_directions)
    define(f"{both}_forward", None, shape_both_forward)
    define(f"{both}_backward", None, shape_both_backward)


for _name, _unary in UNARY_OPS.items():
    define_unary(_name, _unary)
for _name, _sequence in SEQUENCE_OPS.items():
    define_sequence(_name, _sequence)
define("gemm", recording("gemm", gemm), shape_gemm, all_with())
define("gemm_out", writing_out("gemm"), nothing)
define("gemm_forward", None, shape_gemm_forward)
for _name, _composed, _shapes in (
    ("gemm_activation_backward", activation_backward, of_last),
    ("gemm_activation_bias_backward", activation_bias_backward, shape_bias_backward),
):
    define(_name, checked(_name, _composed), _shapes)
define("lltm_cell", recording("lltm_cell", lltm_cell), shape_cell, all_with(4))
define("lltm_cell_forward", None, shape_cell_forward)
define("lltm_cell_backward", None, shape_cell_backward)
