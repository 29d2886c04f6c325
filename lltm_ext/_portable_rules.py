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
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from lltm_ext._arguments import units_of
from lltm_ext._custom_cell import CustomCellFunction, h_of_steps
from lltm_ext._formula.text import SEPARATOR
from lltm_ext._library import differentiable_gradients
from lltm_ext._loop import compute_dtype, zero_state
from lltm_ext._portable_bindings import (
    FLOATING,
    RECORDING,
    below,
    check_device,
    dtype_name,
    require_grad,
    typed,
)
from lltm_ext._unary import UNARY_OPS, UnaryOp
from lltm_ext.elementwise import ElementwiseFunction, composed_backward, formula_of
from lltm_ext.fake_quantize import FakeQuantizeFunction
from lltm_ext.gemm import _Product, activation_backward
from lltm_ext.lltm import _CellFunction
from lltm_ext.scan import ScanFunction
from lltm_ext.scan import _gradients as scan_gradients
from lltm_ext.stochastic_round import StochasticRoundFunction, stochastic_round_reference

Kernel = Callable[..., Any]

ops = torch.ops.lltm_ext
_library = torch.library.Library("lltm_ext", "IMPL")
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


def arguments_of(name: str) -> Any:
    """The arguments of the op, as its schema declares them."""
    return getattr(ops, name).default._schema.arguments


def defaults_of(name: str) -> list[tuple[str, Any]]:
    """Each argument of the op with its default value."""
    return [(argument.name, argument.default_value) for argument in arguments_of(name)]


def filled(defaults: list[tuple[str, Any]], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments of a call: the dispatcher leaves out defaults at the end."""
    return [*args, *(kwargs.get(argument, value) for argument, value in defaults[len(args) :])]


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
    if torch.is_grad_enabled() and require_grad(args):
        return True
    return forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None for x in tensors_of(args)
    )


def below_autograd(name: str, *args: Any, **kwargs: Any) -> Any:
    return below(getattr(ops, name), *args, **kwargs)


def apply_of(function: Any) -> Kernel:
    """``function.apply`` for calls under no transform, without torch's inspection of the signature, which
    takes longer than a small op."""
    apply: Kernel = super(torch.autograd.Function, function).apply
    return apply


def recording(name: str, recorded: Kernel, checks: bool = False) -> Kernel:
    """Runs the op or, where a gradient is wanted, ``recorded`` with all arguments, for its first results.

    ``checks`` makes the op's checks come first, for a ``recorded`` that has none.
    """
    defaults = defaults_of(name)
    returns = len(getattr(ops, name).default._schema.returns)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not needs_grad(*args, *kwargs.values()):
            return below_autograd(name, *args, **kwargs)
        return record(*args, **kwargs)

    def record(*args: Any, **kwargs: Any) -> Any:
        if checks:
            check_on_meta(name, args)
        found = recorded(*filled(defaults, args, kwargs))
        return found if isinstance(found, Tensor) else found[0] if returns == 1 else found[:returns]

    RECORDING[name] = record
    return kernel


def note_change(x: Tensor) -> None:
    """Tells autograd of a write, because it may have saved the old values."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def check_in_place(x: Tensor) -> None:
    """Raises autograd's own error before anything is written."""
    owner = x._base if x._is_view() else x
    if torch.is_grad_enabled() and owner is not None and owner.is_leaf and owner.requires_grad:
        what = "leaf" if owner is x else "view of a leaf"
        raise RuntimeError(f"a {what} Variable that requires grad is being used in an in-place operation.")


def check_written(op: str, name: str, x: Tensor) -> None:
    """Checks what the library cannot see of a tensor that is written."""
    if x.is_inference() and not x.is_meta and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{op}: expected {name} not to be an inference tensor, because it is written outside inference "
            "mode; clone it first"
        )
    if x.is_quantized:
        raise TypeError(f"{op}: expected {name} of dtype {FLOATING}, got {dtype_name(x)}")
    is_lazy = x.is_neg() or x.is_conj()
    if is_lazy and any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride(), strict=True)):
        raise RuntimeError(
            f"{op}: expected {name} with memory for each element, because it is written, got strides "
            f"{list(x.stride())} of sizes {list(x.shape)}; clone it first"
        )


