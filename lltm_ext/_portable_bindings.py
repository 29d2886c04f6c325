"""The raw bindings lltm_ext._C.<op> for the portable library, which registers dispatcher ops only.

The stubs in _C list the functions of each module. Those that no dispatcher op computes are written here.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Binding = Callable[..., Any]

ops = torch.ops.lltm_ext
FLOATING = "float16, bfloat16, float32 or float64"


def gemm_into(c: Tensor, a: Tensor, b: Tensor) -> None:
    ops.gemm_out(a, b, None, None, "ieee", c)


def gemm_backward(grad_c: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    if a.dim() != b.dim():
        raise RuntimeError(
            f"gemm.backward: expected a and b of as many dimensions, got {a.dim()} and {b.dim()}"
        )
    return [ops.gemm(grad_c, b.mT), ops.gemm(a.mT, grad_c)]


def cell_forward(
    input: Tensor, weights: Tensor, bias: Tensor | None, old_h: Tensor, old_cell: Tensor
) -> list[Tensor]:
    new_h, new_cell, gates = ops.lltm_cell_forward(input, weights, bias, old_h, old_cell)
    X = torch.cat([old_h, input], 1)
    gate_weights = X @ weights.t() if bias is None else torch.addmm(bias, X, weights.t())
    return [new_h, new_cell, *gates, X, gate_weights]


def cell_backward(
    grad_h: Tensor, grad_cell: Tensor, new_cell: Tensor, X: Tensor, weights: Tensor, **gates: Tensor
) -> list[Tensor]:
    batch, hidden = new_cell.shape
    names = ("input_gate", "output_gate", "candidate_cell")
    activated = [check_like(name, gates[name], weights, [batch, hidden]) for name in names]
    check_like("gate_weights", gates["gate_weights"], weights, [batch, 3 * hidden])
    old_h, input, needed = X[:, :hidden], X[:, hidden:], (True, True, True)
    grad_input, grad_weights, grad_bias, grad_old_h, grad_old_cell = ops.lltm_cell_backward(
        grad_h, grad_cell, new_cell, torch.stack(activated), input, weights, old_h, *needed
    )
    return [grad_old_h, grad_input, grad_weights, grad_bias.unsqueeze(0), grad_old_cell]


def scan_backward(
    grad: Tensor,
    a: Tensor,
    h: Tensor,
    initial: Tensor | None = None,
    reset: Tensor | None = None,
    reverse: bool = False,
) -> list[Tensor]:
    return ops.scan_backward(grad, a, initial, reset, h, reverse, True)


COMPOSED: dict[str, Binding] = {
    "gemm.gemm": gemm_into,
    "gemm.backward": gemm_backward,
    "round.backward": lambda grad_output: grad_output,
    "lltm.forward": cell_forward,
    "lltm.backward": cell_backward,
    "scan.backward": scan_backward,
    "fake_quantize.forward": ops.fake_quantize_with_mask,
    "fake_quantize.backward": lambda grad_output, mask: ops.fake_quantize_mask_backward(
        grad_output, mask, grad_output.stride()
    ),
    "fake_quantize.backward_learnable": ops.fake_quantize_backward,
    "stochastic_round.forward": lambda input, dtype, generator=None: ops.stochastic_round(
        input, dtype, generator=generator
    ),
    "stochastic_round.backward": lambda grad_output: grad_output.float(),
}
NEEDS_NO_CHECK = ("scale", "zero_point", "mask", "initial", "reset")  # CHECK_INPUT is not for these


def bindings(stub: Path) -> Iterator[tuple[str, Binding]]:
    """The functions of the module that this stub describes, by name."""
    op = stub.stem
    for node in ast.parse(stub.read_text()).body:
        # A single library adds its cells itself, and no op says which kernel runs.
        if not isinstance(node, ast.FunctionDef) or node.name in ("add_compiled_cell", "kernel_of"):
            continue
        name = node.name
        if name.startswith("call_"):
            yield name, bypassing(name.removeprefix("call_"))
            continue
        if name in ("call", "source", "compile", "compilations"):
            yield name, of_compiler(op, name)
            continue
        default = {"forward": op, "backward": f"{op}_backward"}.get(name, name)
        function = COMPOSED.get(f"{op}.{name}") or getattr(ops, default)
        yield name, raw(f"{op}.{name}", function, node.args.args)


def below(function: Binding, *args: Any, **kwargs: Any) -> Any:
    """The function's result. Ops that it calls skip their kernels for Autograd, which are in Python."""
    try:
        with torch._C._AutoDispatchBelowAutograd():
            return function(*args, **kwargs)
    except RuntimeError as error:
        raise typed(error) from None


RECORDING: dict[str, Binding] = {}  # for each op, what runs its calls that autograd records


