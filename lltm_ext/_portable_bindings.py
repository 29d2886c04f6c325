"""What stands for the native modules lltm_ext._C.<op> beside the portable library: their raw bindings.

They have the tutorials' contract, and so take contiguous tensors alone. The library has only the dispatcher's
ops; these are made of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Binding = Callable[..., Any]

ops = torch.ops.lltm_ext


def gemm_into(c: Tensor, a: Tensor, b: Tensor) -> None:
    ops.gemm_out(a, b, None, None, "ieee", c)


def gemm_backward(grad_c: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    if a.dim() != b.dim():
        raise RuntimeError(
            f"gemm.backward: expected a and b of as many dimensions, got {a.dim()} and {b.dim()}"
        )
    return [ops.gemm(grad_c, b.mT), ops.gemm(a.mT, grad_c)]


def straight_through(grad_output: Tensor) -> Tensor:
    return grad_output


def cell_forward(
    input: Tensor, weights: Tensor, bias: Tensor | None, old_h: Tensor, old_cell: Tensor
) -> list[Tensor]:
    new_h, new_cell, gates = ops.lltm_cell_forward(input, weights, bias, old_h, old_cell)
    X = torch.cat([old_h, input], 1)
    gate_weights = X @ weights.t() if bias is None else torch.addmm(bias, X, weights.t())
    return [new_h, new_cell, *gates, X, gate_weights]


def cell_backward(
    grad_h: Tensor,
    grad_cell: Tensor,
    new_cell: Tensor,
    input_gate: Tensor,
    output_gate: Tensor,
    candidate_cell: Tensor,
    X: Tensor,
    gate_weights: Tensor,
    weights: Tensor,
) -> list[Tensor]:
    batch, hidden = new_cell.shape
    gates = {"input_gate": input_gate, "output_gate": output_gate, "candidate_cell": candidate_cell}
    for name, gate in gates.items():
        check_like(name, gate, weights, [batch, hidden])
    check_like("gate_weights", gate_weights, weights, [batch, 3 * hidden])
    activated, old_h, input = torch.stack(list(gates.values())), X[:, :hidden], X[:, hidden:]
    grad_input, grad_weights, grad_bias, grad_old_h, grad_old_cell = ops.lltm_cell_backward(
        grad_h, grad_cell, new_cell, activated, input, weights, old_h, True, True, True
    )
    return [grad_old_h, grad_input, grad_weights, grad_bias.unsqueeze(0), grad_old_cell]


def bindings() -> dict[str, dict[str, Binding]]:
    """By module, by name."""
    return {
        **{
            op: {
                "forward": raw(f"{op}.forward", getattr(ops, op), "input"),
                "backward": raw(f"{op}.backward", getattr(ops, f"{op}_backward"), "grad_output", "output"),
                f"call_{op}": getattr(ops, op),
            }
            for op in ("sigmoid", "relu")
        },
        "round": {
            "forward": raw("round.forward", ops.round, "input"),
            "backward": raw("round.backward", straight_through, "grad_output"),
            "binarize": raw("round.binarize", ops.binarize, "input"),
            **{f"call_{op}": getattr(ops, op) for op in ("round", "floor", "ceil", "trunc")},
        },
        "gemm": {
            "gemm": raw("gemm.gemm", gemm_into, *names_of(gemm_into)),
            "forward": raw("gemm.forward", ops.gemm, "a", "b"),
            "backward": raw("gemm.backward", gemm_backward, *names_of(gemm_backward)),
        },
        "lltm": {
            "forward": raw("lltm.forward", cell_forward, *names_of(cell_forward)),
            "backward": raw("lltm.backward", cell_backward, *names_of(cell_backward)),
            "call_lltm_cell": ops.lltm_cell,
        },
        "lstm": {},
    }


def names_of(function: Binding) -> list[str]:
    return list(inspect.signature(function).parameters)


def raw(op: str, function: Binding, *names: str) -> Binding:
    """``function``, whose arguments ``names`` are contiguous tensors; its errors name ``op``."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        for name in names:
            if name != "bias" or given.get(name) is not None:  # the one that may be None
                check_input(op, name, given.get(name))
        try:
            with torch.no_grad():
                return function(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            what = str(error).partition(": ")[2].replace("expected out ", "expected c ")
            raise type(error)(f"{op}: {what}") from None

    return call


# ---- as src/common/checks.h has them


def check_input(op: str, name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{op}(): incompatible function arguments: expected {name} to be a Tensor, got {type(x).__name__}"
        )
    if x.layout != torch.strided:
        layout = str(x.layout).removeprefix("torch.").removesuffix("_coo").title().replace("_", "")
        raise RuntimeError(f"{op}: expected {name} of layout torch.strided, got {layout}")
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise RuntimeError(f"{op}: expected {name} on a CPU or CUDA device, got {x.device}")
    if not x.is_contiguous():
        raise RuntimeError(f"{op}: expected {name} to be contiguous, got strides {list(x.stride())}")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        expected = "float16, bfloat16, float32 or float64"
        raise TypeError(f"{op}: expected {name} of dtype {expected}, got {dtype_name(x)}")


def check_like(name: str, x: Tensor, like: Tensor, shape: list[int]) -> None:
    if x.dtype != like.dtype:
        raise TypeError(f"lltm: expected {name} of dtype {dtype_name(like)}, got {dtype_name(x)}")
    if x.device != like.device:
        raise RuntimeError(f"lltm: expected {name} on {like.device}, got {x.device}")
    if list(x.shape) != shape:
        raise RuntimeError(f"lltm: expected {name} of shape {shape}, got {list(x.shape)}")


def dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
