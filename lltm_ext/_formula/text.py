"""A recurrent cell given as C++ text: its checks, and the struct around the text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lltm_ext._formula.declaration import Declaration, check_names
from lltm_ext._formula.emit import indented, struct_of

SEPARATOR, LINE = "\x1f", "\x17"  # separate fields and their lines: src/common/runtime/text.h
MAX_LENGTH = 65536  # in characters: such a text takes the compiler seconds to minutes
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)

# This is a class, because only there can `using` give functions of a template parameter plain names. Others
# (relu, maximum, ...) are those of common/math.h and CUDA. Our own names begin with an underscore, which the
# user's do not.
FORMULA = """\
struct Cell;

// The text of {name}.
template <typename Math>
struct Formula : Math {{
  using Math::sigmoid, Math::tanh, Math::elu, Math::silu, Math::gelu, Math::gelu_tanh, Math::softplus;
  using Math::exp, Math::expm1, Math::log, Math::log1p, Math::logaddexp, Math::sqrt, Math::rsqrt, Math::pow;
  using Math::abs, Math::sin, Math::cos, Math::erf;

  template <typename T>
  LLTM_HOST_DEVICE static T forward(const CellInputs<Cell, T>& _in, T (&_states)[{states}], \
T (&_saved)[{saved}]) {{
{forward}
  }}
{backward}}};

"""
BACKWARD = """\

  template <typename T>
  LLTM_HOST_DEVICE static void backward(const T (&_saved)[{saved}], const CellInputs<Cell, T>& _in, T _grad_h,
                                        T (&_grad_states)[{states}], CellGradients<Cell, T>& _grads) {{
{backward}
  }}
"""


class CudaSource(NamedTuple):
    """What the user gives instead of a function."""

    name: str
    module: str  # where pickle finds the cell by its name
    forward: str
    backward: str | None
    saved: Sequence[str]


class SourceCell:
    """A cell given as text, with the attributes of :class:`~lltm_ext._formula.derive.Derived` that cells use.

    Attributes:
        saved, saved_names: the names of the values that forward saves.
        reads_h: whether forward names h.
        zeros_stay, runs_in_parallel, bounded: False, because nobody knows.
        over_units: False; a text has one unit.
        struct, half_struct: the C++ struct, the same for all dtypes.

    Raises:
        TypeError: for a text that is no text.
        ValueError: for names that have another meaning in the text, or values that it lacks.
    """

    zeros_stay = runs_in_parallel = over_units = bounded = False

    def __init__(self, declared: Declaration, text: CudaSource):
        check(declared, text)
        self.declaration, self.saved = declared, tuple(text.saved)
        self.saved_names, name, states = self.saved, declared.name, declared.states
        used = identifiers(text.forward) | {value for value in self.saved if value in ("h", *states)}
        self.reads_h = "h" in used
        check_assigned(name, "forward", ["new_h", *(f"new_{s}" for s in states), *self.saved], used)
        backward = f'static_assert(sizeof(A) == 0, "{name} has no backward");'
        if text.backward is not None:
            gradients = [
                "x",
                *["r"] * declared.separate,
                *["h"] * self.reads_h,
                *states,
                *declared.parameters,
            ]
            check_assigned(name, "backward", [f"grad_{x}" for x in gradients], identifiers(text.backward))
            backward = "Formula<Math>::backward(saved, in, grad_h, grad_states, grads);"
        struct = struct_of(
            declared,
            "given as text",
            self.saved,
            len(self.saved),
            self.reads_h,
            ["return Formula<Math>::forward(in, states, saved);"],
            [backward],
        )
        self.struct = self.half_struct = struct._replace(source=self._formula(text, used) + struct.source)

    def _formula(self, text: CudaSource, used: set[str]) -> str:
        """The struct with the user's texts."""
        declared = self.declaration
        constants = numbered("const T {0} = _in.parameters[{1}];", declared.parameters)
        constants |= numbered("const T {0} = _in.steps[{1}];", declared.inputs)
        given = {"x": "const auto& x = _in.x;"}
        given |= {"r": "const auto& r = _in.r;"} if declared.separate else {}
        given |= {"h": "const T h = _in.h;"}
        given |= numbered("const T {0} = _states[{1}];", declared.states) | constants
        given |= {"new_h": "T new_h = 0;"}
        given |= numbered("T& {0} = _states[{1}];", [f"new_{s}" for s in declared.states])
        forward = [*used_of(given, used), *lined("forward", text.forward)]
        forward += [f"_saved[{j}] = {value};" for j, value in enumerate(self.saved)]
        sizes = {"states": max(len(declared.states), 1), "saved": max(len(self.saved), 1)}
        return FORMULA.format(
            name=declared.name,
            forward=indented([*forward, "return new_h;"]),
            backward="" if text.backward is None else self._backward(text.backward, constants, sizes),
            **sizes,
        )

    def _backward(self, body: str, constants: dict[str, str], sizes: dict[str, int]) -> str:
        declared = self.declaration
        given = numbered("const T {0} = _saved[{1}];", self.saved) | constants
        given |= {"grad_new_h": "const T grad_new_h = _grad_h;"}
        given |= numbered("const T {0} = _grad_states[{1}];", [f"grad_new_{s}" for s in declared.states])
        given |= {"grad_x": "auto& grad_x = _grads.x;"}
        given |= {"grad_r": "auto& grad_r = _grads.r;"} if declared.separate else {}
        given |= {"grad_h": "T& grad_h = _grads.h;"} if self.reads_h else {}
        given |= numbered("T& {0} = _grad_states[{1}] = 0;", [f"grad_{s}" for s in declared.states])
        given |= numbered("T& {0} = _grads.parameters[{1}];", [f"grad_{p}" for p in declared.parameters])
        lines = [
            "_grads = {};  // of gates that the text does not assign",
            *used_of(given, identifiers(body)),
            *lined("backward", body),
        ]
        return BACKWARD.format(backward=indented(lines), **sizes)


