"""The activations of gemm, as src/common/activations.h lists them: each once in Python, for its reference,
the selftest and the portable library."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Activation(NamedTuple):
    reference: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]  # (grad_output, saved) -> gradient of the input
    saves_input: bool = False  # instead of the output: the derivative does not follow from that


def _elu(grad_output: Tensor, output: Tensor) -> Tensor:
    return grad_output * torch.where(output > 0, torch.ones_like(output), output + 1)


def _gelu(grad_output: Tensor, x: Tensor) -> Tensor:
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return grad_output * (0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density)


def _gelu_tanh(grad_output: Tensor, x: Tensor) -> Tensor:
    scale = math.sqrt(2 / math.pi)
    t = torch.tanh(scale * (x + 0.044715 * x * x * x))
    return grad_output * (0.5 * (1 + t + x * (1 - t * t) * scale * (1 + 3 * 0.044715 * x * x)))


def _silu(grad_output: Tensor, x: Tensor) -> Tensor:
    y = torch.sigmoid(x)
    return grad_output * (y * (1 + x * (1 - y)))


ACTIVATIONS = {
    # Masked, not multiplied: an infinite gradient gives 0 where the output is 0.
    "relu": Activation(torch.relu, lambda grad_output, y: grad_output.masked_fill(y <= 0, 0)),
    "sigmoid": Activation(torch.sigmoid, lambda grad_output, y: grad_output * (y * (1 - y)).conj()),
    "tanh": Activation(torch.tanh, lambda grad_output, y: grad_output * (1 - y * y)),
    "elu": Activation(F.elu, _elu),
    "gelu": Activation(F.gelu, _gelu, saves_input=True),
    "gelu_tanh": Activation(functools.partial(F.gelu, approximate="tanh"), _gelu_tanh, saves_input=True),
    "silu": Activation(F.silu, _silu, saves_input=True),
}
