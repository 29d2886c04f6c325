"""Spikes: 1 where a value is above 0, else 0, with the gradient of a smooth curve."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lltm_ext._formula.capture import Tracer
from lltm_ext._formula.graph import straight_through

__all__ = ["spike"]

# Each slope of a surrogate, of x and the number k that makes it steeper; and k by default.
SURROGATES: dict[str, tuple[Callable[[Tensor, float], Tensor], float]] = {
    "atan": (lambda x, k: k / 2 / (1 + (math.pi / 2 * k * x) ** 2), 2.0),
    "sigmoid": (lambda x, k: k * torch.sigmoid(k * x) * torch.sigmoid(-k * x), 4.0),
    "fast_sigmoid": (lambda x, k: 1 / (1 + k * torch.abs(x)) ** 2, 25.0),
    "triangle": (lambda x, k: torch.relu(1 - k * torch.abs(x)), 1.0),
}


def spike(input: Tensor, surrogate: str = "atan", k: float | None = None) -> Tensor:
    """1 where ``input > 0``, else 0, with the slope of a surrogate as derivative.

    It works on whole tensors and in the cells of :func:`recurrence`::

        @lltm_ext.recurrence(gates=1, states=("v",), parameters=("beta",))
        def lif(x, h, s, p):
            v = p.beta * s.v + x[0] - h
            return lltm_ext.spike(v - 1), (v,)

    ================  ===================================================  ==============
    ``surrogate``     slope                                                ``k``, default
    ================  ===================================================  ==============
    ``atan``          k / 2 / (1 + (pi / 2 * k * x)^2)                     2
    ``sigmoid``       k * sigmoid(k * x) * (1 - sigmoid(k * x))            4
    ``fast_sigmoid``  1 / (1 + k * abs(x))^2                               25
    ``triangle``      max(1 - k * abs(x), 0)                               1
    ================  ===================================================  ==============

    Args:
        input: what is compared with 0, such as a membrane potential minus its threshold; any shape, of a
            floating-point dtype.
        surrogate: whose slope the derivative is. The slope counts as a constant in second derivatives.
        k: how steep the surrogate is; None: its default.

    Returns:
        A tensor of the shape and dtype of ``input``.

    Raises:
        TypeError: if ``input`` is no tensor of a floating-point dtype.
        ValueError: for another surrogate.

    Source: Neftci, Mostafa and Zenke, "Surrogate Gradient Learning in Spiking Neural Networks", 2019; atan of
    Fang et al., "Incorporating Learnable Membrane Time Constant to Enhance Learning of Spiking Neural
    Networks", 2021; fast_sigmoid of Zenke and Ganguli, "SuperSpike", 2018; triangle of Esser et al.,
    "Convolutional Networks for Fast, Energy-Efficient Neuromorphic Computing", 2016.
    """
    if not isinstance(input, Tensor) or not input.is_floating_point():
        got = input.dtype if isinstance(input, Tensor) else type(input).__name__
        raise TypeError(f"spike: expected input to be a tensor of a floating-point dtype, got {got}")
    if surrogate not in SURROGATES:
        known = ", ".join(map(repr, SURROGATES))
        raise ValueError(f"spike: expected surrogate to be one of {known}, got {surrogate!r}")
    slope_of, default = SURROGATES[surrogate]
    slope = slope_of(input, default if k is None else k).detach()
    step = torch.where(input > 0, 1.0, 0.0).to(input.dtype)
    tracer = Tracer.at_work() if input.is_meta else None
    return (tracer.straight_through if tracer else straight_through)(step, slope * input)
