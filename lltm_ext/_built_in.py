"""The dispatcher ops of cells with names of their own, ``lltm_ext::lstm`` and so on, as calls of custom_cell.

Native modules have them in C++ (src/recurrence/tensors/built_in.h). Under torch.func's transforms, and in the
portable library, they are these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lltm_ext._library import ops, under_transforms

unsafe_view: Callable[..., Tensor] = torch.ops.aten._unsafe_view.default


def as_c(states: Tensor) -> Tensor:
    """[B, H] of [1, B, H], which is no view: that cannot be detached in place."""
    return unsafe_view(states, states.shape[1:]) if states.dim() == 3 else states


def functions(name: str) -> dict[str, Callable[..., Any]]:
    """The ops of a cell by their suffixes."""

    def sequence(
        input: Tensor,
        h0: Tensor | None,
        c0: Tensor | None,
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias: Tensor | None = None,
        batch_sizes: list[int] | None = None,
        reverse: bool = False,
        algorithm: str = "auto",
        reset: Tensor | None = None,
        bias_hh: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors, how = (input, h0, c0, weight_ih, weight_hh, bias), (batch_sizes, reverse, algorithm, name)
        output, h_n, states_n = ops.custom_cell(*tensors, None, None, reset, *how, bias_hh)
        return output, h_n, as_c(states_n)

    def forward(
        input: Tensor,
        h0: Tensor | None,
        c0: Tensor | None,
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias: Tensor | None,
        batch_sizes: list[int] | None,
        reverse: bool,
        algorithm: str,
        reset: Tensor | None = None,
        bias_hh: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        tensors, how = (input, h0, c0, weight_ih, weight_hh, bias), (batch_sizes, reverse, algorithm, name)
        output, h_n, states_n, gates, extra, _ = ops.custom_cell_forward(
            *tensors, None, None, reset, *how, bias_hh
        )
        return output, h_n, as_c(states_n), gates, extra

    def backward(
        grad_output: Tensor | None,
        grad_h_n: Tensor | None,
        grad_c_n: Tensor | None,
        input: Tensor,
        h0: Tensor | None,
        c0: Tensor | None,
        weight_ih: Tensor,
        weight_hh: Tensor,
        output: Tensor,
        gates: Tensor,
        extra: Tensor,
        batch_sizes: list[int] | None,
        reverse: bool,
        algorithm: str,
        input_needs_grad: bool,
        bias_needs_grad: bool,
        reset: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        of_states = grad_c_n.unsqueeze(0) if grad_c_n is not None and c0 is None else grad_c_n
        given = (grad_output, grad_h_n, of_states, output, gates, extra)
        inputs, how = (input, h0, c0, weight_ih, weight_hh), (batch_sizes, reverse, algorithm, name)
        needed = (input_needs_grad, bias_needs_grad)
        g = ops.custom_cell_backward(*given, *inputs, None, None, None, reset, *how, *needed)
        return g[0], g[1], g[2], g[3], g[4], g[5]

    def algorithm_of(
        input: Tensor,
        h0: Tensor,
        c0: Tensor,
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias: Tensor | None = None,
        batch_sizes: list[int] | None = None,
        algorithm: str = "auto",
        backward: bool = False,
    ) -> str:
        tensors, how = (input, h0, c0, weight_ih, weight_hh, bias), (batch_sizes, False, algorithm, name)
        return ops.custom_cell_algorithm(*tensors, None, None, None, *how, backward)

    def direction(given: Sequence[Tensor]) -> list[Tensor | None]:
        if len(given) not in (4, 5):
            raise RuntimeError(
                f"{name}_bidirectional: expected a direction to be [h0, c0, weight_ih, weight_hh] or these "
                f"and bias, got {len(given)} tensors"
            )
        return [*given, *[None] * (9 - len(given))]

    def bidirectional(
        input: Tensor,
        forward_direction: Sequence[Tensor],
        reverse_direction: Sequence[Tensor],
        batch_sizes: list[int] | None = None,
        algorithm: str = "auto",
    ) -> list[Tensor]:
        both = (direction(forward_direction), direction(reverse_direction))
        return ops.custom_cell_bidirectional(input, *both, batch_sizes, algorithm, name)

    def bidirectional_forward(
        input: Tensor,
        forward_direction: Sequence[Tensor],
        reverse_direction: Sequence[Tensor],
        batch_sizes: list[int] | None,
        algorithm: str,
    ) -> list[Tensor]:
        both = (direction(forward_direction), direction(reverse_direction))
        y = ops.custom_cell_bidirectional_forward(input, *both, batch_sizes, algorithm, name)
        return [*y[:5], *y[6:11]]  # without h of every step, which is the output

    def bidirectional_backward(
        grad_outputs: Sequence[Tensor | None],
        input: Tensor,
        forward_direction: Sequence[Tensor],
        reverse_direction: Sequence[Tensor],
        saved: Sequence[Tensor],
        batch_sizes: list[int] | None,
        algorithm: str,
        input_needs_grad: bool,
        bias_needs_grad: bool,
    ) -> list[Tensor]:
        both = (direction(forward_direction), direction(reverse_direction))
        how = (batch_sizes, algorithm, name, input_needs_grad, bias_needs_grad)
        g = ops.custom_cell_bidirectional_backward(grad_outputs, input, *both, saved, *how)
        return [*g[:6], *g[7:12]]  # without those of parameters

    return {
        "": sequence,
        "_forward": forward,
        "_backward": backward,
        "_algorithm": algorithm_of,
        "_bidirectional": bidirectional,
        "_bidirectional_forward": bidirectional_forward,
        "_bidirectional_backward": bidirectional_backward,
    }


def register(name: str) -> None:
    for suffix, function in functions(name).items():
        under_transforms(name + suffix, function)
