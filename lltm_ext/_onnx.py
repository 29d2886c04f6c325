"""Our ops for torch.onnx, which knows torch's ops only: each as a function of those.

With ``dynamo=True`` these functions join the exporter's decompositions; with ``dynamo=False`` they run in the
place of the ops while the exporter traces. The names that are hooked here are private to torch.onnx. With a
torch that lacks one of them, an export fails at our ops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lltm_ext._after_import import AfterImport
from lltm_ext._arguments import SequenceCall
from lltm_ext._custom_cell import Found, by_loop, transformed_both, unsafe_view
from lltm_ext._formula.text import SEPARATOR
from lltm_ext._layers import tracing_state
from lltm_ext._loop import compute_dtype, planes_of, run_loop, step_of
from lltm_ext._program import CELLS
from lltm_ext._unary import UNARY_OPS, UnaryOp
from lltm_ext.fake_quantize import fake_quantize_reference
from lltm_ext.gemm import gemm_reference
from lltm_ext.lltm import lltm_cell_reference
from lltm_ext.scan import aligned, scan_reference


@functools.cache
def functions() -> dict[Any, Callable[..., Any]]:
    """The functions by their ops."""
    found: dict[str, Callable[..., Any]] = {
        "gemm": gemm,
        "fake_quantize": fake_quantize,
        "lltm_cell": lltm_cell_reference,
        "scan": linear_scan,
        "custom_cell": custom_cell,
        "custom_cell_bidirectional": functools.partial(transformed_both, op=custom_cell),
    }
    for name, op in UNARY_OPS.items():
        found |= {name: op.reference, f"{name}_": in_place(op)}
    return {getattr(torch.ops.lltm_ext, name).default: function for name, function in found.items()}


def in_place(op: UnaryOp) -> Callable[..., Tensor]:
    return lambda input, *how: input.copy_(op.reference(input, *how))


def gemm(
    a: Tensor, b: Tensor, bias: Tensor | None = None, activation: str | None = None, precision: str = "ieee"
) -> Tensor:
    return gemm_reference(a, b, bias, activation)


# ---- fake_quantize


def fake_quantize(
    input: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    axis: int | None = None,
    grad_factor: float = 1.0,
) -> Tensor:
    """QuantizeLinear and DequantizeLinear, which hold 8 bits; arithmetic for more, and for float64."""
    low, high = (0, 255) if quant_min >= 0 else (-128, 127)
    if quant_min < low or quant_max > high or input.dtype == torch.float64:
        return fake_quantize_reference(input, scale, zero_point, quant_min, quant_max, axis=axis)
    x, scale = input.float(), scale.detach().float()
    zero_point = zero_point.detach().float().round().clamp(quant_min, quant_max).to(torch.int32)
    if scale.numel() == zero_point.numel() == 1:
        shape: list[int] = []
        axis, scale, zero_point = None, scale.reshape(()), zero_point.reshape(())
    else:
        axis = (axis or 0) % x.dim()
        shape = [-1 if i == axis else 1 for i in range(x.dim())]
        scale, zero_point = (y if y.numel() > 1 else y.expand(x.shape[axis]) for y in (scale, zero_point))
    if (quant_min, quant_max) != (low, high):
        x = clip(x, *(((q - zero_point) * scale).reshape(shape) for q in (quant_min, quant_max)))
    return in_8_bits(x, scale, zero_point, axis, low, high).to(input.dtype)


def clip(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """torch.clamp, whose nodes the exporter merges to a Clip: two of one tensor are then an invalid model."""
    if tracing_state() is not None or low.dim() > 0:
        return torch.clamp(x, low, high)
    return torch.onnx.ops.symbolic("Clip", (x, low, high), dtype=x.dtype, shape=x.shape)


def in_8_bits(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None, low: int, high: int) -> Tensor:
    if tracing_state() is None:  # torch's own op has no fake kernel
        symbolic = functools.partial(torch.onnx.ops.symbolic, attrs={"axis": axis or 0}, shape=x.shape)
        zero_point = zero_point.to(torch.int8 if low < 0 else torch.uint8)
        integers = symbolic("QuantizeLinear", (x, scale, zero_point), dtype=zero_point.dtype)
        return symbolic("DequantizeLinear", (integers, scale, zero_point), dtype=x.dtype)
    with torch._C._AutoDispatchBelowAutograd():  # it has no derivative by the scale, even if nobody asks
        if axis is None:
            return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, low, high)
        return torch.fake_quantize_per_channel_affine(x, scale, zero_point, axis, low, high)


# ---- sequences


def custom_cell(input: Tensor, h0: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """A loop over the steps of the example in a trace, else a scan of any length."""
    batch_sizes, _, _, program = args[7:11]
    name, cell = program.split(SEPARATOR)[0], CELLS.get(program, (None, False))[0]
    if cell is None or cell.function is None:
        raise NotImplementedError(
            f"{name}: expected a cell of a Python function for ONNX, in a process that declares it"
        )
    if batch_sizes is not None:
        raise NotImplementedError(f"{name}: expected padded input for ONNX, got a PackedSequence")
    return by_loop(input, h0, *args, run=scan if tracing_state() is None else run_loop)


def scan(cell: Any, call: SequenceCall, to_initial: bool = False) -> Found:
    """Does what :func:`lltm_ext._loop.run_loop` does by torch's scan, for padded input."""
    from torch._higher_order_ops.scan import scan_op

    compute = compute_dtype(call.input.dtype)
    inputs = [(x if x.dim() == 3 else x.unsqueeze(-1)).to(compute) for x in call.inputs]
    resets = [] if call.reset is None else [call.reset.unsqueeze(-1)]
    of_steps = [x.flip(0) if call.is_reverse else x for x in (planes_of(call), *inputs, *resets)]
    recurrent = [] if call.weight_hh is None else [call.weight_hh]
    initial = [x.to(compute) for x in call.states]
    first, last = len(initial), len(initial) + len(of_steps)

    def run_step(*x: Tensor) -> list[Tensor]:
        states, (planes, *inputs), given = x[:first], x[first:last], list(x[last:])
        weight_hh = given.pop(0) if recurrent else None
        reset = inputs.pop() if resets else None
        here = call._replace(states=given[:first], weight_hh=weight_hh, parameters=given[first:])
        step = step_of(cell, here, to_initial)
        output, new = step(planes, states, inputs, reset)
        return [y.clone() for y in (*new, output)]  # a scan's results share no memory

    # The initial states a second time: resets may lead to them.
    operands = (initial, of_steps, (*recurrent, *call.states, *call.parameters))
    # Detached: torch prepares the derivative of each scan, and fails where a step has symbolic sizes.
    *final, output = scan_op(run_step, *([x.detach() for x in part] for part in operands))
    final = [x.to(s.dtype) for x, s in zip(final, call.states, strict=True)]
    return output.flip(0) if call.is_reverse else output, final


