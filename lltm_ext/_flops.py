"""The operations of our ops for torch.utils.flop_counter: two for a product of two numbers, as for torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Size

from lltm_ext._after_import import AfterImport
from lltm_ext._C import custom_cell, lltm  # noqa: F401  register the ops
from lltm_ext._C import gemm as _gemm  # noqa: F401
from lltm_ext._program import CELLS

Shape = Size | Sequence[int]


def gemm(a: Shape, b: Shape, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    batch = max(math.prod(a[:-2]), math.prod(b[:-2]))
    return 2 * batch * a[-2] * a[-1] * b[-1]


def products(input: Shape, *weights: Shape | None) -> int:
    """Of each row of the input, in all steps, with weights."""
    return 2 * math.prod(input[:-1]) * sum(math.prod(w) for w in weights if w is not None)


def of_step(weight_hh: Shape | None, args: Sequence[Any]) -> Shape | None:
    """The blocks that a step multiplies by: one of a cell's own weights as often as the step uses it."""
    cell = next((CELLS[x][0] for x in args if isinstance(x, str) and x in CELLS), None)
    if weight_hh is None or cell is None or not cell.has_own_weights:
        return weight_hh
    return (cell.gates + len(cell.derived.products)) * weight_hh[1], weight_hh[1]  # type: ignore[union-attr]


def sequence(
    input: Shape, h0: Any, states: Any, weight_ih: Shape, weight_hh: Shape | None, *args: Any, **kwargs: Any
) -> int:
    return products(input, weight_ih, of_step(weight_hh, args))


def sequence_backward(*args: Any, **kwargs: Any) -> int:
    """The gradients of both weights, of h of each step, and of the input, if it needs one."""
    input, _, _, weight_ih, weight_hh = args[6:11]
    weight_hh, input_needs_grad = of_step(weight_hh, args), args[-2]
    return products(input, weight_ih, weight_hh, weight_hh, weight_ih if input_needs_grad else None)


def both(input: Shape, forward: Sequence[Any], reverse: Sequence[Any], *args: Any, **kwargs: Any) -> int:
    return sum(sequence(input, *direction) for direction in (forward, reverse))


def both_backward(grads: Any, input: Shape, forward: Any, reverse: Any, *args: Any, **kwargs: Any) -> int:
    needed = args[-2:]
    return sum(sequence_backward(*[None] * 6, input, *d, *needed) for d in (forward, reverse))


def lltm_cell(input: Shape, weights: Shape, *args: Any, **kwargs: Any) -> int:
    return products(input, weights)


def lltm_cell_backward(*args: Any, **kwargs: Any) -> int:
    """The gradient of the weights, and the other product, for those of the input and of h."""
    return products(args[4], args[5], args[5])


def register(flop_counter: ModuleType) -> None:
    for names, formula in (
        (("gemm", "gemm_forward"), gemm),
        (("custom_cell", "custom_cell_forward"), sequence),
        (("custom_cell_backward", "custom_cell_gradients"), sequence_backward),
        (("custom_cell_bidirectional", "custom_cell_bidirectional_forward"), both),
        (("custom_cell_bidirectional_backward",), both_backward),
        (("lltm_cell", "lltm_cell_forward"), lltm_cell),
        (("lltm_cell_backward",), lltm_cell_backward),
    ):
        flop_counter.register_flop_formula([getattr(torch.ops.lltm_ext, name) for name in names])(formula)


AfterImport("torch.utils.flop_counter", register)
