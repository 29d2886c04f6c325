"""What the native modules register in C++ and the portable library cannot; _portable.py says why.

Every op of the library gets from Python a kernel for Autograd, which records a ``torch.autograd.Function``
where a gradient is wanted and gives errors their types; one for autocast; and the shapes of its outputs, for
fake tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lltm_ext._library import differentiable_gradients, ops
from lltm_ext.gemm import _Product
from lltm_ext.lltm import _CellFunction
from lltm_ext.lltm import _SequenceFunction as LltmSequence
from lltm_ext.lstm import _SequenceFunction as LstmSequence
from lltm_ext.relu import ReLUFunction
from lltm_ext.round import BinarizeFunction, CeilFunction, FloorFunction, RoundFunction, TruncFunction
from lltm_ext.sigmoid import SigmoidFunction

Kernel = Callable[..., Any]

_library = torch.library.Library("lltm_ext", "IMPL")
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)
_ERRORS = {"TypeError: ": TypeError, "ValueError: ": ValueError}


# ---- errors


def typed(error: RuntimeError) -> Exception:
    """An error of the library, all of whose errors come as RuntimeErrors, as what it says it is."""
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
    """``function.apply`` for calls that are under no transform: torch's own first inspects the signature, for
    defaults, which takes longer than a small op."""
    apply: Kernel = super(torch.autograd.Function, function).apply
    return apply


def on_autograd(name: str, recorded: Kernel) -> None:
    """``recorded`` is the op where a gradient is wanted."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if needs_grad(*args, *kwargs.values()):
            return recorded(*args, **kwargs)
        return below_autograd(name, *args, **kwargs)

    _library.impl(name, kernel, "Autograd")


def refuse(name: str) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{name}: with out= there is no gradient, but an argument requires it")

    return kernel


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


def in_place(name: str, function: Any) -> Kernel:
    """``<name>_`` with the gradient of ``function``, whose op is ``name``."""

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: Tensor, *args: Any) -> Tensor:
            before = input.clone() if function is BinarizeFunction else input
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


def writing_out(name: str, refused: Kernel) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> None:
        if needs_grad(*args):
            refused()
        below_autograd(name, *args)
        note_change(args[-1])

    return kernel


def elementwise(name: str, function: Any) -> None:
    """The three forms of an op of one tensor."""
    on_autograd(name, apply_of(function))
    _library.impl(f"{name}_", in_place(name, function), "Autograd")
    _library.impl(f"{name}_out", writing_out(f"{name}_out", refuse(name)), "Autograd")


for _name, _function in (
    ("sigmoid", SigmoidFunction),
    ("relu", ReLUFunction),
    ("round", RoundFunction),
    ("floor", FloorFunction),
    ("ceil", CeilFunction),
    ("trunc", TruncFunction),
    ("binarize", BinarizeFunction),
):
    elementwise(_name, _function)


# The double backward: the gradients' own formulas in torch's differentiable ops.


def checked(name: str, composed: Kernel) -> Kernel:
    """``composed``, after the checks of the op ``name``, which meta tensors pass through alone."""

    def kernel(*args: Any) -> Any:
        check_on_meta(name, args)
        return composed(*args)

    return kernel


def sigmoid_backward(grad_output: Tensor, output: Tensor) -> Tensor:
    return grad_output * (output * (1 - output)).conj()


def relu_backward(grad_output: Tensor, output: Tensor) -> Tensor:
    return grad_output.masked_fill(output <= 0, 0)


def binarize_backward(
    grad_output: Tensor, input: Tensor, threshold: float, low: float, high: float, grad: str
) -> Tensor:
    half = (high - low) / 2
    if grad == "clipped":
        return grad_output.masked_fill(~((input - threshold).abs() <= half), 0)
    if grad == "tanh":
        return grad_output * (1 - torch.tanh((input - threshold) / half).square())
    return grad_output.view_as(grad_output)


def derivative(activation: str, x: Tensor) -> Tensor:
    """Of an activation of gemm, from its output, or for gelu, gelu_tanh and silu from its input."""
    if activation == "sigmoid":
        return x * (1 - x)
    if activation == "tanh":
        return 1 - x * x
    if activation == "elu":
        return torch.where(x > 0, torch.ones_like(x), x + 1)
    if activation == "gelu":
        density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density
    if activation == "gelu_tanh":
        scale = math.sqrt(2 / math.pi)
        t = torch.tanh(scale * (x + 0.044715 * x * x * x))
        return 0.5 * (1 + t + x * (1 - t * t) * scale * (1 + 3 * 0.044715 * x * x))
    y = torch.sigmoid(x)  # silu
    return y * (1 + x * (1 - y))


def gemm_activation_backward(grad_output: Tensor, saved: Tensor, activation: str) -> Tensor:
    if activation == "relu":  # a choice: of an infinite gradient too
        return relu_backward(grad_output, saved)
    return grad_output * derivative(activation, saved)