def linear_scan(
    a: Tensor, b: Tensor, initial: Tensor | None = None, reset: Tensor | None = None, reverse: bool = False
) -> Tensor:
    """A loop over the steps of the example in a trace, else a scan of any length."""
    if tracing_state() is not None:
        return scan_reference(a, b, initial, reset=reset, reverse=reverse)
    from torch._higher_order_ops.scan import scan_op

    shape, compute = torch.broadcast_shapes(a.shape, b.shape), compute_dtype(b.dtype)
    of_steps = [x.to(compute).expand(shape) for x in (a, b)]
    of_steps += [] if reset is None else [aligned(reset, len(shape)).expand(shape)]
    first = of_steps[1].new_zeros(shape[1:]) if initial is None else initial.to(compute).expand(shape[1:])

    def run_step(h: Tensor, a: Tensor, b: Tensor, *reset: Tensor) -> list[Tensor]:
        h = torch.where(reset[0], b, a * h + b) if reset else a * h + b
        return [h, h.clone()]  # a scan's results share no memory

    of_steps = [(x.flip(0) if reverse else x).detach() for x in of_steps]
    _, h = scan_op(run_step, [first.detach()], of_steps, ())
    return (h.flip(0) if reverse else h).to(b.dtype)


# ---- the exporters


def with_first_dim(x: Tensor, shape: Sequence[int]) -> Tensor:
    """What layers call ``unsafe_view`` for: they add or drop a first dimension of 1.

    The exporter has no such op, and ``shape`` has the sizes of the example here.
    """
    return x.unsqueeze(0) if len(shape) > x.dim() else x.squeeze(0)


class ByTorchsOps(TorchFunctionMode):
    """Runs the functions in the place of their ops."""

    def __init__(self) -> None:
        super().__init__()
        self.functions = functions() | {unsafe_view: with_first_dim}

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        own = self.functions.get(getattr(function, "default", function))
        if own is None:
            return function(*args, **(kwargs or {}))
        with self:
            return own(*args, **(kwargs or {}))


def trace(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with ByTorchsOps():
        return original(*args, **kwargs)


def decompositions(original: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[Any, Any]:
    return original(*args, **kwargs) | functions()


def wrap(name: str, wrapper: Callable[..., Any], module: ModuleType) -> None:
    """Puts ``wrapper``, which takes the original first, in the place of a function."""
    original = getattr(module, name, None)
    if original is not None:
        setattr(module, name, functools.partial(wrapper, original))


AfterImport(
    "torch.onnx._internal.torchscript_exporter.utils",
    functools.partial(wrap, "_trace_and_get_graph_from_model", trace),
)
AfterImport(
    "torch.onnx._internal.exporter._decomp",
    functools.partial(wrap, "create_onnx_friendly_decomposition_table", decompositions),
)