def check(declared: Declaration, text: CudaSource) -> None:
    """Raises for texts that are not strings, and for names that have another meaning in them."""
    name, states, parameters, inputs = declared.name, declared.states, declared.parameters, declared.inputs
    texts = {"forward": text.forward} | ({} if text.backward is None else {"backward": text.backward})
    for what, body in texts.items():
        check_text(name, what, body)
    if declared.weights:
        raise ValueError(
            f"{name}: expected no weights for a cell given as text, got {declared.weights[0].name}"
        )
    if several := [x for x in parameters if "[" in x]:
        raise ValueError(f"{name}: expected one number for the parameter {several[0][:-3]}, got several")
    results = [f"new_{s}" for s in ("h", *states)]
    gradients = [f"grad_{x}" for x in ("x", "r", "h", *states, *parameters, *results)]
    taken = ("T", "Math", "x", "r", *gradients)
    for what, names in (("states", states), ("parameters", parameters), ("inputs", inputs)):
        check_names(name, what, names, (*taken, "h", *results))
    saved = check_names(name, "saved", text.saved, (*taken, *parameters, *inputs))
    if text.backward is None and saved:
        raise ValueError(f"{name}: expected saved to be empty without a backward, got {saved!r}")


def check_text(name: str, what: str, text: Any) -> None:
    """Raises for a formula that is no C++ text."""
    if not isinstance(text, str):
        raise TypeError(f"{name}: expected {what} to be C++ text, got {text!r}")
    for control in (SEPARATOR, LINE):
        if control in text:
            raise ValueError(
                f"{name}: expected {what} to be C++, got a text with the control character {control!r}"
            )
    if len(text) > MAX_LENGTH:
        raise ValueError(f"{name}: expected {what} of at most {MAX_LENGTH} characters, got {len(text)}")


def program_text(fields: Iterable[str]) -> str:
    """A program in one line: the compiler of torch.compile writes it into a comment."""
    return SEPARATOR.join(re.sub(r"\r\n?|\n", LINE, field) for field in fields)


def identifiers(text: str) -> set[str]:
    return set(IDENTIFIER.findall(COMMENT.sub(" ", text)))


def check_assigned(name: str, what: str, wanted: Iterable[str], found: set[str]) -> None:
    for value in wanted:
        if value not in found:
            raise ValueError(f"{name}: expected {what} to assign {value}, which it does not name")


def numbered(definition: str, names: Sequence[str]) -> dict[str, str]:
    return {name: definition.format(name, i) for i, name in enumerate(names)}


def used_of(definitions: Mapping[str, str], used: set[str]) -> list[str]:
    return [definition for name, definition in definitions.items() if name in used]


def lined(what: str, text: str) -> list[str]:
    """The text between directives that make the compiler's messages count its lines.

    The semicolon makes what its last statement lacks an error in it, and not in what follows.
    """
    return [f'#line 1 "{what}"\n{text}\n    ;\n#line 1 "lltm_ext"']
