"""A recurrent cell of your own, from a function of one unit (see :func:`recurrence`)."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.gradcheck import GradcheckError

from lltm_ext._arguments import (
    SequenceCall,
    at_next_step,
    check_no_input,
    check_reset_to,
    check_states,
    check_step_input,
    check_tensors,
    dtype_name,
    hidden_of,
)
from lltm_ext._custom_cell import (
    algorithm_of,
    expand_blocks,
    expand_gates,
    of_each_unit,
    run_both_by_kernels,
    run_kernels,
    tracing_state,
)
from lltm_ext._formula.declaration import (
    Declaration,
    Weight,
    arguments_of,
    check_names,
    is_name,
    names_of_values,
    written_function,
)
from lltm_ext._formula.derive import Derived, derive
from lltm_ext._formula.graph import ancestors
from lltm_ext._formula.local_functions import LocalFunction, function_of, parts_of
from lltm_ext._formula.text import CudaSource, SourceCell
from lltm_ext._library import check_no_dtensor, check_tensor, hand_over, has_tangents, transforms_active
from lltm_ext._loop import Step, compute_dtype, zero_state
from lltm_ext._program import serialize

__all__ = ["RecurrentCell", "recurrence"]

# These names have a meaning in a call, in cell.algorithm and cell.gradcheck, or for a layer's parameters.
RESERVED = (
    "self",
    "input",
    "hx",
    "weight_ih",
    "weight_hh",
    "bias",
    "reset",
    "reset_to",
    "reverse",
    "algorithm",
    "backward",
    "device",
)
DERIVING = threading.Lock()  # a cell from another, whose graph both extend
is_transformed: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def recurrence(
    *function: Any,
    gates: int | None = None,
    separate: bool = False,
    states: Sequence[str] = (),
    parameters: Sequence[str] | Mapping[str, float | Sequence[float] | None] = (),
    inputs: Sequence[str] = (),
    recurrent: bool = True,
    output: str | Sequence[str] = "h",
    weights: Sequence[str] | Mapping[str, tuple[int, int]] = (),
    name: str | None = None,
    forward: str | None = None,
    backward: str | None = None,
    saved: Sequence[str] = (),
) -> Any:
    """Makes a recurrent cell of a function that computes one step of one hidden unit.

    The function names the values that it needs, in any order::

        @lltm_ext.recurrence(gates=3, separate=True, parameters=("b_hn",))
        def gru(x, r, h, p):
            reset, update = torch.sigmoid(x[0] + r[0]), torch.sigmoid(x[1] + r[1])
            candidate = torch.tanh(x[2] + reset * (r[2] + p.b_hn))
            return (1 - update) * candidate + update * h

        output, h_n = gru(input, h0, weight_ih, weight_hh, bias, b_hn=b_hn)
        layer = lltm_ext.Recurrent(gru, input_size=64, hidden_size=256)

    =========  ===============================================================================================
    ``x``      a value for each gate: the input's product with weight_ih, plus the bias, plus the product of
               the previous h with weight_hh. With ``separate`` the last one is not added, but in ``r``
    ``r``      with ``separate``, for each gate the product of the previous h with weight_hh, which has no
               rows for gates whose ``r`` the function does not read
    ``h``      the unit's previous h
    ``s``      its other states, by name (``s.c``) or position (``s[0]``)
    ``p``      its parameters, likewise
    ``u``      the step's own inputs, likewise, as numbers (0 or 1 for bool)
    ``w``      its weights, by name, for ``units.linear(v, w.name)``
    ``units``  what is computed over all units of a row, such as ``units.mean(v)`` and
               ``units.layer_norm(x, p.weight)`` (:class:`~lltm_ext._formula.units.Units`)
    =========  ===============================================================================================

    It returns the new h, or ``(new_h, (new states...))`` for a cell with states, by plain torch functions of
    these values and of Python numbers. Each unit sees only its own values: the products with the weights and
    ``units`` are the only exchange between units.

    What Python cannot say, a loop or a function of CUDA, can be given as text in CUDA C++ instead, with its
    derivative. Such a cell runs on CUDA only::

        ugrnn = lltm_ext.recurrence(
            name="ugrnn",
            gates=2,
            forward='''
                T g = sigmoid(x[0]), z = tanh(x[1]);
                new_h = g * h + (1 - g) * z;
            ''',
            saved=("g", "z", "h"),
            backward='''
                grad_x[0] = grad_new_h * (h - z) * g * (1 - g);
                grad_x[1] = grad_new_h * (1 - g) * (1 - z * z);
                grad_h = grad_new_h * g;
            ''',
        )

    Args:
        gates: G, how many blocks of hidden_size rows weight_ih has, and weight_hh unless only the input feeds
            some; 0 for a cell with ``inputs`` and without a product with h, whose function reads no ``x``.
        separate: whether the function sees the products with the input and with h apart.
        states: the names of the cell's states except h.
        parameters: the names of its parameters, each [H], with gradients. A mapping gives the number that
            :class:`~lltm_ext.Recurrent` fills each one with at first; None: random as the weights. A list of
            n numbers makes a parameter of n values a unit, [n*H], which the function sees as a tuple.
        weights: the names of further weights, each [H, H] or, block-diagonal, [H, H/heads]; a mapping gives
            (n, k) for [n*H, k*H]. ``units.linear(v, w.name)`` is the product of one with any value.
        inputs: the names of its inputs of a step, such as masks or time gaps. Where one of a call requires a
            gradient, the cell runs with all of them as further gates, [T, B, H] each, which only the input
            feeds.
        recurrent: False for a cell without a product with h, and so without weight_hh.
        output: the name of the state that is the output of each step, if that is not h. Several names, such
            as ``("h", "c")``, put O states next to each other: [T, B, O*H]. The products see h.
        name: of a cell given as text; that of its variable, by which pickle finds it.
        forward: the statements that assign ``new_h``, and ``new_c`` for a state c, from ``x[i]``, ``r[i]``,
            ``h``, and the states, parameters and inputs by their names. All are of type ``T``: float, or
            double for float64. ``sigmoid``, ``tanh``, ``exp`` and so on are as fast as the dtype allows;
            ``relu``, ``maximum`` and all of CUDA's functions work too. Write ``T(0.5)``: a plain ``0.5`` is a
            double and makes float arithmetic slower.
        backward: the statements that assign the gradients ``grad_x[i]``, ``grad_r[i]`` with ``separate``,
            ``grad_h`` if forward reads h, and ``grad_c`` of a state or parameter c, from ``grad_new_h`` and
            ``grad_new_c``, and from saved values, parameters and inputs by their names. An element of grad_x
            or grad_r that it does not assign is 0. None: no argument of a call may require a gradient.
        saved: the names of the values of forward that backward reads. They are stored in the dtype of the
            input.

    Returns:
        A :class:`RecurrentCell`, the cell as a function of a whole sequence; without ``forward`` a decorator
        that makes it of a function.

    Raises:
        TypeError: for a decorated value that is no function, or arguments of it other than these; for a text
            that is no text.
        ValueError: for options that do not fit, or names that are no identifiers, occur twice, or have
            another meaning in a call or a text; for a text that does not name what it must assign, or that
            has more than 65536 characters.

        A call raises RuntimeError for a text that does not compile, with the compiler's message, "forward" or
        "backward", and the line in your text.
    """
    if function:
        raise TypeError(
            "recurrence: expected only options, as in @lltm_ext.recurrence(gates=1), got "
            f"{getattr(function[0], '__name__', type(function[0]).__name__)}"
        )
    if gates is None:
        raise TypeError("recurrence: missing the option gates, as in @lltm_ext.recurrence(gates=1)")
    options = (gates, separate, states, parameters, inputs, recurrent, output, weights)
    if forward is not None:
        module = sys._getframe(1).f_globals.get("__name__", "__main__")
        return RecurrentCell(CudaSource(name or "", module, forward, backward, saved), *options)
    if name is not None or backward is not None or saved:
        raise TypeError("recurrence: expected forward with name, backward and saved, but it is missing")

    def declare(function: Callable[..., Any]) -> RecurrentCell:
        return RecurrentCell(function, *options)

    return declare


class RecurrentCell:
    """A cell that :func:`recurrence` made: a function of a whole sequence.

    ``cell(input, hx, weight_ih=None, weight_hh=None, bias=None, *, reset=None, reset_to="zeros",
    reverse=False, algorithm="auto", **named)``

    Args:
        input: [T, B, I], in float16, bfloat16, float32 or float64; None for a cell without gates, where the
            inputs of the steps tell T and B.
        hx: h0 [B, H], or for a cell with states the tuple ``(h0, *states0)``, each [B, H]; h0 in the dtype of
            ``input``, the other states also in float32, if that is a half type.
        weight_ih: [G*H, I]; None for an input [T, B, G*H] that is taken as it is, as the product with it.
        weight_hh: [R*H, H], with rows for the R ``recurrent_gates``, in their order; or [R*H, H/heads],
            block-diagonal: a unit sees h of the H/heads units of its head. None for a cell without recurrent
            product.
        bias: [G*H], or None.
        reset: [T, B], where an episode starts. Before such a step all states of the row become 0 (bool), or
            are multiplied by 1 - reset (numbers).
        reset_to: "zeros"; or "initial" for states that become those of ``hx`` of this call again, with
            numbers (1 - reset) * states + reset * initial states. ``hx`` gets gradients of all episodes.
            Without reset it does nothing.
        reverse: whether the last step is computed first, as by the reverse direction of a layer: hx is the
            state after the last step, the final states are those of step 0. Episodes stay where they are: the
            states become 0 between a step with a reset and the step before it.
        algorithm: how the steps run, as for :func:`lltm_ext.lltm`. On the CPU all are a step at a time.
        named: each parameter, [H], each of the cell's own weights, and each input of the steps, [T, B] or
            [T, B, H], by its name.

    Returns:
        ``(output, h_n)``, or for a cell with states ``(output, (h_n, *states_n))``: output [T, B, H] holds h
        of every step (or the state that the cell's ``output`` names; O of them one after the other, [T, B,
        O*H], which ``output.chunk(O, -1)`` divides), the others the last state. Half types
        are computed in float32. h is rounded at each step, unless the cell is affine in all its states
        together; the other states are not. The output has the dtype of ``input``.

    Products of float32 on CUDA are TF32 where nn.LSTM's are: where ``torch.backends.cudnn.allow_tf32``, by
    default True, or ``torch.backends.cudnn.rnn.fp32_precision`` says so.

    Raises:
        TypeError: for another dtype, no tensor, or another name.
        ValueError: for another algorithm or reset_to.
        RuntimeError: for shapes or devices that do not fit. For a cell given as text also for the CPU, a
            gradient without a backward, one of an input of the steps, or one of a gradient.

    Attributes:
        function: the decorated function; None for a cell given as text.
        gates, separate, states, parameters, inputs, recurrent, output: as given to :func:`recurrence`,
            ``parameters`` as a dictionary, ``output`` of several names as a tuple.
        recurrent_gates: the gates that the product with h feeds: all, with ``separate`` those whose ``r`` the
            function reads.
    """

    __name__: str
    __qualname__: str

    def __init__(
        self,
        function: Callable[..., Any] | CudaSource,
        gates: int,
        separate: bool,
        states: Sequence[str],
        parameters: Sequence[str] | Mapping[str, float | Sequence[float] | None],
        inputs: Sequence[str],
        recurrent: bool,
        output: str | Sequence[str],
        weights: Sequence[str] | Mapping[str, tuple[int, int]] = (),
    ) -> None:
        if isinstance(function, CudaSource):
            if not is_name(function.name):
                raise ValueError(f"recurrence: expected name to be an identifier, got {function.name!r}")
            self.__name__ = self.__qualname__ = function.name
            self.__module__ = function.module
        elif inspect.isfunction(written := written_function(function)):
            functools.update_wrapper(self, written)
            del self.__dict__["__wrapped__"]  # its signature is not that of a call
        else:
            raise TypeError(f"recurrence: expected a function, got {type(function).__name__}")
        name = self.__name__
        can_lack_gates = not recurrent and bool(inputs)
        if not isinstance(gates, int) or isinstance(gates, bool) or gates < (0 if can_lack_gates else 1):
            also = " (0 needs inputs= and recurrent=False)" if gates == 0 else ""
            raise ValueError(f"{name}: expected gates to be a positive int, got {gates!r}{also}")
        if gates > 1024:
            raise ValueError(f"{name}: expected at most 1024 gates, got {gates}")
        if separate and not recurrent:
            raise ValueError(
                f"{name}: expected separate=False for a cell without recurrent product, got True"
            )
        self.gates, self.separate, self.recurrent = gates, bool(separate), bool(recurrent)
        self.states = check_names(name, "states", states, ("h",))
        self.state_names = ("h0", *(f"{s}0" for s in self.states))  # all initial states' names, for messages
        outputs = check_output(name, output, self.states)
        self.output = outputs[0] if len(outputs) == 1 else outputs
        taken = (*RESERVED, *self.state_names)
        names = check_names(name, "parameters", parameters, taken)
        initial = parameters if isinstance(parameters, Mapping) else dict.fromkeys(names)
        for p in names:
            check_initial(name, p, initial[p])
        self.parameters: dict[str, float | Sequence[float] | None] = {p: initial[p] for p in names}
        self.has_lists = any(isinstance(x, Sequence) for x in self.parameters.values())
        self.inputs = check_names(name, "inputs", inputs, (*taken, *self.parameters))
        own = check_weights(name, weights, recurrent, (*taken, *self.parameters, *self.inputs))
        self.weights = {w.name: (w.rows, w.columns) for w in own}
        self.has_own_weights = bool(own)  # torch.compile asks for no dictionary
        named = (self.states, names_of_values(self.parameters), self.inputs)
        self._options = (gates, separate, states, parameters, inputs, recurrent, output, weights)
        self.declared = Declaration(name, gates, self.separate, *named, self.recurrent, outputs, own)
        self.derived: Derived | SourceCell  # the struct in C++, and what its forward saves
        if isinstance(function, CudaSource):
            self.function, self.differentiable = None, function.backward is not None
            self.derived = SourceCell(self.declared, function)
        else:
            self.function, self.differentiable = function, True
            self.arguments = arguments_of(function, self.declared)
            self.derived = derive(function, self.declared)
        self.recurrent_gates = self._find_recurrent_gates()
        if self.function is not None:
            self._warn_of_unread_gates()
            self._warn_of_no_gradient()
        self.is_compiled = False  # whether its kernels are compiled with the package
        self._of_gates: RecurrentCell | None = None
        # For each of the cell's own weights: the units of a head in block-diagonal ones, else 0.
        self.units_of_heads: tuple[int, ...] = (0,) * len(self.weights)
        self._without_heads: RecurrentCell = self
        self._of_heads: dict[tuple[int, ...], RecurrentCell] = {}
        self._serialize()

    def _serialize(self) -> None:
        # Done when a cell is made, because torch.compile does not trace how.
        self.programs = serialize(self)
        self.program = self.programs[torch.float32]
        self.programs_to_initial = serialize(self, to_initial=True)

    def with_inputs_as_gates(self) -> RecurrentCell:
        """The cell that reads the inputs of its steps as further gates: those have gradients."""
        with DERIVING:
            if self._of_gates is None:
                cell = self._copied()
                cell.derived = self.derived.with_inputs_as_gates()  # type: ignore[union-attr]
                cell.declared = cell.derived.declaration
                cell.gates, cell.inputs = cell.declared.gates, ()
                cell._serialize()
                self._of_gates = cell
            return self._of_gates

    with_inputs_as_gates._dynamo_marked_constant = True  # type: ignore[attr-defined]  # it derives a cell

    def with_heads(self, units: tuple[int, ...]) -> RecurrentCell:
        """The same cell, whose program says how many units a head of each of its own weights has.

        Args:
            units: 0 for a dense weight.
        """
        if self._without_heads is not self:
            return self._without_heads.with_heads(units)
        if not any(units):
            return self
        with DERIVING:
            if units not in self._of_heads:
                cell = self._copied()
                cell._without_heads, cell.units_of_heads = self, units
                cell._serialize()
                self._of_heads[units] = cell
            return self._of_heads[units]

    def _copied(self) -> RecurrentCell:
        """A cell to be changed, which has no other made from it."""
        cell = object.__new__(RecurrentCell)
        cell.__dict__ = dict(self.__dict__)  # copy.copy returns what pickle finds by its name
        cell._of_gates, cell._without_heads, cell._of_heads = None, cell, {}
        return cell

    def __call__(
        self,
        input: Any,
        hx: Any,
        weight_ih: Any = None,
        weight_hh: Any = None,
        bias: Any = None,
        *,
        reset: Any = None,
        reset_to: str = "zeros",
        reverse: bool = False,
        algorithm: str = "auto",
        **named: Any,
    ) -> tuple[Tensor, Any]:
        try:
            call = self._call_of(input, hx, (weight_ih, weight_hh, bias), reset, reverse, named)
            if reset_to != "zeros":
                check_reset_to(self.__name__, reset_to)
            if len(call.states) == 2 and call.states[1].dim() == 3:  # only layers give it this shape
                check_call(self, call, algorithm, reset_to)
            output, final = run(self._cell_of(named), call, algorithm, reset_to)
        except TypeError:
            options = {"reset": reset, "reset_to": reset_to, "reverse": reverse, "algorithm": algorithm}
            return hand_over(self, input, hx, weight_ih, weight_hh, bias, **options, **named)
        return output, tuple(final) if self.states else final[0]

    def algorithm(
        self,
        input: Any,
        hx: Any,
        weight_ih: Any = None,
        weight_hh: Any = None,
        bias: Any = None,
        *,
        reset: Any = None,
        reset_to: str = "zeros",
        reverse: bool = False,
        algorithm: str = "auto",
        backward: bool = False,
        **named: Any,
    ) -> str:
        """The algorithm of a call with these arguments: "stepwise", "cluster" or "grid".

        Args:
            backward: True for the algorithm of the backward pass.

        The other arguments and all errors are those of a call.
        """
        if self.is_compiled:
            check_tensors(self.__name__, input, weight_ih, weight_hh, bias)
        call = self._call_of(input, hx, (weight_ih, weight_hh, bias), reset, reverse, named)
        dtype = autocast_dtype(call.input)
        call = call if dtype is None else lowered(dtype, call)
        check_call(self, call, algorithm, reset_to)
        return algorithm_of(
            self._cell_of(named),
            call,
            algorithm,
            call.input.dtype,
            resets_to_states(call, reset_to),
            backward,
        )

    def _call_of(
        self,
        input: Any,
        hx: Any,
        weights: tuple[Any, Any, Any],
        reset: Any,
        reverse: bool,
        named: dict[str, Any],
    ) -> SequenceCall:
        if self.gates > 0 and not isinstance(input, Tensor):
            check_tensor(self.__name__, "input", input)
        states = check_states(self.__name__, hx, self.state_names)
        parameters, inputs = (
            self._values_of(named, states[0]) if named or self.parameters or self.inputs else ((), ())
        )
        if self.has_own_weights:
            check_tensor(self.__name__, "h0", states[0])
            weight_ih, weight_hh, bias = weights
            weights = (weight_ih, self.weights_of_products(weight_hh, last_size(states[0]), named), bias)
        if self.gates == 0:
            input = self._input_of_no_gates(input, states[0], inputs[0])
        if reverse and reset is not None:
            check_step_input(self.__name__, "reset", reset, input, 0)
            reset = at_next_step(reset, None)
        return SequenceCall(input, states, *weights, parameters, inputs, reset, None, reverse)

    def _input_of_no_gates(self, input: Any, h0: Tensor, steps: Any) -> Tensor:
        """An input without features, [T, B, 0], which tells the op the sizes of an input of the steps."""
        name, argument = self.__name__, self.inputs[0]
        check_no_input(name, name, input)
        check_tensor(name, argument, steps)
        if steps.dim() not in (2, 3):
            shapes = "[length, batch] or, for each unit, [length, batch, hidden_size]"
            raise RuntimeError(f"{name}: expected {argument} of shape {shapes}, got {list(steps.shape)}")
        return h0.new_empty((*steps.shape[:2], 0))

    def _find_recurrent_gates(self) -> list[int]:
        """The gates that read the product with h. Of a text nobody knows; it may read all of ``r``."""
        if not isinstance(self.derived, Derived) or not self.separate:
            return list(range(self.gates)) if self.recurrent else []
        read = ancestors(self.derived.outputs)
        found = [i for i, r in enumerate(self.derived.leaves["r"]) if r in read]
        if not found:
            raise ValueError(
                f"{self.__name__}: expected the function to read r of a gate, but it reads none"
                + ("" if self.has_own_weights else " (recurrent=False declares a cell without a product)")
            )
        return found

    def _warn_of_unread_gates(self) -> None:
        read = ancestors(self.derived.outputs)  # type: ignore[union-attr]
        for i, x in enumerate(self.derived.leaves["x"]):  # type: ignore[union-attr]
            if x not in read and not (self.separate and i in self.recurrent_gates):
                warnings.warn(
                    f"{self.__name__}: the function reads no gate {i} of {self.gates}, so {self.__name__}'s "
                    "weights for it do nothing",
                    stacklevel=4,
                )

    def _warn_of_no_gradient(self) -> None:
        gradients = [x for nodes in self.derived.gradients.values() for x in nodes]  # type: ignore[union-attr]
        if all(x.is_constant(0) for x in gradients):
            warnings.warn(
                f"{self.__name__}: no gradient passes through the function, so nothing is learnt; "
                "lltm_ext.spike, lltm_ext.round and lltm_ext.binarize are steps that have one",
                stacklevel=4,
            )

    def _values_of(self, named: dict[str, Any], h0: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        """The parameters and the inputs of a call, in their order."""
        for name in (*self.parameters, *self.inputs, *self.weights):
            if name not in named:
                raise TypeError(f"{self.__name__}: expected {name} to be a Tensor, but it is missing")
        known = (*self.parameters, *self.inputs, *self.weights)
        if len(named) > len(known):
            unknown = next(name for name in named if name not in known)
            expected = f"only the names {', '.join(known)}" if known else "no parameter or input of a step"
            raise TypeError(f"{self.__name__}: expected {expected}, got {unknown}")
        hidden = last_size(h0) if self.has_lists else 0
        return self.values_of_units(named, hidden), [named[u] for u in self.inputs]

    def values_of_units(self, named: Mapping[str, Any], hidden: int) -> list[Any]:
        """The parameters in their order, those of several values [n*H] as n tensors [H]."""
        found = []
        for name, initial in self.parameters.items():
            x, count = named[name], len(initial) if isinstance(initial, Sequence) else 0
            if count == 0:
                found.append(x)
                continue
            check_tensor(self.__name__, name, x)
            if x.shape != (count * hidden,):
                raise RuntimeError(
                    f"{self.__name__}: expected {name} of shape [{count}*hidden_size] = [{count * hidden}], "
                    f"got {list(x.shape)}"
                )
            found += x.chunk(count)
        return found

    def _cell_of(self, named: Mapping[str, Any]) -> RecurrentCell:
        """The cell for a call with these weights."""
        if not self.has_own_weights or torch.compiler.is_compiling():  # which may not know the sizes
            return self
        shapes = [(named[name].shape, rows) for name, (rows, _) in self.weights.items()]
        return self.with_heads(tuple(columns if columns * n < rows else 0 for (rows, columns), n in shapes))

    def weights_of_products(self, weight_hh: Any, hidden: int, named: Mapping[str, Any]) -> Tensor:
        """weight_hh as the ops take it: rows for all gates, then the blocks of the cell's own weights."""
        sizes = {"weight_hh": (len(self.recurrent_gates), 1), **self.weights}
        weights = {"weight_hh": weight_hh} | {name: named.get(name) for name in self.weights}
        for argument, x in weights.items():
            check_tensor(self.__name__, argument, x)
            check_like(self.__name__, argument, x, weight_hh, (weight_hh.dtype,))
            rows, columns = sizes[argument]
            fits = is_block_diagonal(x, rows * hidden, hidden) if columns == 1 else False
            if not fits and x.shape != (rows * hidden, columns * hidden):
                counts = ", ".join(f"{n}*hidden_size" if n > 1 else "hidden_size" for n in (rows, columns))
                heads = " (or / heads)" if columns == 1 else ""
                raise RuntimeError(
                    f"{self.__name__}: expected {argument} of shape [{counts}{heads}] with hidden_size = "
                    f"{hidden}, got {list(x.shape)}"
                )
        blocks = [in_blocks(weights[name], *size) for name, size in self.weights.items()]
        own = self.recurrent_gates
        of_gates = in_blocks(weight_hh, len(own), 1)
        of_gates = of_gates if len(own) == self.gates else expand_gates(of_gates, own, self.gates)
        return torch.cat([of_gates, *blocks])

    @property
    def rows_of_products(self) -> int:
        """How many blocks of hidden_size rows weight_hh has for the ops."""
        return self.gates + len(self.declared.names("w")) if self.weights else len(self.recurrent_gates)

    def widths(self) -> dict[str, int]:
        """How many values of a unit each parameter has."""
        return {p: len(x) if isinstance(x, Sequence) else 1 for p, x in self.parameters.items()}

    def step_like(self, x: Tensor) -> Step:
        """A step on whole tensors, by torch's functions, like that of the derived cell."""
        if isinstance(self.derived, SourceCell):
            raise RuntimeError(
                f"{self.__name__}: its gradient cannot be differentiated again (create_graph, torch.func): "
                "a cell given as text has first derivatives only"
            )
        return self.derived.step_like(x)

    def step(
        self,
        x: Sequence[Tensor],
        r: Sequence[Tensor],
        h: Tensor,
        states: Sequence[Tensor],
        parameters: Sequence[Tensor],
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor] = (),
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns (new h, new states) of one step, by torch's functions, for tensors that broadcast."""
        blocks = [
            block
            for w, size in zip(weights, self.weights.values(), strict=True)
            for block in in_blocks(w, *size).split(h.shape[-1])
        ]
        values = {"x": x, "r": r, "h": [h], "s": states, "p": parameters, "u": inputs, "w": blocks}
        new_h, *new_states = self.step_like(h)(values)
        return new_h, tuple(new_states)

    @property
    def source(self) -> str:
        """The CUDA C++ that the kernels are compiled from: the cell's step, forward and backward.

        It is that of float32 and float64: in half types it may save some values in more precision.
        """
        return self.derived.struct.source

    def compile(
        self,
        dtype: torch.dtype,
        hidden_size: int,
        batch: int,
        *,
        reset: bool = False,
        reset_to: str = "zeros",
        device: torch.device | str = "cuda",
    ) -> None:
        """Compiles the kernels of calls of these sizes now, forward and backward, and not in the first call.

        Args:
            dtype: of the input.
            hidden_size, batch: H and B. Other sizes, and packed sequences, may need other kernels.
            reset: whether the calls have resets.
            reset_to: "zeros" or "initial", as for the calls.
            device: the CUDA device of the calls.

        Raises:
            RuntimeError: for another device than CUDA, or code that NVRTC does not compile.
        """
        device = torch.device(device)
        if device.type != "cuda":
            raise RuntimeError(f"{self.__name__}: expected device to be a CUDA device, got {device}")

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device, requires_grad=self.differentiable)

        rows = self.gates * hidden_size
        weight_hh = zeros(len(self.recurrent_gates) * hidden_size, hidden_size) if self.recurrent else None
        weights = (zeros(rows, 8), weight_hh, zeros(rows))
        weights = weights if self.gates else (None, None, None)  # type: ignore[assignment]
        named: dict[str, Any] = {p: zeros(n * hidden_size) for p, n in self.widths().items()}
        named |= {w: zeros(n * hidden_size, k * hidden_size) for w, (n, k) in self.weights.items()}
        hx = tuple(zeros(batch, hidden_size) for _ in self.state_names)
        # A single step has kernels of its own, as have many steps of few units without a product.
        for length in (1, 2) if self.recurrent else (1, 2, 128):
            named |= {u: zeros(length, batch).detach() for u in self.inputs}
            flags = torch.zeros(length, batch, dtype=torch.bool, device=device) if reset else None
            input = zeros(length, batch, 8) if self.gates else None
            steps = (input, hx if self.states else hx[0], *weights)
            output, _ = self(*steps, reset=flags, reset_to=reset_to, **named)
            if self.differentiable:
                output.sum().backward()

    def gradcheck(self, *args: Any, device: torch.device | str | None = None, **kwargs: Any) -> bool:
        """Compares the gradients with finite differences, in float64; returns True or raises an error.

        Args:
            args, kwargs: as for a call; tensors are converted to float64. Without any, small random ones,
                with positive states; give your own if the cell is not defined or not differentiable there.
            device: of the random tensors; None: the current CUDA device, or the CPU if there is none.

        Raises:
            RuntimeError: for a gradient that differs, whose argument it names; for a cell without a backward.
        """
        if not self.differentiable:
            raise RuntimeError(f"{self.__name__}: has no backward to check")
        if not args and not kwargs:
            default = "cuda" if torch.cuda.is_available() else "cpu"
            args, kwargs = self._example(torch.device(device or default))
        given = inspect.signature(self).bind(*args, **kwargs).arguments
        values = {**given, **given.get("named", {})}
        states = check_states(self.__name__, values["hx"], self.state_names)
        values |= dict(zip(self.state_names, states, strict=True))
        values = {name: in_float64(x) for name, x in values.items() if name not in ("hx", "named")}
        wanted = [
            "input",
            *self.state_names,
            "weight_ih",
            "weight_hh",
            "bias",
            *self.parameters,
            *self.weights,
        ]
        wanted += self.inputs if self.function else ()
        for name in (name for name in wanted if is_floating(values.get(name))):

            def of_one(x: Tensor, name: str = name) -> tuple[Tensor, ...]:
                given = {**values, name: x}
                hx = [given.pop(state) for state in self.state_names]
                output, final = self(hx=hx if self.states else hx[0], **given)
                return (output, *final) if self.states else (output, final)

            try:
                torch.autograd.gradcheck(of_one, values[name].requires_grad_(), nondet_tol=0.0)
            except GradcheckError as error:
                message = f"{self.__name__}: the gradient with respect to {name} is wrong: {error}"
                raise RuntimeError(message) from error
            values[name].requires_grad_(False)
        return True

    def _example(self, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a small call."""
        length, batch, size, hidden = 3, 2, 2, 3
        rows, generator = self.gates * hidden, torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            options: Any = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
            return torch.randn(shape, **options).to(device)

        states = [0.1 + 0.5 * torch.sigmoid(normal(batch, hidden)) for _ in self.state_names]
        weight_hh = 0.5 * normal(len(self.recurrent_gates) * hidden, hidden) if self.recurrent else None
        hx = tuple(states) if self.states else states[0]
        args = (normal(length, batch, size), hx, normal(rows, size), weight_hh, normal(rows))
        args = args if self.gates else (None, hx)  # type: ignore[assignment]
        named = {p: normal(n * hidden) for p, n in self.widths().items()}
        named |= {w: 0.5 * normal(n * hidden, k * hidden) for w, (n, k) in self.weights.items()}
        named |= {u: torch.sigmoid(normal(length, batch)) for u in self.inputs}
        return args, named

    def __reduce__(self) -> Any:
        if self._without_heads is not self:
            return RecurrentCell.with_heads, (self._without_heads, self.units_of_heads)
        if self.function is None or "<locals>" not in self.__qualname__:
            return self.__qualname__  # pickle finds the cell in its module by this name, as a function
        return made_again, (parts_of(self.function), self._options)

    def __copy__(self) -> RecurrentCell:
        return self

    def __deepcopy__(self, memo: Any) -> RecurrentCell:
        return self

    def __repr__(self) -> str:
        options = [f"{self.gates} gate{'s' * (self.gates != 1)}"]
        options += ["separate products"] * self.separate + ["no recurrent product"] * (not self.recurrent)
        if 0 < len(self.recurrent_gates) < self.gates:
            options.append(f"a product with h of gates {', '.join(map(str, self.recurrent_gates))}")
        for name, values in (
            ("states", self.states),
            ("parameters", self.parameters),
            ("inputs", self.inputs),
            *([("weights", tuple(self.weights))] if self.weights else []),
            ("saved for backward", self.derived.saved_names),
        ):
            options.append(f"{name}: {', '.join(values) or 'none'}")
        options[-1] = options[-1] if self.differentiable else "without backward"
        options += [f"output: {', '.join(self.declared.outputs)}"] * (self.output != "h")
        options += ["affine in its states"] * bool(self.function and self.derived.affine)  # type: ignore[union-attr]
        how = f"({', '.join(self.arguments)})" if self.function else " in C++"
        return f"<lltm_ext.recurrence {self.__name__}{how}, {', '.join(options)}>"


def made_again(function: LocalFunction, options: tuple[Any, ...]) -> RecurrentCell:
    return RecurrentCell(function_of(function), *options)


# ---- a call ------------------------------------------------------------------------------------------------


def run(
    cell: RecurrentCell, call: SequenceCall, algorithm: str = "auto", reset_to: str = "zeros"
) -> tuple[Tensor, list[Tensor]]:
    """Runs a cell over a sequence, and returns (output, final states)."""
    reset = call.reset
    if cell.is_compiled and reset is None:  # the op checks all arguments, and casts
        try:
            return run_kernels(cell, call, algorithm, call.input.dtype)
        except Exception:
            raise_named(cell, call, algorithm, reset_to)
            raise
    dtype = autocast_dtype(call.input)
    if dtype is not None and not cell.is_compiled:
        call = lowered(dtype, with_states(cell, call))
        with torch.autocast(call.input.device.type, enabled=False):
            return run(cell, call, algorithm, reset_to)
    if not kernels_check(cell, call):
        check_call(cell, with_states(cell, call), algorithm, reset_to)
    try:
        if reset is not None or call.inputs:
            check_steps(cell, call, hidden_of(call, cell.gates))
        to_initial = resets_to_states(call, reset_to)
        of_op = with_inputs_as_gates(cell, call) if inputs_have_gradients(cell, call) else (cell, call)
        return run_kernels(*of_op, algorithm, dtype or call.input.dtype, to_initial)
    except Exception:
        raise_named(cell, call, algorithm, reset_to)
        raise


def run_both(
    cell: RecurrentCell, calls: Sequence[SequenceCall], reset_to: str = "zeros"
) -> list[tuple[Tensor, list[Tensor]]]:
    """Like :func:`run` for both directions of a layer."""
    dtype = autocast_dtype(calls[0].input)
    is_plain = dtype is None or cell.is_compiled
    is_plain = is_plain and tracing_state() is None  # torch.jit.trace does not take the op's lists
    is_plain = is_plain and not inputs_have_gradients(cell, calls[0])  # each gets an input of its own
    if is_plain and kernels_check(cell, *calls):
        calls = calls if dtype is None else [with_states(cell, call) for call in calls]  # kept in float32
        try:
            to_initial = resets_to_states(calls[0], reset_to)
            return run_both_by_kernels(cell, calls, dtype or calls[0].input.dtype, to_initial)
        except Exception:
            for call in calls:
                raise_named(cell, call, "auto", reset_to)
            raise
    return [run(cell, call, "auto", reset_to) for call in calls]


def inputs_have_gradients(cell: RecurrentCell, call: SequenceCall) -> bool:
    """Whether inputs of the steps need gradients or have tangents."""
    if not call.inputs or cell.function is None:
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in call.inputs):
        return True
    if transforms_active():  # torch.compile does not trace the question
        return torch.compiler.is_compiling() or any(map(is_transformed, call.inputs))
    return has_tangents() and any(forward_ad.unpack_dual(x).tangent is not None for x in call.inputs)


def with_inputs_as_gates(cell: RecurrentCell, call: SequenceCall) -> tuple[RecurrentCell, SequenceCall]:
    """The same call with the inputs of the steps as further gates, after the product with weight_ih."""
    input, weight_ih, bias, inputs = call.input, call.weight_ih, call.bias, call.inputs
    hidden = hidden_of(call, cell.gates)
    gates = [of_each_unit(x, input, hidden).to(input.dtype) for x in inputs]
    if weight_ih is not None:
        gates.insert(0, F.linear(input, weight_ih, bias))
        bias = None
    elif cell.gates > 0:
        gates.insert(0, input)
        bias = None if bias is None else F.pad(bias, (0, len(inputs) * hidden))
    x, weight_hh = torch.cat(gates, -1) if len(gates) > 1 else gates[0], call.weight_hh
    if cell.has_own_weights:  # their blocks follow those of all gates
        of_gates, own = weight_hh.tensor_split((cell.gates * hidden,))
        weight_hh = torch.cat([of_gates, own.new_zeros((len(inputs) * hidden, hidden)), own])
    call = call._replace(input=x, weight_ih=None, weight_hh=weight_hh, bias=bias, inputs=())
    return cell.with_inputs_as_gates(), call


def raise_named(cell: RecurrentCell, call: SequenceCall, algorithm: str, reset_to: str) -> None:
    """If the arguments do not fit, raises an error that names the cell's own argument."""
    weights = {"weight_ih": call.weight_ih, "weight_hh": call.weight_hh, "bias": call.bias}
    check_no_dtensor(cell.__name__, input=call.input, hx=call.states[0], **weights, bias_hh=call.bias_hh)
    if cell.is_compiled:  # the op has done so, except for what is no tensor
        return check_tensors(cell.__name__, call.input, call.weight_ih, call.weight_hh, call.bias)
    try:
        check_call(cell, with_states(cell, call), algorithm, reset_to)
    except Exception as named:
        raise named from None


def resets_to_states(call: SequenceCall, reset_to: str) -> bool:
    """Whether the resets of a call lead to states that it gives. Initial states of None are zeros."""
    return reset_to == "initial" and call.reset is not None and call.states[0] is not None


def with_states(cell: RecurrentCell, call: SequenceCall) -> SequenceCall:
    """A call with all states, each [B, H]: zeros for those that are None."""
    if call.states[0] is not None:
        is_layers = len(call.states) == 2 and isinstance(call.states[1], Tensor) and call.states[1].dim() == 3
        return call._replace(states=[call.states[0], call.states[1][0]]) if is_layers else call
    zeros = zero_state(call.input, hidden_of(call, cell.gates), call.batch_sizes)
    return call._replace(states=[zeros] * len(call.states))


def kernels_check(cell: RecurrentCell, *calls: SequenceCall) -> bool:
    """Whether the dispatcher op refuses all that :func:`check_call` does.

    It does so in less time. But it would accept a weight_hh that the cell does not read, and other dtypes,
    because it gets them converted.
    """
    if cell.is_compiled:
        return True
    input = calls[0].input
    is_known = isinstance(input, Tensor) and isinstance(calls[0].weight_ih, (Tensor, type(None)))
    if cell.function is None or not is_known:
        return False
    dtypes, of_product = (input.dtype, compute_dtype(input.dtype)), len(cell.recurrent_gates)
    for call in calls:
        if call.weight_hh is not None and not cell.recurrent:
            return False
        if (
            0 < of_product < cell.gates and not cell.has_own_weights
        ):  # the op gets rows for the other gates too
            rows = getattr(call.weight_hh, "shape", ())[:1]
            if rows != (of_product * hidden_of(call, cell.gates),):
                return False
        for x in call.states[1:]:
            if x is not None and x.dtype not in dtypes:
                return False
        for x in () if isinstance(call.parameters, Tensor) else call.parameters:
            if not isinstance(x, Tensor) or x.dtype != input.dtype:
                return False
    return True


def autocast_dtype(input: Any) -> torch.dtype | None:
    """The dtype that autocast, if it is active, gives the arguments of a call."""
    kind = input.device.type if isinstance(input, Tensor) else ""
    enabled = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if enabled else None


def lowered(dtype: torch.dtype, call: SequenceCall) -> SequenceCall:
    """The arguments as autocast gives them: states except h stay float32, and float64 stays as it is."""

    def to(dtype: torch.dtype, x: Any) -> Any:
        lowers = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if lowers else x

    h0, *others = call.states
    parameters = call.parameters
    names = ("input", "weight_ih", "weight_hh", "bias", "bias_hh")
    return call._replace(
        states=[to(dtype, h0), *(to(torch.float32, x) for x in others)],
        parameters=to(dtype, parameters)
        if isinstance(parameters, Tensor)
        else [to(dtype, x) for x in parameters],
        **{name: to(dtype, getattr(call, name)) for name in names},
    )


def in_float64(x: Any) -> Any:
    return x.detach().to(torch.float64, copy=True) if is_floating(x) else x


def is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


# ---- checks ------------------------------------------------------------------------------------------------


def last_size(x: Any) -> int:
    return x.shape[-1] if isinstance(x, Tensor) and not x.is_nested and x.dim() > 0 else 0


def check_initial(cell: str, name: str, value: Any) -> None:
    """Raises for what no parameter can be filled with."""
    several = isinstance(value, Sequence) and not isinstance(value, str)
    numbers = list(value) if several else [value]
    is_number = [isinstance(x, Real) or (x is None and not several) for x in numbers]
    if not numbers or not all(is_number):
        raise TypeError(
            f"{cell}: expected the initial value of {name} to be a number, None or a list of numbers, "
            f"got {value!r}"
        )


def check_output(cell: str, output: Any, states: tuple[str, ...]) -> tuple[str, ...]:
    names = (output,) if isinstance(output, str) else output
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{cell}: expected output to be the name of a state, or several, got {output!r}")
    for name in names:
        if name not in ("h", *states):
            known = ", ".join(("h", *states))
            raise ValueError(f"{cell}: expected output to be one of {known}, got {name!r}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{cell}: expected output to name a state, or several once each, got {output!r}")
    return tuple(names)


def check_weights(cell: str, weights: Any, recurrent: bool, taken: Sequence[str]) -> tuple[Weight, ...]:
    names = check_names(cell, "weights", weights, taken)
    found = []
    for name in names:
        size = weights[name] if isinstance(weights, Mapping) else (1, 1)
        is_size = isinstance(size, tuple) and len(size) == 2 and all(isinstance(n, int) for n in size)
        if not is_size or min(size) < 1:
            raise ValueError(
                f"{cell}: expected the size of {name} to be (rows, columns), in multiples of hidden_size, "
                f"got {size!r}"
            )
        found.append(Weight(name, *size))
    if found and not recurrent:
        raise ValueError(f"{cell}: expected no weights for a cell without recurrent product, got {names!r}")
    return tuple(found)


def in_blocks(weight: Tensor, rows: int, columns: int) -> Tensor:
    """A weight [rows*H, columns*H] as [rows*columns*H, H], row by row of its blocks; of one column also
    [rows*H, H/heads]."""
    size = weight.shape[0] // rows
    if columns == 1:
        return weight if weight.shape[1] == size else expand_blocks(weight, size // weight.shape[1])
    return weight.unflatten(0, (rows, size)).unflatten(2, (columns, size)).transpose(1, 2).reshape(-1, size)


def check_call(cell: RecurrentCell, call: SequenceCall, algorithm: str, reset_to: str) -> None:
    """Raises for arguments that do not fit, as the built-in ops do."""
    input, states, weight_ih, weight_hh, bias, parameters, _, _, batch_sizes, _, bias_hh = call
    name = cell.__name__
    check_tensor(name, "input", input)
    if input.layout != torch.strided:
        raise RuntimeError(f"{name}: expected input of layout torch.strided, got {input.layout}")
    if input.dtype not in FLOATING:
        dtypes = "float16, bfloat16, float32 or float64"
        raise TypeError(f"{name}: expected input of dtype {dtypes}, got {dtype_name(input.dtype)}")
    if weight_hh is not None and not cell.recurrent:
        raise TypeError(f"{name}: expected weight_hh to be None, because the cell has no recurrent product")
    if weight_ih is not None and cell.gates == 0:
        raise TypeError(f"{name}: expected weight_ih to be None, because the cell has no gates")
    weights = {"weight_ih": weight_ih, "weight_hh": weight_hh, "bias": bias, "bias_hh": bias_hh}
    needed = ("weight_hh",) if cell.recurrent else ()
    tensors = {argument: x for argument, x in weights.items() if x is not None or argument in needed}
    if isinstance(parameters, Tensor):
        parameters = parameters.chunk(len(cell.declared.parameters))
    tensors |= zip(cell.declared.parameters, parameters, strict=True)
    for argument, x in ({"h0": states[0]} | tensors).items():
        check_like(name, argument, x, input, (input.dtype,))
    state_dtypes = (input.dtype, compute_dtype(input.dtype))
    for argument, x in zip(cell.state_names[1:], states[1:], strict=True):
        check_like(name, argument, x, input, state_dtypes)
    check_shapes(cell, input, list(states), tensors, packed=batch_sizes is not None)
    check_steps(cell, call, states[0].shape[1])
    if cell.function is None:
        differentiable = {"input": input} | dict(zip(cell.state_names, states, strict=True)) | tensors
        check_text(cell, input, differentiable)
    check_algorithm(name, algorithm, input)
    check_reset_to(name, reset_to)


def check_steps(cell: RecurrentCell, call: SequenceCall, hidden: int) -> None:
    for argument, x in zip((*cell.inputs, "reset"), (*call.inputs, call.reset), strict=True):
        is_input = argument != "reset"
        if is_input or x is not None:
            differentiable = is_input and cell.function is not None
            check_step_input(cell.__name__, argument, x, call.input, hidden, differentiable)


def check_text(cell: RecurrentCell, input: Tensor, differentiable: dict[str, Tensor]) -> None:
    """Raises for what a cell given as text cannot do."""
    if not input.is_cuda:
        raise RuntimeError(
            f"{cell.__name__}: expected input on a CUDA device, got {input.device} "
            "(a cell given as text runs on CUDA only; one of a Python function runs everywhere)"
        )
    for argument, x in differentiable.items():
        if x.requires_grad and torch.is_grad_enabled() and not cell.differentiable:
            raise RuntimeError(
                f"{cell.__name__}: a gradient with respect to {argument} is required, but the cell has no "
                "backward (give backward= of lltm_ext.recurrence, or call it under torch.no_grad())"
            )


def check_like(name: str, argument: str, x: Any, input: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    check_tensor(name, argument, x)
    if x.layout != torch.strided:
        raise RuntimeError(f"{name}: expected {argument} of layout torch.strided, got {x.layout}")
    if x.device != input.device:
        raise RuntimeError(f"{name}: expected {argument} on {input.device}, got {x.device}")
    if x.dtype not in dtypes:
        expected = " or ".join(dict.fromkeys(map(dtype_name, dtypes)))
        raise TypeError(f"{name}: expected {argument} of dtype {expected}, got {dtype_name(x.dtype)}")


def check_shapes(
    cell: RecurrentCell, input: Tensor, states: list[Tensor], tensors: dict[str, Tensor], packed: bool
) -> None:
    name, h0 = cell.__name__, states[0]

    def check(argument: str, x: Tensor, meaning: str, *expected: int) -> None:
        if x.shape != expected:
            raise RuntimeError(
                f"{name}: expected {argument} of shape {meaning} = {list(expected)}, got {list(x.shape)}"
            )

    dims, meaning = (2, "[rows of all steps, input_size]") if packed else (3, "[length, batch, input_size]")
    if input.dim() != dims:
        raise RuntimeError(f"{name}: expected input of shape {meaning}, got {list(input.shape)}")
    if h0.dim() != 2:
        raise RuntimeError(f"{name}: expected h0 of shape [batch, hidden_size], got {list(h0.shape)}")
    batch, hidden = input.shape[1] if input.dim() == 3 else h0.shape[0], h0.shape[1]
    for argument, x in zip(cell.state_names, states, strict=True):
        check(argument, x, "[batch, hidden_size]", batch, hidden)
    rows, meaning = cell.gates * hidden, f"[{cell.gates}*hidden_size"
    if "weight_ih" in tensors:
        check("weight_ih", tensors["weight_ih"], f"{meaning}, input_size]", rows, input.shape[-1])
    elif input.shape[-1] != rows:
        raise TypeError(
            f"{name}: expected weight_ih to be a Tensor, got None, or input of "
            f"{cell.gates}*hidden_size = {rows} features, which need none, got {list(input.shape)}"
        )
    of_product = cell.rows_of_products
    if cell.recurrent and not is_block_diagonal(tensors["weight_hh"], of_product * hidden, hidden):
        expected = f"[{of_product}*hidden_size, hidden_size (or / heads)]"
        check("weight_hh", tensors["weight_hh"], expected, of_product * hidden, hidden)
    for argument in ("bias", "bias_hh"):
        if argument in tensors:
            check(argument, tensors[argument], f"{meaning}]", rows)
    for argument in cell.declared.parameters:
        check(argument, tensors[argument], "[hidden_size]", hidden)


def is_block_diagonal(weight: Tensor, rows: int, hidden: int) -> bool:
    """Whether ``weight`` has the shape [rows, H/heads]."""
    return (
        weight.dim() == 2
        and weight.shape[0] == rows
        and weight.shape[1] > 0
        and hidden % weight.shape[1] == 0
    )


def check_algorithm(name: str, algorithm: Any, input: Tensor) -> None:
    if algorithm in ("cluster", "grid") and not input.is_cuda:
        raise RuntimeError(
            f"{name}: algorithm {algorithm!r} needs a CUDA device (algorithm 'auto' runs everything)"
        )
    if algorithm not in ("auto", "stepwise", "cluster", "grid"):
        expected = "'auto', 'stepwise', 'cluster' or 'grid'"
        raise ValueError(f"{name}: expected algorithm to be {expected}, got {algorithm!r}")