def gemm_activation_bias_backward(
    grad_output: Tensor, saved: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    grad = gemm_activation_backward(grad_output, saved, activation)
    return grad, grad.sum(tuple(range(grad.dim() - 1)))


# Matrices, cells and sequences.


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


def bidirectional(name: str, sequence_function: Any) -> Kernel:
    """Both directions of a layer, side by side in one launch where that pays."""
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
            for y in sequence_function.composed(input, *(*tensors, None)[:5], ctx.batch_sizes, reverse)
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


_RECORDED: dict[str, Kernel] = {
    "sigmoid_backward": checked("sigmoid_backward", sigmoid_backward),
    "relu_backward": checked("relu_backward", relu_backward),
    "binarize_backward": checked("binarize_backward", binarize_backward),
    "gemm_activation_backward": checked("gemm_activation_backward", gemm_activation_backward),
    "gemm_activation_bias_backward": checked("gemm_activation_bias_backward", gemm_activation_bias_backward),
    "gemm": gemm,
    "lltm_cell": lltm_cell,
    "lltm": sequence(LltmSequence),
    "lstm": sequence(LstmSequence),
    "lltm_bidirectional": bidirectional("lltm", LltmSequence),
    "lstm_bidirectional": bidirectional("lstm", LstmSequence),
}
for _name, _recorded in _RECORDED.items():
    on_autograd(_name, _recorded)
# No part of a graph: what the Functions call.
for _name in (
    "gemm_forward",
    "lltm_cell_forward",
    "lltm_cell_backward",
    *(f"{op}{end}" for op in ("lltm", "lstm") for end in ("_forward", "_backward", "_algorithm")),
    *(f"{op}_bidirectional{end}" for op in ("lltm", "lstm") for end in ("_forward", "_backward")),
):
    on_autograd(_name, functools.partial(below_autograd, _name))
_library.impl("gemm_out", writing_out("gemm_out", refuse("gemm")), "Autograd")


# ---- autocast


def cast(x: Any) -> Any:
    """To autocast's dtype, whatever it casts: no float64, and nothing but floating point."""
    if isinstance(x, (list, tuple)):
        return [cast(each) for each in x]
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def on_autocast(name: str, of_args: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
    """``of_args`` casts the arguments. Below, autocast is off: the library's own calls must not cast."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        args = tuple(of_args(args))
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return getattr(ops, name)(*args, **kwargs)

    for key in ("AutocastCPU", "AutocastCUDA"):
        _library.impl(name, kernel, key)


def cast_cell(x: Any) -> Any:
    """A cell state stays, which float32 serves best, unless it is of the other half type."""
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


_CAST = {
    "gemm": all_with(),
    "lltm_cell": all_with(4),
    **{name: all_with(2) for name in ("lltm", "lstm", "lltm_algorithm", "lstm_algorithm")},
    **dict.fromkeys(("lltm_bidirectional", "lstm_bidirectional"), of_directions),
}


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


_STEPS = ("round", "floor", "ceil", "trunc", "binarize")
_SHAPES: dict[str, Kernel] = {
    **dict.fromkeys(("sigmoid", "relu", *_STEPS), of_input),
    **{f"{name}_": nothing for name in ("sigmoid", "relu", *_STEPS)},
    **{f"{name}_out": resized for name in ("sigmoid", "relu", *_STEPS)},
    **{f"{name}_backward": of_last for name in ("sigmoid", "relu", "binarize", "gemm_activation")},
    "gemm": shape_gemm,
    "gemm_out": nothing,
    "gemm_forward": shape_gemm_forward,
    "gemm_activation_bias_backward": shape_bias_backward,
    "lltm_cell": shape_cell,
    "lltm_cell_forward": shape_cell_forward,
    "lltm_cell_backward": shape_cell_backward,
    **dict.fromkeys(("lltm", "lstm"), shape_sequence),
    **{f"{name}_forward": shape_sequence_forward for name in ("lltm", "lstm")},
    **{f"{name}_backward": shape_sequence_backward for name in ("lltm", "lstm")},
    **{f"{name}_bidirectional": shape_both for name in ("lltm", "lstm")},
    **{f"{name}_bidirectional_forward": shape_both_forward for name in ("lltm", "lstm")},
    **{f"{name}_bidirectional_backward": shape_both_backward for name in ("lltm", "lstm")},
}


def meta(x: Any) -> Any:
    """Tensors without memory, of the sizes and strides of those in ``x``."""
    if isinstance(x, (list, tuple)):
        return [meta(each) for each in x]
    if not isinstance(x, Tensor):
        return x
    if x.layout != torch.strided:
        return torch.empty(x.shape, dtype=x.dtype, layout=x.layout, device="meta")
    sizes, strides = ([int(n) for n in dims] for dims in (x.shape, x.stride()))
    return torch.empty_strided(sizes, strides, dtype=x.dtype, device="meta")


def check_devices(name: str, args: Sequence[Any]) -> None:
    """What meta tensors cannot show: that all tensors are on one device."""
    first = next(tensors_of(args))
    for argument, x in zip(getattr(ops, name).default._schema.arguments, args, strict=False):
        if isinstance(x, Tensor) and x.device != first.device:
            raise RuntimeError(
                f"{name.removesuffix('_out')}: expected {argument.name} on {first.device}, got {x.device}"
            )


def check_on_meta(name: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> None:
    """The library's own checks, so that a traced call raises the errors of a real one."""
    # Not above: it brings sympy, half a second of an import. What traces has it already.
    from torch.fx.experimental.symbolic_shapes import has_free_symbols

    check_devices(name, args)
    if any(has_free_symbols(x) for x in tensors_of(args)):
        return  # whose sizes the library cannot see; it checks them when it runs
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


for _name, _shapes in _SHAPES.items():
    on_fake(_name, _shapes)
for _name in (*_SHAPES, "lltm_algorithm", "lstm_algorithm"):
    on_autocast(_name, _CAST.get(_name, lambda args: args))
