"""What a recurrent cell's function may compute over all units of a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lltm_ext._formula.declaration import Values, Weight, described


class Units:
    """The argument ``units`` of a cell's function.

    Each method takes a value, and combines those of all units of a row; or several values, such as ``x``, and
    combines all values of all units. torch's functions of the same names define the results, over the
    dimension of the units.
    """

    def __init__(self, over_units: Callable[..., Tensor]):
        self._over_units = over_units

    def linear(self, values: Any, weight: Weight) -> Any:
        """The product with a weight of the cell, as :func:`torch.nn.functional.linear` of the whole row.

        Args:
            values: a value, or as many as the weight [n*H, k*H] has columns for, k.
            weight: ``w.name``, of the ``weights`` of the cell.

        Returns:
            A value; for n > 1 a tuple of n.
        """
        values = listed(values)
        if not isinstance(weight, Weight):
            raise TypeError(
                "expected the weight of units.linear to be w.name, which the cell declares by weights=, got "
                f"{type(weight).__name__}"
            )
        if len(values) != weight.columns:
            raise ValueError(
                f"expected {weight.columns} values for the product with w.{weight.name}, got {len(values)}"
            )
        rows = [weight.blocks[i : i + weight.columns] for i in range(0, len(weight.blocks), weight.columns)]
        results = [
            added([self._over_units("product", block, x) for block, x in zip(row, values, strict=True)])
            for row in rows
        ]
        return results[0] if len(results) == 1 else tuple(results)

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(f"units.{x}" for x in vars(Units) if not x.startswith("_"))
        raise AttributeError(f"units.{name} does not exist: there are {known}")

    def sum(self, values: Any) -> Tensor:
        """The sum of all units' values."""
        return self._over_units("units_sum", added(listed(values)))

    def mean(self, values: Any) -> Tensor:
        """Their mean."""
        values = listed(values)
        return self._over_units("units_mean", added(values) * (1 / len(values)))

    def var(self, values: Any) -> Tensor:
        """Their variance, without Bessel's correction, as norms have it."""
        values = listed(values)
        return self._over_units("units_var" if len(values) == 1 else "units_var_of_all", *values)

    def max(self, values: Any) -> Tensor:
        """The largest. Equal ones share its gradient."""
        first, *others = listed(values)
        for x in others:
            first = torch.maximum(first, x)
        return self._over_units("units_max", first)

    def min(self, values: Any) -> Tensor:
        """The smallest."""
        return -self.max([-x for x in listed(values)])

    def cumsum(self, value: Tensor) -> Tensor:
        """The sum of the values of a unit and of those before it."""
        if not isinstance(value, Tensor):
            raise ValueError("expected one value for units.cumsum, which counts units, got several or none")
        return self._over_units("units_cumsum", value)

    def softmax(self, values: Any) -> Any:
        """exp(v) / sum(exp(v)); for several values a tuple, with one sum."""
        largest = self.max(values).detach()
        powers = [torch.exp(x - largest) for x in listed(values)]
        scale = torch.reciprocal(self.sum(powers))
        return like(values, [x * scale for x in powers])

    def layer_norm(self, values: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
        """(v - mean) / sqrt(var + eps) * weight + bias (Ba et al. 2016); for several values a tuple.

        Args:
            values: a value, or several, which then have one mean and one variance.
            weight, bias: as many values, such as parameters; None: 1 and 0.
        """
        mean = self.mean(values)
        return scaled(values, [x - mean for x in listed(values)], self.var(values), weight, bias, eps)

    def rms_norm(self, values: Any, weight: Any = None, eps: float = 1e-5) -> Any:
        """v / sqrt(mean(v^2) + eps) * weight (Zhang and Sennrich 2019).

        The arguments are those of :meth:`layer_norm`.
        """
        squares = self.mean([x * x for x in listed(values)])
        return scaled(values, listed(values), squares, weight, None, eps)


def scaled(values: Any, given: list[Tensor], squares: Tensor, weight: Any, bias: Any, eps: float) -> Any:
    """The values of a norm whose squares are ``squares`` in the mean."""
    scale = torch.rsqrt(squares + eps)
    results = [x * scale for x in given]
    if weight is not None:
        results = [x * w for x, w in zip(results, of_each(results, weight, "weight"), strict=True)]
    if bias is not None:
        results = [x + b for x, b in zip(results, of_each(results, bias, "bias"), strict=True)]
    return like(values, results)


def listed(values: Any) -> list[Tensor]:
    is_sequence = isinstance(values, (Values, list, tuple))
    found = list(values) if is_sequence else [values]
    wrong = next((x for x in found if not isinstance(x, Tensor)), None)
    if wrong is not None or not found or values is None:
        raise TypeError(f"expected a value or several of units, got {described(wrong) if found else 'none'}")
    return found


def of_each(values: Sequence[Tensor], factors: Any, name: str) -> list[Any]:
    """The weights or biases of the values of a norm."""
    found = [factors] if isinstance(factors, (Tensor, int, float)) else list(factors)
    if len(found) != len(values):
        raise ValueError(f"expected {name} to have {len(values)} values, as the norm does, got {len(found)}")
    return found


def added(values: Sequence[Tensor]) -> Tensor:
    total = values[0]
    for x in values[1:]:
        total = total + x
    return total


def like(values: Any, results: list[Tensor]) -> Any:
    return results[0] if isinstance(values, Tensor) else tuple(results)
