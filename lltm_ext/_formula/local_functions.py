"""Functions that other functions define, for pickle, which finds only those of a module by their names."""

from __future__ import annotations

import importlib
import inspect
import pickle
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from lltm_ext._formula.declaration import written_function


class LocalFunction(NamedTuple):
    """What a function that another one defined is made of again."""

    module: str
    name: str  # qualified
    defaults: tuple[Any, ...] | None
    keyword_defaults: dict[str, Any] | None
    variables: tuple[Any, ...]  # the values that it has from the function around it


def parts_of(function: Callable[..., Any]) -> LocalFunction:
    """Raises pickle.PicklingError if the function could not be made again."""
    name = getattr(function, "__qualname__", type(function).__name__)
    if not inspect.isfunction(function):
        raise pickle.PicklingError(
            f"{name} is no plain function; define it in a module, or by one of its functions"
        )
    code_in_module(function.__module__, name)
    variables = tuple(cell.cell_contents for cell in function.__closure__ or ())
    return LocalFunction(function.__module__, name, function.__defaults__, function.__kwdefaults__, variables)


def function_of(parts: LocalFunction) -> types.FunctionType:
    code, namespace = code_in_module(parts.module, parts.name)
    closure = tuple(types.CellType(x) for x in parts.variables)
    function = types.FunctionType(code, namespace, code.co_name, parts.defaults, closure)
    function.__kwdefaults__, function.__qualname__ = parts.keyword_defaults, parts.name
    return function


def code_in_module(module: str, name: str) -> tuple[types.CodeType, dict[str, Any]]:
    """The code of the function of a qualified name, and the names of its module."""
    outermost, *inner = name.split(".<locals>.")
    try:
        found: Any = importlib.import_module(module)
        for part in outermost.split("."):
            found = getattr(found, part)
        found = written_function(found)
        code, namespace = found.__code__, found.__globals__
        for part in inner:
            (code,) = (x for x in code.co_consts if inspect.iscode(x) and x.co_name == part)
    except (ImportError, AttributeError, ValueError):
        raise pickle.PicklingError(
            f"{module}.{name} cannot be found by its name: {module}.{outermost} must be importable and "
            f"define one function {inner[-1] if inner else name}"
        ) from None
    return code, namespace