def in_place(name: str, op: UnaryOp) -> Kernel:
    """Returns ``<name>_`` with the gradient of ``name``."""
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
        check_written(name, "input", input)
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
        check_written(name, "out", args[-1])
        below_autograd(f"{name}_out", *args)
        note_change(args[-1])

    return kernel


def on_lazy(name: str) -> None:
    """Serves tensors whose memory holds the negative or the conjugate, as implement_lazy does in C++."""

    def kernel(*args: Any) -> None:
        plain = [x.resolve_conj().resolve_neg() if isinstance(x, Tensor) else x for x in args]
        written = -1 if name.endswith("_out") else 0
        target, result = args[written], plain[written]
        check_written(name.removesuffix("_out").removesuffix("_"), "out" if written else "input", target)
        getattr(ops, name)(*plain)
        if target is not result:
            target.resize_(result.shape)
            target.copy_(result)

    for key in ("Conjugate", "Negative"):
        _library.impl(name, kernel, key)


def activation_bias_backward(grad_output: Tensor, saved: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    grad = activation_backward(grad_output, saved, activation)
    return grad, grad.sum(tuple(range(grad.dim() - 1)))


def elementwise(inputs: Sequence[Tensor], scalars: Sequence[float], program: str) -> Tensor:
    result: Tensor = ElementwiseFunction.apply(formula_of(program), tuple(scalars), *inputs)
    return result


class MaskFunction(torch.autograd.Function):
    """fake_quantize_with_mask, and the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        output, mask = below_autograd("fake_quantize_with_mask", *args)
        ctx.mark_non_differentiable(mask)
        ctx.set_materialize_grads(False)
        ctx.strides = output.stride()
        ctx.save_for_backward(mask)
        return output, mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        found = (
            grad if grad is None else ops.fake_quantize_mask_backward(grad, *ctx.saved_tensors, ctx.strides)
        )
        return found, None, None, None, None, None


class MaskBackwardFunction(torch.autograd.Function):
    """The mask's backward. It is linear in the gradient, so it is also its own double backward."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, mask: Tensor, strides: Sequence[int]) -> Tensor:
        ctx.strides = strides
        ctx.save_for_backward(mask)
        found: Tensor = below_autograd("fake_quantize_mask_backward", grad, mask, strides)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ops.fake_quantize_mask_backward(grad, *ctx.saved_tensors, ctx.strides), None, None


def fake_quantize(input: Tensor, scale: Tensor, zero_point: Tensor, *rest: Any) -> Any:
    """Saves one bit per element if only the input needs a gradient."""
    if needs_grad(scale, zero_point):
        return apply_of(FakeQuantizeFunction)(input, scale, zero_point, *rest)
    return ops.fake_quantize_with_mask(input, scale, zero_point, *rest[:-1])


def fake_quantize_with_mask(input: Tensor, scale: Tensor, zero_point: Tensor, *rest: Any) -> Any:
    if needs_grad(scale, zero_point):
        raise RuntimeError(
            "fake_quantize_with_mask: there is no gradient for scale and zero_point, but one requires it"
        )
    return apply_of(MaskFunction)(input, scale, zero_point, *rest)


def is_half_on_cpu(x: Tensor) -> bool:
    return x.is_cpu and x.dtype in (torch.float16, torch.bfloat16)


def record_one(*args: Any) -> Any:
    """Runs one direction. On the CPU half types are computed in float32."""
    input, states = args[0], args[2]
    if not is_half_on_cpu(input):
        return apply_of(CustomCellFunction)(*args)
    check_on_meta("custom_cell", args)
    wide = (x.float() if isinstance(x, Tensor) and is_half_on_cpu(x) else x for x in args)
    output, h_n, states_n, *_ = apply_of(CustomCellFunction)(*wide)
    dtype = input.dtype
    return output.to(dtype), h_n.to(dtype), states_n.to(dtype if states is None else states.dtype)


DIRECTION = [x.name for x in arguments_of("custom_cell") if "Tensor" in str(x.type)][1:]  # as a list


class BothFunction(torch.autograd.Function):
    """Runs both directions, side by side if that is faster: ``apply(*how, input, *forward, *reverse)``."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        how, inputs = args[:3], args[3:]
        y = below_autograd("custom_cell_bidirectional_forward", inputs[0], inputs[1:10], inputs[10:], *how)
        used = (x for found in (y[:6], y[6:]) for x in (h_of_steps(found[0], found[5]), *found[3:5]))
        ctx.how = how
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *used)
        return *y[:3], *y[6:9]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # read once: under activation checkpointing each access unpacks them
        input, directions = tensors[0], (tensors[1:10], tensors[10:19])
        needed, (batch_sizes, algorithm, program) = ctx.needs_input_grad[3:], ctx.how
        if all(g is None for g in grads):
            return (None,) * 22
        if torch.is_grad_enabled():
            found: list[Any] = []
            for i, direction in enumerate(directions):
                options = (batch_sizes, i == 1, algorithm, program)
                function, inputs = CustomCellFunction.composed(options, [input, *direction])
                found.append(differentiable_gradients(function, inputs, grads[3 * i : 3 * i + 3]))
            of_input: Any = found[0][0] + found[1][0]
            of_directions = [(*own[1:7], None, None, own[7]) for own in found]
        else:
            wanted = needed[0], needed[5] or needed[9] or needed[14] or needed[18]
            given = (grads, input, *directions, tensors[19:], *ctx.how, *wanted)
            of_input, *others = below_autograd("custom_cell_bidirectional_backward", *given)
            of_directions = [(*own, None, None, own[4].clone()) for own in (others[:6], others[6:])]
        gradients = (of_input, *of_directions[0], *of_directions[1])
        return None, None, None, *(g if wanted else None for g, wanted in zip(gradients, needed, strict=True))


def record_both(
    input: Tensor, forward: Sequence[Any], reverse: Sequence[Any], batch_sizes: Any, *how: Any
) -> list[list[Tensor]]:
    if not len(forward) == len(reverse) == len(DIRECTION):
        check_on_meta("custom_cell_bidirectional", (input, forward, reverse, batch_sizes, *how))
    if not is_half_on_cpu(input):
        return [list(apply_of(BothFunction)(batch_sizes, *how, input, *forward, *reverse))]
    directions = (forward, False), (reverse, True)
    found = (
        record_one(input, *tensors, batch_sizes, is_reverse, *how, bias_hh)
        for (*tensors, bias_hh), is_reverse in directions
    )
    return [[y for outputs in found for y in outputs]]


# ---- ops of cells with names of their own, as src/custom_cell/built_in.h


def own_ops(name: str) -> dict[str, Kernel]:
    """The ops of a cell as calls of custom_cell, keyed by their suffixes."""

    def as_c(states: Tensor) -> Tensor:  # not a view, which could not be detached in place
        return torch.ops.aten._unsafe_view(states, states.shape[1:]) if states.dim() == 3 else states

    def sequence(*args: Any) -> tuple[Tensor, ...]:
        *inputs, batch_sizes, reverse, algorithm, reset, bias_hh = args
        how = (batch_sizes, reverse, algorithm, name, bias_hh)
        output, h_n, states_n = ops.custom_cell(*inputs, None, None, reset, *how)
        return output, h_n, as_c(states_n)

    def forward(*args: Any) -> tuple[Tensor, ...]:
        *inputs, batch_sizes, reverse, algorithm, reset, bias_hh = args
        how = (batch_sizes, reverse, algorithm, name, bias_hh)
        output, h_n, states_n, *saved, _ = ops.custom_cell_forward(*inputs, None, None, reset, *how)
        return output, h_n, as_c(states_n), *saved

    def backward(*args: Any) -> tuple[Tensor, ...]:
        (of_output, of_h, of_states), inputs, saved = args[:3], args[3:8], args[8:11]
        batch_sizes, reverse, algorithm, *needed, reset = args[11:]
        if of_states is not None and inputs[2] is None:
            of_states = of_states.unsqueeze(0)
        given = (of_output, of_h, of_states, *saved, *inputs, None, None, None, reset)
        return tuple(ops.custom_cell_backward(*given, batch_sizes, reverse, algorithm, name, *needed)[:6])

    def algorithm_of(*args: Any) -> str:
        *inputs, batch_sizes, algorithm, backward = args
        how = (batch_sizes, False, algorithm, name, backward)
        return ops.custom_cell_algorithm(*inputs, None, None, None, *how)

    def direction(given: Sequence[Tensor]) -> list[Tensor | None]:
        if len(given) not in (4, 5):
            raise RuntimeError(
                f"{name}_bidirectional: expected a direction to be [h0, c0, weight_ih, weight_hh] or these "
                f"and bias, got {len(given)} tensors"
            )
        return [*given, *[None] * (len(DIRECTION) - len(given))]

    def both(input: Tensor, forward: Sequence[Tensor], reverse: Sequence[Tensor], *how: Any) -> list[Tensor]:
        return ops.custom_cell_bidirectional(input, direction(forward), direction(reverse), *how, name)

    def both_forward(input: Tensor, forward: Any, reverse: Any, *how: Any) -> list[Tensor]:
        y = ops.custom_cell_bidirectional_forward(input, direction(forward), direction(reverse), *how, name)
        return [*y[:5], *y[6:11]]  # without h of every step, which is the output

    def both_backward(grads: Any, input: Tensor, forward: Any, reverse: Any, *args: Any) -> list[Tensor]:
        saved, batch_sizes, algorithm, *needed = args
        given = (grads, input, direction(forward), direction(reverse), saved)
        how = (batch_sizes, algorithm, name, *needed)
        g = ops.custom_cell_bidirectional_backward(*given, *how)
        return [*g[:6], *g[7:12]]  # without those of parameters

    return {
        "": sequence,
        "_forward": forward,
        "_backward": backward,
        "_algorithm": algorithm_of,
        "_bidirectional": both,
        "_bidirectional_forward": both_forward,
        "_bidirectional_backward": both_backward,
    }


def implement_own(name: str, function: Kernel) -> None:
    defaults = defaults_of(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return function(*filled(defaults, args, kwargs))

    _library.impl(name, kernel, "CompositeImplicitAutograd")


# ---- autocast


def cast(x: Any, argument: str) -> Any:
    """Casts to autocast's dtype, which applies to floating point other than float64.

    A cell state stays in float32 or in autocast's dtype; the other half type becomes float32. Resets stay.
    """
    if isinstance(x, (list, tuple)):
        return [cast(*pair) for pair in zip(x, DIRECTION, strict=False)]
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    dtype = torch.get_autocast_dtype(x.device.type)
    if argument in ("states", "old_cell") and x.dtype != dtype:
        return x.float()
    return x if argument == "reset" else x.to(dtype)


def on_autocast(name: str, casts: bool) -> None:
    """Turns autocast off in a call of the op: the library's own calls must not cast."""
    names = [argument.name for argument in arguments_of(name)]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if casts:
            args = tuple(cast(*pair) for pair in zip(args, names, strict=False))
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
    """The shapes of a cell's gradients; None for those that are not needed."""
    _, _, new_cell, _, input, weights, old_h, *needed = args
    of_input, of_h, of_cell = (
        dense(x) if wanted else None for x, wanted in zip((input, old_h, new_cell), needed, strict=True)
    )
    return of_input, dense(weights), weights.new_empty(weights.shape[0]), of_h, of_cell


@functools.cache
def sizes_of(program: str) -> list[int]:
    """The numbers of gates, states, kept gates and other saved values; whether h of every step is apart from
    the output, whether there is a product, whether projections are in float32; and of outputs."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        sizes: list[int] = ops.custom_cell_sizes(program)
    return sizes


def shape_cell(input: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """The outputs, with those for the backward."""
    h0, states, weight_ih = args[:3]
    batch_sizes, program = args[8], args[11]
    gates, count, kept_gates, extra, has_output_apart, recurrent, wide, outputs = sizes_of(program)
    hidden = units_of(input, weight_ih, gates) if h0 is None else h0.shape[1]
    h_n = zero_state(input, hidden, batch_sizes) if h0 is None else dense(h0)
    states_n = h_n.new_empty(count, *h_n.shape) if states is None else dense(states)
    if not recurrent and weight_ih is None:
        kept_gates = 0
    of_steps = (outputs * hidden, kept_gates * hidden, extra * hidden, has_output_apart * hidden)
    output, kept, *rest = (input.new_empty(*input.shape[:-1], n) for n in of_steps)
    if wide and not recurrent and weight_ih is not None:
        kept = kept.to(torch.promote_types(input.dtype, torch.float32))
    return output, h_n, states_n, kept, *rest


def shape_both(count: int) -> Kernel:
    """The first ``count`` outputs of both directions."""

    def shapes(
        input: Tensor, forward: Sequence[Any], reverse: Sequence[Any], batch_sizes: Any, *how: Any
    ) -> list[Tensor]:
        directions = (forward, False), (reverse, True)
        return [
            y
            for x, is_reverse in directions
            for y in shape_cell(input, *x[:8], batch_sizes, is_reverse, *how)[:count]
        ]

    return shapes


def shape_gradients(input: Tensor, direction: Sequence[Any], of_input: bool, of_bias: bool) -> list[Tensor]:
    """The gradients of a direction; empty where they are not needed, or where the cell has none."""
    weight_ih = direction[2]
    of_gates = input.flatten(0, -2)[:0].sum(0) if weight_ih is None else weight_ih[:, 0]
    given = (input if of_input else None, *direction[:4], of_gates if of_bias else None, direction[5])
    return [input.new_empty(0) if x is None else dense(x) for x in given]


def shape_cell_gradients(*args: Any) -> list[Tensor]:
    return shape_gradients(args[6], args[7:15], *args[-2:])


def shape_both_gradients(_: Any, input: Tensor, forward: Any, reverse: Any, *args: Any) -> list[Tensor]:
    needed = args[-2:]
    return [*shape_gradients(input, forward, *needed), *shape_gradients(input, reverse, *needed)[1:]]


def shape_scan(a: Tensor, b: Tensor, *args: Any) -> Tensor:
    sizes = torch.broadcast_shapes(a.shape, b.shape)
    for x in (b, a):
        if x.shape == sizes and x.dtype == b.dtype:
            return torch.empty_like(x)
    return b.new_empty(sizes)


def shape_scan_backward(grad: Tensor, a: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Those of a and of the initial state are without elements where they are not wanted."""
    h, of_initial = args[2], args[4]
    of_a = of_first = grad.new_empty(0)
    if h is not None:
        of_a = torch.empty_like(h) if a.dtype == h.dtype else a.new_empty(grad.shape)
    if of_initial:
        of_first = grad.new_empty(grad.shape[1:])
    return of_a, torch.empty_like(grad if h is None else h), of_first


def shape_elementwise(operands: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Like the first dense operand of the result's sizes, or else the first operand of these sizes."""
    operands = [x.to(dtype) for x in operands]
    sizes = torch.broadcast_shapes(*(x.shape for x in operands))
    results = [(torch.empty_like(x), x) for x in operands if x.shape == sizes]
    of_dense = (y for y, x in results if y.stride() == x.stride())
    return next(of_dense, results[0][0] if results else operands[0].new_empty(sizes))


def shape_from_formula(inputs: Sequence[Tensor], *args: Any) -> Tensor:
    deciding = [x for x in inputs if x.dim() > 0] or inputs
    return shape_elementwise(inputs, functools.reduce(torch.promote_types, (x.dtype for x in deciding)))


def meta(x: Any) -> Any:
    """Returns meta tensors with the sizes and strides of those in ``x``."""
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
    op = name.removesuffix("_out").removesuffix("_forward")
    named = list(zip((argument.name for argument in arguments_of(name)), args, strict=False))
    if name == "elementwise":
        formula = formula_of(args[-1])
        op, named = formula.name, list(zip(formula.tensors, args[0], strict=True))
    elif name.startswith("custom_cell"):
        op = dict(named)["program"].split(SEPARATOR)[0]
        directions = [x for argument, x in named if argument.endswith("_direction")]
        named += [pair for direction in directions for pair in zip(DIRECTION, direction, strict=False)]
    first = next(tensors_of(args))
    for argument, x in named:
        if not isinstance(x, Tensor) or x.device == first.device:
            continue
        if argument not in ("scale", "zero_point") or x.dim() > 0 or x.device.type != "cpu":
            raise RuntimeError(f"{op}: expected {argument} on {first.device}, got {x.device}")


def check_on_meta(name: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> None:
    """Makes the library's own checks, so that a traced call raises the errors of a real one."""
    # Imported here because it imports sympy, which takes half a second. Tracing has imported it already.
    from torch.fx.experimental.symbolic_shapes import has_free_symbols

    # The library cannot see symbolic sizes; it checks them when it runs.
    if not any(has_free_symbols(x) for x in tensors_of(args)):
        try:
            with temporarily_clear_interpreter_stack(), _disable_current_modes():
                getattr(torch.ops.lltm_ext_checks, name)(*meta(args), **(kwargs or {}))
        except RuntimeError as error:
            raise typed(error) from None
    check_devices(name, args)


# ---- torch's settings


def rnn_allows_tf32() -> bool:
    rnn: Any = torch.backends.cudnn.rnn
    return bool(rnn.fp32_precision == "tf32")


_own = torch.library.Library("lltm_ext", "FRAGMENT")
_own.define("rnn_allows_tf32() -> bool")
_own.impl("rnn_allows_tf32", rnn_allows_tf32, "CompositeExplicitAutograd")


# ---- what needs torch's random generators


def stochastic_round(input: Tensor, dtype: torch.dtype, *, generator: Any = None) -> Tensor:
    """Runs in torch's ops, as the reference does."""
    check_stochastic_round(input, dtype)
    if generator is not None and generator.device.type != input.device.type:
        raise RuntimeError(
            f"stochastic_round: expected a generator on {input.device}, got one on {generator.device}"
        )
    down, up, probability = stochastic_round_reference(input, dtype)
    drawn = torch.empty_like(input, dtype=torch.float64).uniform_(generator=generator)
    return torch.empty_like(input, dtype=dtype).copy_(torch.where(drawn < probability, up, down))


def check_stochastic_round(input: Tensor, dtype: torch.dtype) -> None:
    check_device("stochastic_round", "input", input)
    if input.dtype != torch.float32:
        raise TypeError(f"stochastic_round: expected input of dtype float32, got {dtype_name(input)}")
    if dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"stochastic_round: expected dtype float16 or bfloat16, got {dtype_name(dtype)}")


_own.define(
    "stochastic_round(Tensor input, ScalarType dtype, *, Generator? generator=None) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag),
)
_own.impl("stochastic_round", stochastic_round, "CompositeExplicitAutograd")
_own.impl("stochastic_round", recording("stochastic_round", apply_of(StochasticRoundFunction)), "Autograd")


# ---- the ops


def define(
    name: str, autograd: Kernel | None = None, shapes: Kernel | None = None, casts: bool = False
) -> None:
    """Registers the kernels of an op. Without ``autograd``, no graph records it, but its nodes call it."""

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

_name = "custom_cell"
define(_name, recording(_name, record_one), lambda *args: shape_cell(*args)[:3], casts=True)
define(f"{_name}_forward", None, shape_cell)
define(f"{_name}_backward", None, shape_cell_gradients)
define(f"{_name}_gradients", None, lambda *args: tuple(shape_cell_gradients(*args)))
define(f"{_name}_algorithm", casts=True)
_name += "_bidirectional"
define(_name, recording(_name, record_both), shape_both(3), casts=True)
define(f"{_name}_forward", None, shape_both(6))
define(f"{_name}_backward", None, shape_both_gradients)

for _cell in ("lltm", "lstm"):
    for _suffix, _function in own_ops(_cell).items():
        implement_own(_cell + _suffix, _function)

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

define("fake_quantize", recording("fake_quantize", fake_quantize), of_first)
_name = "fake_quantize_with_mask"
define(
    _name,
    recording(_name, fake_quantize_with_mask),
    lambda input, *args: (
        torch.empty_like(input),
        input.new_empty((input.numel() + 7) // 8, dtype=torch.uint8),
    ),
)
_name = "fake_quantize_mask_backward"
define(
    _name,
    recording(_name, apply_of(MaskBackwardFunction)),
    lambda grad, mask, strides: torch.empty_strided(
        grad.shape, strides, dtype=grad.dtype, device=grad.device
    ),
)
define(
    "fake_quantize_backward",
    None,
    lambda grad, input, scale, zero_point, *args: (
        torch.empty_like(input),
        *(
            dense(x if x.is_floating_point() else x.to(compute_dtype(input.dtype)))
            for x in (scale, zero_point)
        ),
    ),
)
define("scan", recording("scan", apply_of(ScanFunction)), shape_scan)
define("scan_backward", recording("scan_backward", scan_gradients, checks=True), shape_scan_backward)
define("elementwise", recording("elementwise", elementwise), shape_from_formula)
define(
    "elementwise_backward",
    recording("elementwise_backward", lambda *args: [composed_backward(*args)]),
    lambda grad, used, scalars, program, wanted: [
        shape_elementwise([grad, *used], grad.dtype) for _ in wanted
    ],
)
on_autocast("stochastic_round", casts=False)