def bypassing(name: str) -> Binding:
    """Returns a call of the op past its kernel for Autograd, which is in Python and slow."""
    op = getattr(ops, name).default

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and (require_grad(args) or require_grad(kwargs.values())):
            needs_op = torch._C._is_any_autocast_enabled() or torch._C._get_tracing_state() is not None
            record = None if needs_op else RECORDING.get(name)
            return (record or op)(*args, **kwargs)
        return below(op, *args, **kwargs)

    return call


def require_grad(args: Iterable[Any]) -> bool:
    """Whether any tensor requires a gradient."""
    for x in args:
        if isinstance(x, Tensor):
            if x.requires_grad:
                return True
        elif isinstance(x, (list, tuple)) and require_grad(x):
            return True
    return False


class BypassAutograd:
    """``torch.ops.lltm_ext`` for the package's own calls: plain ones go past the kernels for Autograd.

    The functions are made at once, not at their first use, which torch.compile could not trace.
    """

    def __init__(self, is_plain: Callable[..., bool]) -> None:
        for qualified in torch._C._dispatch_get_all_op_names():
            namespace, _, name = qualified.partition("::")
            # The kernels for Autograd of ops that write an argument have checks to make.
            if namespace == "lltm_ext" and not name.endswith(("_", "_out")):
                setattr(self, name, bypass_if_plain(is_plain, name))

    def __getattr__(self, name: str) -> Binding:  # all other ops, and those of _portable_rules.py
        return getattr(ops, name)


def bypass_if_plain(is_plain: Callable[..., bool], name: str) -> Binding:
    op, call = getattr(ops, name), bypassing(name)

    def function(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs) if is_plain(*args) else op(*args, **kwargs)

    return function


def of_compiler(op: str, name: str) -> Binding:
    """A binding of an op whose kernels are compiled at run time."""
    function = getattr(ops, op if name == "call" else f"{op}_{name}")

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            found = function(*args, **kwargs)
        except RuntimeError as error:
            raise typed(error) from None
        return bytes(found.tolist()) if name == "compile" else found

    return call


def raw(op: str, function: Binding, arguments: list[ast.arg]) -> Binding:
    """``function``, which takes contiguous tensors only, by position or name; its errors name ``op``."""
    types = {x.arg: ast.unparse(x.annotation) for x in arguments if x.annotation}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(types, args, strict=False))
        for name, annotation in types.items():
            x = given.get(name, kwargs.get(name))
            if name in NEEDS_NO_CHECK:
                continue
            if annotation == "Tensor" or (annotation == "Tensor | None" and x is not None):
                check_input(op, name, x)
        try:
            with torch.no_grad():
                return function(*args[len(types) :], **given, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            what = str(error).partition(": ")[2].replace("expected out ", "expected c ")
            raise type(error)(f"{op}: {what}") from None

    return call


# ---- errors


def typed(error: RuntimeError) -> BaseException:
    """The error with its type, which the stable ABI puts into the message of a RuntimeError."""
    kind, _, message = str(error).partition(": ")
    kinds = {"TypeError": TypeError, "ValueError": ValueError, "KeyboardInterrupt": KeyboardInterrupt}
    return kinds[kind](message) if kind in kinds else error


# ---- the checks of src/common/checks.h


def check_input(op: str, name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{op}(): incompatible function arguments: expected {name} to be a Tensor, got {type(x).__name__}"
        )
    check_device(op, name, x)
    if not x.is_contiguous():
        raise RuntimeError(f"{op}: expected {name} to be contiguous, got strides {list(x.stride())}")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"{op}: expected {name} of dtype {FLOATING}, got {dtype_name(x)}")


def check_device(op: str, name: str, x: Tensor) -> None:
    if x.layout != torch.strided:
        layout = str(x.layout).removeprefix("torch.").removesuffix("_coo").title().replace("_", "")
        raise RuntimeError(f"{op}: expected {name} of layout torch.strided, got {layout}")
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise RuntimeError(f"{op}: expected {name} on a CPU or CUDA device, got {x.device}")


def check_like(name: str, x: Tensor, like: Tensor, shape: list[int]) -> Tensor:
    if x.dtype != like.dtype:
        raise TypeError(f"lltm: expected {name} of dtype {dtype_name(like)}, got {dtype_name(x)}")
    if x.device != like.device:
        raise RuntimeError(f"lltm: expected {name} on {like.device}, got {x.device}")
    if list(x.shape) != shape:
        raise RuntimeError(f"lltm: expected {name} of shape {shape}, got {list(x.shape)}")
    return x


def dtype_name(x: Tensor | torch.dtype) -> str:
    return str(x.dtype if isinstance(x, Tensor) else x).removeprefix("torch.")
