"""The activations of gemm, as src/common/activations.h lists them: each once in Python, for its reference,
the selftest and the portable library."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Activation(NamedTuple):
    reference: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]  # (grad_output, saved) -> gradient of the input
    saves_input: bool = False  # the derivative does not follow from the output


def times(derivative: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda grad_output, saved: grad_output * derivative(saved)


# Derivatives. `x` is a tensor, or a node of _formula/graph.py with that file's function.


def gelu_derivative(x: Tensor) -> Tensor:
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * density


def gelu_tanh_derivative(x: Any, tanh: Callable[[Any], Any] = torch.tanh) -> Any:
    scale = math.sqrt(2 / math.pi)
    t = tanh(scale * (x + 0.044715 * (x * x * x)))
    return 0.5 * (1 + t + x * (1 - t * t) * (scale * (1 + 3 * 0.044715 * (x * x))))


def silu_derivative(x: Any, sigmoid: Callable[[Any], Any] = torch.sigmoid) -> Any:
    y = sigmoid(x)
    return y * (1 + x * (1 - y))


ACTIVATIONS = {
    # Masked, because a product would not turn an infinite gradient into 0 where the output is 0.
    "relu": Activation(torch.relu, lambda grad_output, y: grad_output.masked_fill(y <= 0, 0)),
    "sigmoid": Activation(torch.sigmoid, lambda grad_output, y: grad_output * (y * (1 - y)).conj()),
    "tanh": Activation(torch.tanh, times(lambda y: 1 - y * y)),
    "elu": Activation(F.elu, times(lambda y: torch.where(y > 0, 1.0, y + 1))),
    "gelu": Activation(F.gelu, times(gelu_derivative), saves_input=True),
    "gelu_tanh": Activation(
        functools.partial(F.gelu, approximate="tanh"), times(gelu_tanh_derivative), saves_input=True
    ),
    "silu": Activation(F.silu, times(silu_derivative), saves_input=True),
}
