"""What a recurrent cell declares, and how its function is called with it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import keyword
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

ARGUMENTS = ("x", "r", "h", "s", "p", "u", "w", "units")  # what a cell's function may take
# The options that name the values of these
OPTIONS = {"s": "states", "p": "parameters", "u": "inputs", "w": "weights"}


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight of a cell besides weight_ih and weight_hh: [rows*H, columns*H], in blocks of [H, H].

    A function gets it with a tensor for each block, which represents a node.
    """

    name: str
    rows: int = 1
    columns: int = 1
    blocks: tuple[Tensor, ...] = ()  # row by row


class Declaration(NamedTuple):
    """What a cell needs besides its function (see lltm_ext.recurrence). RecurrentCell checks it."""

    name: str
    gates: int
    separate: bool = False
    states: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()  # of a unit: those of a parameter of several values are b[0], b[1], ...
    inputs: tuple[str, ...] = ()
    recurrent: bool = True
    outputs: tuple[str, ...] = ("h",)
    weights: tuple[Weight, ...] = ()

    @property
    def output_states(self) -> tuple[int, ...]:
        """The numbers of the states that are the output of a step; -1 for h."""
        return tuple(("h", *self.states).index(name) - 1 for name in self.outputs)

    def names(self, argument: str) -> tuple[str, ...]:
        """The names of the values of x, r, s, p or u, or of the blocks of w; "" for those without a name."""
        if argument == "w":
            return tuple(
                f"{w.name}[{i}]" if w.rows * w.columns > 1 else w.name
                for w in self.weights
                for i in range(w.rows * w.columns)
            )
        names: tuple[str, ...] = (
            getattr(self, OPTIONS[argument]) if argument in OPTIONS else ("",) * self.gates
        )
        return names

    def weights_of(self, blocks: Sequence[Any]) -> dict[str, Weight]:
        """The weights with their blocks."""
        rest, found = iter(blocks), {}
        for w in self.weights:
            found[w.name] = dataclasses.replace(
                w, blocks=tuple(next(rest) for _ in range(w.rows * w.columns))
            )
        return found


def is_name(name: object) -> bool:
    if not isinstance(name, str) or keyword.iskeyword(name):
        return False
    return name.isidentifier() and name.isascii() and name[0] != "_"


def check_names(cell: str, what: str, names: Any, taken: Sequence[str]) -> tuple[str, ...]:
    is_sequence = isinstance(names, Iterable) and not isinstance(names, (str, bytes, torch.Tensor))
    if not is_sequence or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{cell}: expected {what} to be a sequence of names, got {names!r}")
    for i, name in enumerate(names):
        if not is_name(name):
            raise ValueError(f"{cell}: expected the names of {what} to be identifiers, got {name!r}")
        if name in taken or name in tuple(names)[:i]:
            raise ValueError(f"{cell}: expected {what} without the name {name!r}, which is taken")
    return tuple(names)


def names_of_values(parameters: Mapping[str, float | Sequence[float] | None]) -> tuple[str, ...]:
    """A name for each value of a unit."""
    return tuple(
        name if not isinstance(x, Sequence) else f"{name}[{i}]"
        for name, x in parameters.items()
        for i in range(len(x) if isinstance(x, Sequence) else 1)
    )


def by_parameter(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """The values of a unit by the parameter's name, several of one parameter as a tuple."""
    found: dict[str, Any] = {}
    for name, value in zip(names, values, strict=True):
        parameter, bracket, _ = name.partition("[")
        found[parameter] = (*found.get(parameter, ()), value) if bracket else value
    return found


class Values:
    """The argument x, r, s, p or u of a cell's function: values by number and by name.

    It is no subclass of Sequence, whose methods `count` and `index` would hide states of these names.
    """

    def __init__(self, argument: str, names: Sequence[str], values: Sequence[Any]):
        self._argument, self._names, self._values = argument, names, values

    def __getitem__(self, i: int | slice) -> Any:
        try:
            return self._values[i]
        except TypeError:
            given = ", ".join(map(str, i)) if isinstance(i, tuple) else repr(i)
            raise TypeError(
                f"{self._argument}[{given}]: expected one number, as in {self._argument}[0]; a value has no "
                "dimensions"
            ) from None
        except IndexError:
            raise IndexError(f"{self._argument}[{i}] is out of range: {self._content()}") from None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._names:
            raise AttributeError(f"{self._argument}.{name} does not exist: {self._content()}")
        return self._values[self._names.index(name)]

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def _content(self) -> str:
        if not self._names:
            return f"the cell declares no {OPTIONS[self._argument]}="
        named = ", ".join(f"{self._argument}.{name}" for name in self._names if name)
        return f"{self._argument} has {named or f'{len(self)} values'}"


def written_function(function: Any) -> Any:
    """The function that was written, of a partial, a bound method or what functools.wraps made."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif inspect.ismethod(function):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return function


def arguments_of(function: Callable[..., Any], declared: Declaration) -> tuple[str, ...]:
    """Which of ARGUMENTS the function takes. Others need defaults, which are constants."""
    taken = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in ARGUMENTS and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            taken.append(name)
        elif parameter.default is parameter.empty:
            known = ", ".join(ARGUMENTS)
            raise TypeError(
                f"{declared.name}: expected a function of any of {known}, got the argument {parameter}"
            )
    if "r" in taken and not declared.separate:
        raise ValueError(
            f"{declared.name}: the argument r needs separate=True; without it x[i] contains the product"
        )
    return tuple(taken)


def call(
    function: Callable[..., Any], declared: Declaration, taken: Sequence[str], values: Mapping[str, Any]
) -> tuple[Any, list[Any]]:
    """The new h and the new states of a call.

    Args:
        taken: the function's arguments, as arguments_of gives them.
        values: the previous h, the operations over units, and for x, r, s, p, u and w sequences of tensors
            that represent nodes.
    """
    named = {
        "p": by_parameter(declared.parameters, values["p"]),
        "w": declared.weights_of(values.get("w", ())),
    }

    def argument(name: str) -> Any:
        if name in ("h", "units"):
            return values[name]
        if name in named:
            return Values(name, tuple(named[name]), tuple(named[name].values()))
        return Values(name, declared.names(name), values[name])

    arguments = {name: argument(name) for name in taken}
    result = function(**arguments)
    h, states = result if isinstance(result, tuple) and len(result) == 2 else (result, ())
    states = [states] if isinstance(states, Tensor) else states
    names = ", ".join(declared.states) + "," * (len(declared.states) == 1)
    expected = f"(h, ({names}))" if names else "the new h, as the cell declares no states="
    if isinstance(h, (tuple, list)) or h is None or not isinstance(states, (tuple, list)):
        raise TypeError(f"expected the function to return {expected}, got {described(result)}")
    if len(states) != len(declared.states):
        counted = f"{len(states)} state{'s' * (len(states) != 1)}"
        raise ValueError(f"expected the function to return {expected}, got {counted}")
    for name, value in zip(("h", *declared.states), (h, *states), strict=True):
        if not isinstance(value, Tensor):
            raise TypeError(f"expected the new {name} to be a tensor, got {described(value)}")
    return h, list(states)


def described(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r}" if value is None or isinstance(value, (bool, int, float)) else type(value).__name__
