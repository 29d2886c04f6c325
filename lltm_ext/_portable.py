"""The portable library: the same kernels on torch's stable C ABI, for every Python and every newer torch.

A native module is built for one torch and one Python. Where none fits what is here, and the wheel holds
``_C/portable.so``, that one is loaded instead: all its ops in one file, and nothing of Python in it. What the
stable ABI has no words for (gradients, autocast, shapes of traced graphs, the types of errors) follows in
Python, in _portable_rules.py. What cannot be said at all is left out, and LACKING says why.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

PACKAGE = Path(__file__).resolve().parent
LIBRARY = PACKAGE / "_C" / "portable.so"
RECORD = PACKAGE / "_portable_record.json"
OLDEST_TORCH = (2, 10)

in_use = False

LACKING = {
    "elementwise": "NVRTC, which compiles its formulas, is another in each CUDA",
    "fake_quantize": "its host code is not on the stable ABI yet",
    "stochastic_round": "the stable ABI of torch 2.10 has no random generators",
}


def fits(torch: ModuleType) -> bool:
    """Whether there is a portable library here, and this torch can load it."""
    return LIBRARY.is_file() and RECORD.is_file() and _version(torch) >= OLDEST_TORCH


def read() -> dict[str, Any]:
    """What the library was built from."""
    record: dict[str, Any] = json.loads(RECORD.read_text())
    return record


def load(torch: ModuleType) -> None:
    """Loads the library, which registers its ops, and puts what stands for the modules into lltm_ext._C."""
    global in_use
    from lltm_ext import _C

    torch.ops.load_library(str(LIBRARY))
    for op, functions in _raw_bindings(torch).items():
        module = ModuleType(f"{_C.__name__}.{op}", f"lltm_ext._C.{op}, of the portable library.")
        vars(module).update(functions)
        sys.modules[module.__name__] = module
        setattr(_C, op, module)
    for package in (_C, sys.modules["lltm_ext"]):
        vars(package)["__getattr__"] = lacks
    in_use = True


def lacks(name: str) -> NoReturn:
    """The __getattr__ of lltm_ext and lltm_ext._C: names what is not there, an op or another of its names."""
    for op, why in LACKING.items():
        if name.removesuffix("Function").lower() == op.replace("_", "") or name == op:
            raise ImportError(
                f"lltm_ext: the portable library, which is in use here, lacks {name}, because {why}. "
                "A wheel for this torch and Python has it, and so have modules that the next import "
                "builds: export LLTM_EXT_JIT=1"
            )
    raise AttributeError(f"module 'lltm_ext' has no attribute {name!r}")


def _version(torch: ModuleType) -> tuple[int, ...]:
    return tuple(int(part) for part in str(torch.__version__).split(".")[:2])


def _raw_bindings(torch: ModuleType) -> dict[str, dict[str, Callable[..., Any]]]:
    """What the native modules have beside their ops: functions of contiguous tensors alone."""
    ops = torch.ops.lltm_ext

    def gemm(c: Any, a: Any, b: Any) -> None:
        ops.gemm_out(a, b, None, None, "ieee", c)

    def gemm_backward(grad_c: Any, a: Any, b: Any) -> list[Any]:
        return [ops.gemm(grad_c, b.mT), ops.gemm(a.mT, grad_c)]

    def straight_through(grad_output: Any) -> Any:
        return grad_output

    def cell_forward(input: Any, weights: Any, bias: Any, old_h: Any, old_cell: Any) -> list[Any]:
        new_h, new_cell, gates = ops.lltm_cell_forward(input, weights, bias, old_h, old_cell)
        X = torch.cat([old_h, input], 1)
        gate_weights = X @ weights.t() if bias is None else torch.addmm(bias, X, weights.t())
        return [new_h, new_cell, *gates, X, gate_weights]

    def cell_backward(
        grad_h: Any,
        grad_cell: Any,
        new_cell: Any,
        input_gate: Any,
        output_gate: Any,
        candidate_cell: Any,
        X: Any,
        gate_weights: Any,
        weights: Any,
    ) -> list[Any]:
        batch, hidden = new_cell.shape
        gates = {"input_gate": input_gate, "output_gate": output_gate, "candidate_cell": candidate_cell}
        for name, x, columns in (
            *((name, x, hidden) for name, x in gates.items()),
            ("gate_weights", gate_weights, 3 * hidden),
        ):
            _check_like(name, x, weights, [batch, columns])
        activated, old_h, input = torch.stack(list(gates.values())), X[:, :hidden], X[:, hidden:]
        grad_input, grad_weights, grad_bias, grad_old_h, grad_old_cell = ops.lltm_cell_backward(
            grad_h, grad_cell, new_cell, activated, input, weights, old_h, True, True, True
        )
        return [grad_old_h, grad_input, grad_weights, grad_bias.unsqueeze(0), grad_old_cell]

    def names(function: Callable[..., Any]) -> list[str]:
        return list(inspect.signature(function).parameters)

    raw = functools.partial(_raw, torch)
    return {
        **{
            op: {
                "forward": raw(f"{op}.forward", getattr(ops, op), ["input"]),
                "backward": raw(f"{op}.backward", getattr(ops, f"{op}_backward"), ["grad_output", "output"]),
                f"call_{op}": getattr(ops, op),
            }
            for op in ("sigmoid", "relu")
        },
        "round": {
            "forward": raw("round.forward", ops.round, ["input"]),
            "backward": raw("round.backward", straight_through, ["grad_output"]),
            "binarize": raw("round.binarize", ops.binarize, ["input"]),
            **{f"call_{op}": getattr(ops, op) for op in ("round", "floor", "ceil", "trunc")},
        },
        "gemm": {
            "gemm": raw("gemm.gemm", gemm, ["c", "a", "b"]),
            "forward": raw("gemm.forward", ops.gemm, ["a", "b"]),
            "backward": raw("gemm.backward", gemm_backward, ["grad_c", "a", "b"]),
        },
        "lltm": {
            "forward": raw("lltm.forward", cell_forward, names(cell_forward)),
            "backward": raw("lltm.backward", cell_backward, names(cell_backward)),
            "call_lltm_cell": ops.lltm_cell,
        },
        "lstm": {},
    }


def _raw(torch: ModuleType, op: str, function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """``function``, whose arguments ``names`` are contiguous tensors; its errors name ``op``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        for name in names:
            if name != "bias" or given.get(name) is not None:  # the one that may be None
                _check_input(torch, op, name, given.get(name))
        try:
            with torch.no_grad():
                return function(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            what = str(error).partition(": ")[2].replace("expected out ", "expected c ")
            raise type(error)(f"{op}: {what}") from None

    return call


def _check_like(name: str, x: Any, like: Any, shape: list[int]) -> None:
    if x.dtype != like.dtype:
        raise TypeError(f": expected {name} of dtype {_name(like.dtype)}, got {_name(x.dtype)}")
    if x.device != like.device:
        raise RuntimeError(f": expected {name} on {like.device}, got {x.device}")
    if list(x.shape) != shape:
        raise RuntimeError(f": expected {name} of shape {shape}, got {list(x.shape)}")


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _check_input(torch: ModuleType, op: str, name: str, x: Any) -> None:
    """As CHECK_INPUT of src/common/checks.h."""
    if not isinstance(x, torch.Tensor):
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
        raise TypeError(f"{op}: expected {name} of dtype {expected}, got {_name(x.dtype)}")
