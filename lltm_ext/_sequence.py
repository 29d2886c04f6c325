"""Recurrent cells over whole sequences: an op is declared once by :func:`sequence_op`, and layers run it.

A call goes to the dispatcher op, whose autograd is C++. torch.func's transforms and forward-mode AD cannot
enter a C++ autograd function: under them the op is a ``torch.autograd.Function`` of its own forward and
backward.
"""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lltm_ext import _portable
from lltm_ext._library import (
    WrongDtype,
    WrongStates,
    check_tensor,
    describe,
    differentiable_gradients,
    differentiable_tangents,
    has_tangents,
    implement,
    ops,
    transforms_active,
    under_transforms,
    vmap_loop,
    vmap_rows,
)
from lltm_ext._loop import kept, zero_state

State = tuple[Tensor, Tensor]
Outputs = tuple[Tensor, Tensor, Tensor]
PAIR = ("h0", "c0")  # the names of the states of an op
Direction = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]  # h0, c0, weight_ih, weight_hh, bias
Reference = Callable[..., tuple[Tensor, State]]
Declared = TypeVar("Declared", bound=Reference)


unsafe_view: Callable[..., Tensor] = torch.ops.aten._unsafe_view.default
tracing_state: Callable[[], Any] = torch._C._get_tracing_state  # None unless torch.jit.trace runs


class AlgorithmFunction(Protocol):
    def __call__(
        self,
        input: Tensor,
        hx: State,
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias: Tensor | None = None,
        *,
        algorithm: str = "auto",
        backward: bool = False,
    ) -> str: ...


class SequenceOp(NamedTuple):
    """A declared op."""

    reference: Reference
    algorithm: AlgorithmFunction
    Function: Any  # the torch.autograd.Function, of the arguments of the dispatcher op
    gates: int
    run: Callable[..., Outputs]  # of one direction
    run_both: Callable[..., list[Outputs]]  # (input, forward, reverse, batch_sizes)


SEQUENCE_OPS: dict[str, SequenceOp] = {}


def sequence_op(gates: int) -> Callable[[Declared], Declared]:
    """Declares an op: decorates its reference in pure PyTorch (:func:`run_steps`).

    Returns the function that runs the op, under the name, signature and docstring of the reference. The
    reference, ``<name>_algorithm`` and the autograd Function are the first fields of ``SEQUENCE_OPS[name]``.

    Args:
        gates: how many blocks of hidden_size rows the weights have.
    """

    def declare(reference: Declared) -> Declared:
        name, module = reference.__name__, reference.__module__
        Function = sequence_function(name, reference)
        run = one_direction(name, Function)
        algorithm_op = getattr(ops, f"{name}_algorithm")

        def function(
            input: Any,
            hx: Any,
            weight_ih: Any,
            weight_hh: Any,
            bias: Any = None,
            *,
            reset: Any = None,
            reset_to: str = "zeros",
            algorithm: str = "auto",
        ) -> tuple[Tensor, State]:
            tensors = check_sequence(name, input, hx, weight_ih, weight_hh, bias)
            check_reset_to(name, reset_to)
            output, h_n, c_n = run(*tensors, algorithm=algorithm, reset=reset, reset_to=reset_to)
            return output, (h_n, c_n)

        def algorithm_of(
            input: Tensor,
            hx: State,
            weight_ih: Tensor,
            weight_hh: Tensor,
            bias: Tensor | None = None,
            *,
            algorithm: str = "auto",
            backward: bool = False,
        ) -> str:
            tensors = check_sequence(f"{name}_algorithm", input, hx, weight_ih, weight_hh, bias)
            return algorithm_op(*tensors, algorithm=algorithm, backward=backward)

        function.__annotations__ = reference.__annotations__
        describe(function, module, name, reference.__doc__)
        describe(reference, module, f"{name}_reference", f":func:`{name}` in pure PyTorch.")
        describe(algorithm_of, module, f"{name}_algorithm", ALGORITHM_DOC.format(name=name))
        both = both_directions(name, run)
        SEQUENCE_OPS[name] = SequenceOp(reference, algorithm_of, Function, gates, run, both)
        return function  # type: ignore[return-value]

    return declare


ALGORITHM_DOC = """The algorithm of :func:`{name}` for these arguments: "stepwise", "cluster" or "grid".

    Args:
        backward: True for the algorithm of the backward pass, which may differ from the forward's.

    The other arguments and all errors are those of :func:`{name}`.
    """


def run_steps(
    step: Callable[[Tensor, Tensor], State],
    input: Tensor,
    hx: State,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    reset: Tensor | None = None,
    reset_to: str = "zeros",
) -> tuple[Tensor, State]:
    """A sequence in pure PyTorch, a Python loop over the steps.

    ``step(gates, c)`` is the cell: it returns ``(h, c)`` from the gates before their activations.
    """
    h, c = hx
    initial = hx if reset_to == "initial" else (None, None)
    projection = input @ weight_ih.t()
    if bias is not None:
        projection = projection + bias
    outputs = []
    for t, gates in enumerate(projection.unbind(0)):
        if reset is not None:
            now = reset[t].unsqueeze(-1)
            h, c = (kept(x, now, x0).to(x.dtype) for x, x0 in zip((h, c), initial, strict=True))
        new_h, new_c = step(gates + h @ weight_hh.t(), c)
        h, c = new_h.to(h.dtype), new_c.to(c.dtype)
        outputs.append(h)
    output = torch.stack(outputs) if outputs else input.new_zeros(0, *h.shape)
    return output, (h, c)


def sequence_function(
    name: str, reference: Callable[..., tuple[Tensor, State]]
) -> type[torch.autograd.Function]:
    """The Function of the op ``lltm_ext::<name>``, with its arguments.

    Second derivatives are those of ``reference``. The Function's ``composed`` is the op made of it.
    """
    forward_op, backward_op = getattr(ops, f"{name}_forward"), getattr(ops, f"{name}_backward")

    def by_reference(input: Tensor, h0: Tensor | None, c0: Tensor | None, *args: Any) -> Outputs:
        """By the reference: all steps at once, or step by step if the number of rows changes."""
        *weights, batch_sizes, reverse, reset = args
        hidden = weights[1].shape[1]
        h0, c0 = (zero_state(input, hidden, batch_sizes) if x is None else x for x in (h0, c0))
        if batch_sizes is None:
            if reverse:
                input, reset = input.flip(0), None if reset is None else reset.flip(0)
            output, (h_n, c_n) = reference(input, (h0, c0), *weights, reset=reset)
            return output.flip(0) if reverse else output, h_n, c_n
        order = slice(None, None, -1 if reverse else 1)
        resets = [None] * len(batch_sizes) if reset is None else reset.split(batch_sizes)
        outputs = []
        for step, of_step in list(zip(input.split(batch_sizes), resets, strict=True))[order]:
            n = len(step)
            now = None if of_step is None else of_step[None]
            rows, (h, c) = reference(step[None], (h0[:n], c0[:n]), *weights, reset=now)
            h0, c0 = torch.cat([h, h0[n:]]), torch.cat([c, c0[n:]])
            outputs.append(rows[0])
        return torch.cat(outputs[order]) if outputs else input.new_zeros(0, hidden), h0, c0

    def with_two_biases(*how: Any) -> Callable[..., Outputs]:
        return lambda *x: by_reference(*x[:5], one_bias(*x[5:]), *how)

    class SequenceFunction(torch.autograd.Function):
        """``(output, h_n, c_n, gates, extra)``, the last two for backward."""

        composed = staticmethod(by_reference)

        @staticmethod
        def forward(*args: Any) -> tuple[Tensor, ...]:
            return forward_op(*args[:5], one_bias(args[5], args[10]), *args[6:10])

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            y, _, _, gates, extra = output
            *tensors, ctx.batch_sizes, ctx.reverse, ctx.algorithm, reset, bias_hh = inputs
            ctx.mark_non_differentiable(gates, extra)
            ctx.set_materialize_grads(False)
            saved = (*tensors, bias_hh, y, gates, extra, reset)
            ctx.save_for_backward(*saved)
            ctx.save_for_forward(*saved)

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
            *inputs, _, _, _, reset = ctx.saved_tensors
            function = with_two_biases(ctx.batch_sizes, ctx.reverse, reset)
            found = differentiable_tangents(function, inputs, (*tangents[:6], tangents[10]))
            return *found, None, None

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
            *inputs, output, gates, extra, reset = ctx.saved_tensors
            grads, how = grad_outputs[:3], (ctx.batch_sizes, ctx.reverse)
            found: Sequence[Tensor | None] = [None] * len(inputs)
            if all(g is None for g in grads):
                pass
            elif torch.is_grad_enabled():
                found = differentiable_gradients(with_two_biases(*how, reset), inputs, grads)
            else:
                saved = (*inputs[:5], output, gates, extra)
                needed = (*ctx.needs_input_grad[:6], ctx.needs_input_grad[10])
                of_bias = needed[5] or needed[6]
                computed = backward_op(*grads, *saved, *how, ctx.algorithm, needed[0], of_bias, reset)
                found = [x if is_needed else None for x, is_needed in zip(computed, needed, strict=False)]
                found.append(computed[5].clone() if needed[6] else None)
            return *found[:6], None, None, None, None, found[6]

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
            row = 1 if args[6] is None else 0  # without batch_sizes the length is the first dimension
            places = {0: row, 1: 0, 2: 0, 9: row}
            rows = {i: dim for i, dim in places.items() if args[i] is not None}
            rule = vmap_rows(SequenceFunction.apply, rows, (row, 0, 0, row, row), counts=6)
            return rule(info, in_dims, *args)

    return SequenceFunction


def one_direction(name: str, function: Any) -> Callable[..., Outputs]:
    """The op ``lltm_ext::<name>`` with its arguments, and ``function`` under transforms or with tangents."""
    op = getattr(ops, name)

    def run(
        input: Tensor,
        h0: Tensor | None,
        c0: Tensor | None,
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias: Tensor | None = None,
        bias_hh: Tensor | None = None,
        *,
        batch_sizes: list[int] | None = None,
        reverse: bool = False,
        algorithm: str = "auto",
        reset: Any = None,
        reset_to: str = "zeros",
    ) -> Outputs:
        tensors, how = (input, h0, c0, weight_ih, weight_hh), (batch_sizes, reverse, algorithm)
        if reset is not None and (reset_to == "initial" or (_portable.in_use and input.is_cuda)):
            return run_as_cell(name, *tensors, one_bias(bias, bias_hh), reset, *how, reset_to)
        if reset is not None:
            reset = reset_for_op(name, reset, input)
        call = transformed if has_tangents() else op
        return call(*tensors, bias, *how, reset, bias_hh)

    def transformed(
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
    ) -> Outputs:
        tensors, how = (input, h0, c0, weight_ih, weight_hh, bias), (batch_sizes, reverse, algorithm, reset)
        return function.apply(*tensors, *how, bias_hh)[:3]

    under_transforms(name, transformed)
    backward = f"{name}_backward"
    torch.library.register_vmap(f"lltm_ext::{backward}", vmap_loop(getattr(ops, backward)))
    return run


def run_as_cell(
    name: str,
    input: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    reset: Tensor,
    batch_sizes: list[int] | None,
    reverse: bool,
    algorithm: str,
    reset_to: str,
) -> Outputs:
    """The op as a cell of the same formula, for the resets that the op itself does not take."""
    from lltm_ext import cells
    from lltm_ext.recurrence import run

    weights, how = (weight_ih, weight_hh, bias), (batch_sizes, reverse, algorithm)
    cell = getattr(cells, name)
    output, (h_n, c_n) = run(cell, input, [h0, c0], *weights, [], [], reset, *how, reset_to=reset_to)
    return output, h_n, c_n


def both_directions(name: str, sequence: Callable[..., Outputs]) -> Callable[..., list[Outputs]]:
    """The op ``lltm_ext::<name>_bidirectional``, two ``sequence`` calls in one: forward and in reverse.

    They run side by side if the GPU has room for both. Under transforms and with tangents there are
    two calls.
    """
    both = f"{name}_bidirectional"
    op = getattr(ops, both)

    def apart(
        input: Tensor,
        forward: Sequence[Tensor | None],
        reverse: Sequence[Tensor | None],
        batch_sizes: list[int] | None = None,
        algorithm: str = "auto",
    ) -> list[Outputs]:
        how: dict[str, Any] = {"batch_sizes": batch_sizes, "algorithm": algorithm}
        return [sequence(input, *forward, **how), sequence(input, *reverse, reverse=True, **how)]

    def run(
        input: Tensor, forward: Direction, reverse: Direction, batch_sizes: list[int] | None = None
    ) -> list[Outputs]:
        if has_tangents():
            return apart(input, forward, reverse, batch_sizes)
        given = ([x for x in direction if x is not None] for direction in (forward, reverse))
        outputs = op(input, *given, batch_sizes)
        return [tuple(outputs[:3]), tuple(outputs[3:])]

    def transformed(
        input: Tensor, forward: Sequence[Tensor], reverse: Sequence[Tensor], *how: Any
    ) -> list[Tensor]:
        directions = [(*direction, None)[:5] for direction in (forward, reverse)]
        return [x for outputs in apart(input, directions[0], directions[1], *how) for x in outputs]

    def transformed_backward(
        grads: Sequence[Tensor | None],
        input: Tensor,
        forward: Sequence[Tensor],
        reverse: Sequence[Tensor],
        saved: Sequence[Tensor],
        batch_sizes: list[int] | None,
        *how: Any,
    ) -> list[Tensor | None]:
        backward_op, of_directions = getattr(ops, f"{name}_backward"), []
        for i, direction in enumerate((forward, reverse)):
            own = slice(3 * i, 3 * i + 3)
            given = (*grads[own], input, *direction[:4], *saved[own])
            of_directions.append(backward_op(*given, batch_sizes, i == 1, *how))
        (first, *of_forward), (second, *of_reverse) = of_directions
        return [first + second, *of_forward, *of_reverse]

    under_transforms(both, transformed)
    under_transforms(f"{both}_backward", transformed_backward)
    # is_grads_batched=True of torch.autograd has a vmap of its own, which knows no ops of lists.
    implement(f"{both}_backward", transformed_backward, "Batched")
    return run


def check_step_input(name: str, argument: str, x: Any, input: Tensor, hidden: int) -> None:
    check_tensor(name, argument, x)
    if x.device != input.device:
        raise RuntimeError(f"{name}: expected {argument} on {input.device}, got {x.device}")
    if x.layout != torch.strided:
        raise RuntimeError(f"{name}: expected {argument} of layout torch.strided, got {x.layout}")
    if x.is_complex():
        raise TypeError(f"{name}: expected {argument} of a real dtype, got {dtype_name(x.dtype)}")
    rows, meaning = input.shape[:-1], "[length, batch]" if input.dim() == 3 else "[rows of all steps]"
    expected, wide = f"{meaning} = {list(rows)}", x.shape == (*rows, hidden)
    if argument != "reset":
        expected += f" or, for each unit, {[*rows, hidden]}"
    if x.shape != rows and not (wide and argument != "reset"):
        raise RuntimeError(f"{name}: expected {argument} of shape {expected}, got {list(x.shape)}")
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name}: expected {argument} without a gradient, which no input of a step has, got one that "
            f"requires it ({argument}.detach() does not)"
        )


def check_reset_to(name: str, reset_to: Any) -> None:
    if reset_to not in ("zeros", "initial"):
        raise ValueError(f"{name}: expected reset_to to be 'zeros' or 'initial', got {reset_to!r}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def reset_for_op(name: str, reset: Any, input: Tensor) -> Tensor:
    """``reset`` as the dispatcher's ops take it."""
    if isinstance(reset, Tensor) and reset.dtype == torch.bool and reset.layout == torch.strided:
        return reset  # the op checks the rest
    check_step_input(name, "reset", reset, input, 0)
    if reset.dtype == torch.bool:
        return reset
    return reset.to(torch.float64 if input.dtype == torch.float64 else torch.float32)


def check_sequence(
    name: str, input: Any, hx: Any, weight_ih: Any, weight_hh: Any, bias: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The arguments of a sequence, all tensors, as the dispatcher takes them."""
    h0, c0 = check_pair(name, hx)
    check_tensor(name, "input", input)
    check_tensor(name, "weight_ih", weight_ih)
    check_tensor(name, "weight_hh", weight_hh)
    if bias is not None:
        check_tensor(name, "bias", bias)
    return input, h0, c0, weight_ih, weight_hh, bias


def check_states(name: str, hx: Any, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    """hx as a tuple of tensors with these names. A caller gives a single state as a tensor."""
    is_tuple = isinstance(hx, (tuple, list))
    if len(names) == 1 and isinstance(hx, Tensor):
        return (hx,)
    if len(names) == 1 or not is_tuple or len(hx) != len(names):
        got = f"{type(hx).__name__} of {len(hx)}" if is_tuple else type(hx).__name__
        if len(names) == 1:
            raise TypeError(f"{name}: expected hx to be a Tensor, {names[0]}, got {got}")
        kind = "pair" if len(names) == 2 else "tuple"
        raise WrongStates(f"{name}: expected hx to be a {kind} ({', '.join(names)}), got {got}")
    for i, state in enumerate(hx):
        if not isinstance(state, Tensor):
            check_tensor(name, names[i], state)
    return tuple(hx)


def check_pair(name: str, hx: Any) -> State:
    """hx as (h0, c0)."""
    h0, c0 = check_states(name, hx, PAIR)
    return h0, c0


def check_hx(name: str, hx: Any, shape: tuple[int, ...], names: tuple[str, ...] = PAIR) -> tuple[Tensor, ...]:
    """hx as a tuple of tensors with these names, all of this shape."""
    states = check_states(name, hx, names)
    for argument, state in zip(names, states, strict=True):
        if state.shape != shape:
            raise RuntimeError(f"{name}: expected {argument} of shape {list(shape)}, got {list(state.shape)}")
    return states


def _stack(states: Sequence[Tensor], is_fresh: bool) -> Tensor:
    """[S, B, H] of S tensors [B, H], without a copy of a single one.

    The result is no view of another tensor for autograd, because a view cannot be detached in place
    (``h_n.detach_()``). A state that nothing else refers to, ``is_fresh``, is reshaped itself, which takes
    less time.
    """
    if len(states) > 1:
        return torch.stack(list(states))
    state = states[0]
    return state.unsqueeze_(0) if is_fresh else unsafe_view(state, (1, *state.shape))


class Steps(NamedTuple):
    """What the steps of a call take except its input: [T, B] or [T, B, H], or packed rows [N] or [N, H]."""

    inputs: list[Tensor]  # in the cell's order
    resets: tuple[Tensor | None, Tensor | None] = (None, None)  # of the two directions
    reset_to: str = "zeros"


NO_STEPS = Steps([])


class SequenceLayer(nn.Module):
    """A layer with the options and the call of nn.LSTM. Its class gives the op and the parameters.

    hx and the final states are a tensor for a cell with one state, else a tuple.
    """

    input_size: int
    hidden_size: int
    num_layers: int
    batch_first: bool
    dropout: float
    bidirectional: bool

    _op: SequenceOp
    _returns_fresh_states = True  # whether nothing else refers to the final states that _run_layer returns

    @property
    def _state_names(self) -> tuple[str, ...]:
        return PAIR

    def _parameters_of(self, layer: int, direction: int) -> tuple[Tensor | None, ...]:
        """(weight_ih, weight_hh, bias)"""
        raise NotImplementedError

    def _own_parameters_of(self, layer: int, direction: int) -> Sequence[Tensor | None]:
        """The same, or the two biases whose sum that is."""
        return self._parameters_of(layer, direction)

    def _check_input(self, input: Tensor, dims: tuple[int, ...]) -> None:
        """Raises for an input with another number of dimensions, or of another input_size."""
        raise NotImplementedError

    def _run_layer(
        self,
        layer: int,
        input: Tensor,
        states: list[tuple[Tensor | None, ...]],
        batch_sizes: list[int] | None,
        steps: Steps,
    ) -> Sequence[tuple[Tensor, ...]]:
        """(output, *states) of each direction. ``states`` are its initial ones, None for zeros."""
        if self.bidirectional and steps.resets[0] is None:
            parameters = [self._parameters_of(layer, i) for i in range(2)]
            if states[0][0] is None:
                zeros = zero_state(input, self.hidden_size, batch_sizes)
                states = [(zeros, zeros)] * 2
            directions = [(*states[i], *parameters[i]) for i in range(2)]
            return self._op.run_both(input, *directions, batch_sizes)
        return [
            self._op.run(
                input,
                *states[i],
                *self._own_parameters_of(layer, i),
                batch_sizes=batch_sizes,
                reverse=i == 1,
                reset=steps.resets[i],
                reset_to=steps.reset_to,
            )
            for i in range(self._directions)
        ]

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Any = None,
        *,
        reset: Tensor | PackedSequence | None = None,
        reset_to: str = "zeros",
    ) -> tuple[Tensor | PackedSequence, Any]:
        return self._forward(input, hx, self._steps(input, reset, reset_to, {}))

    def _steps(self, input: Any, reset: Any, reset_to: str, inputs: dict[str, Any]) -> Steps:
        return Steps([], self._resets(input, reset), reset_to)

    def _resets(self, input: Any, reset: Any) -> tuple[Tensor | None, Tensor | None]:
        """Those of the two directions, in the order of the steps."""
        if reset is None:
            return None, None
        reset = self._step_input("reset", reset, input)
        sizes = input.batch_sizes.tolist() if isinstance(input, PackedSequence) else None
        # In reverse an episode that starts at step t + 1 has no influence on step t.
        return reset, at_next_step(reset, sizes) if self.bidirectional else None

    def _step_input(self, name: str, value: Any, input: Any) -> Tensor:
        """An input of the steps in the order of the steps, from the layout of ``input``."""
        if isinstance(input, PackedSequence):
            return self._packed_step_input(name, value, input)
        check_tensor(self._name, "input", input)
        check_tensor(self._name, name, value)
        rows = input.shape[:-1]
        if value.shape[: len(rows)] != rows:
            raise RuntimeError(
                f"{self._name}: expected {name} of shape {list(rows)}, as the input has, or for each unit "
                f"{[*rows, self.hidden_size]}, got {list(value.shape)}"
            )
        if len(rows) == 1:
            return value.unsqueeze(1)
        return value.transpose(0, 1) if self.batch_first else value

    def _packed_step_input(self, name: str, value: Any, input: PackedSequence) -> Tensor:
        if not isinstance(value, PackedSequence):
            got = type(value).__name__
            raise TypeError(f"{self._name}: expected {name} to be a PackedSequence as input is, got {got}")
        order, others = input.sorted_indices, value.sorted_indices
        same_order = order is others if order is None or others is None else torch.equal(order, others)
        if not torch.equal(input.batch_sizes, value.batch_sizes) or not same_order:
            raise RuntimeError(f"{self._name}: expected {name} packed with the lengths of input, got others")
        return value.data

    def _forward(
        self, input: Tensor | PackedSequence, hx: Any, steps: Steps
    ) -> tuple[Tensor | PackedSequence, Any]:
        check_reset_to(self._name, steps.reset_to)
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx, steps)
        check_tensor(self._name, "input", input)
        self._check_input(input, dims=(2, 3))
        is_batched, batch_dim = input.dim() == 3, 0 if self.batch_first else 1
        if not is_batched:
            input, hx = input.unsqueeze(batch_dim), self._of_one_row(hx)
        batch = input.shape[batch_dim]
        states = self._check_hx(input, hx, batch)
        if self.batch_first:
            input = input.transpose(0, 1)
        output, final = self._run(input, states, batch, None, steps)
        if self.batch_first:
            output = output.transpose(0, 1)
        if not is_batched:
            output, final = output.squeeze(batch_dim), [x.squeeze_(1) for x in final]
        return output, self._permuted(self._as_hx(final), None)

    def _forward_packed(self, input: PackedSequence, hx: Any, steps: Steps) -> tuple[PackedSequence, Any]:
        data, batch_sizes, sorted_indices, unsorted_indices = input
        self._check_input(data, dims=(2,))
        sizes = batch_sizes.tolist()
        states = self._check_hx(data, hx, sizes[0], batch_sizes, sorted_indices)
        output, final = self._run(data, states, sizes[0], sizes, steps)
        found = PackedSequence(output, batch_sizes, sorted_indices, unsorted_indices)
        return found, self._permuted(self._as_hx(final), unsorted_indices)

    def _check_hx(
        self,
        input: Tensor,
        hx: Any,
        batch: int,
        batch_sizes: Tensor | None = None,
        order: Tensor | None = None,
    ) -> tuple[Tensor, ...] | None:
        """The states of hx, [L*D, B, H] each, their rows in this order; None for None.

        ``input`` is in the caller's layout.
        """
        if hx is None:
            return None
        shape = (self._slices, batch, self.hidden_size)
        states = check_hx(self._name, hx, shape, self._state_names)
        return self._as_states(self._permuted(self._as_hx(states), order))

    def _of_one_row(self, hx: Any) -> Any:
        """The hx of an unbatched input, as that of a batch of 1."""
        if hx is None:
            return None
        states = check_states(self._name, hx, self._state_names)
        for argument, state in zip(self._state_names, states, strict=True):
            if state.dim() != 2:
                expected = [self._slices, self.hidden_size]
                raise RuntimeError(
                    f"{self._name}: expected {argument} of shape {expected}, got {list(state.shape)}"
                )
        return self._as_hx([x.unsqueeze(1) for x in states])

    def _permuted(self, hx: Any, order: Tensor | None) -> Any:
        """hx with its rows in this order."""
        if order is None:
            return hx
        return self._as_hx([x.index_select(1, order) for x in self._as_states(hx)])

    def _as_hx(self, states: Sequence[Tensor]) -> Any:
        return states[0] if len(states) == 1 else tuple(states)

    def _as_states(self, hx: Any) -> tuple[Tensor, ...]:
        return (hx,) if isinstance(hx, Tensor) else tuple(hx)

    def _run(
        self,
        input: Tensor,
        states: Sequence[Tensor] | None,
        batch: int,
        batch_sizes: list[int] | None,
        steps: Steps,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """All layers and directions over [T, B, I], or over packed rows [N, I] with their ``batch_sizes``.

        Without ``states`` they start from zeros.
        """
        is_fresh = self._returns_fresh_states and steps.resets[0] is None
        initial: list[tuple[Tensor | None, ...]]
        if states is None:
            initial = [(None,) * len(self._state_names)] * self._slices
        else:
            initial = [tuple([x[i] for x in states]) for i in range(self._slices)]
        if self._slices == 1:  # most calls, and the loop takes some microseconds
            ((output, *last),) = self._run_layer(0, input, initial, batch_sizes, steps)
            return output, [_stack((state,), is_fresh) for state in last]
        final: list[tuple[Tensor, ...]] = []  # the states of each layer and direction
        for layer in range(self.num_layers):
            of_layer = initial[len(final) : len(final) + self._directions]
            found = self._run_layer(layer, input, of_layer, batch_sizes, steps)
            input = torch.cat([y[0] for y in found], dim=-1) if self.bidirectional else found[0][0]
            final += [y[1:] for y in found]
            if self.dropout > 0 and layer < self.num_layers - 1:
                input = F.dropout(input, self.dropout, self.training)
        return input, [_stack(slices, is_fresh) for slices in zip(*final, strict=True)]

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def _slices(self) -> int:
        return self.num_layers * self._directions


class CellLayer(SequenceLayer):
    """A layer that declares its parameters itself, one bias a gate, from the number of the op's gates."""

    bias: bool

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(self._name, input_size=input_size, hidden_size=hidden_size, num_layers=num_layers)
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
            raise ValueError(f"{self._name}: expected dropout to be a probability in [0, 1], got {dropout!r}")
        if dropout > 0 and num_layers == 1:
            warnings.warn(
                f"{self._name}: dropout acts on the output of every layer but the last, so it does nothing "
                f"with num_layers=1, got dropout={dropout}",
                stacklevel=2,
            )
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.bidirectional = bias, batch_first, bidirectional
        self.dropout = float(dropout)
        for layer in range(num_layers):
            layer_input = input_size if layer == 0 else hidden_size * self._directions
            for suffix in ("", "_reverse")[: self._directions]:
                for name, shape in self._shapes(layer_input).items():
                    parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                    self.register_parameter(f"{name}_l{layer}{suffix}", parameter)
        self.reset_parameters()

    def _shapes(self, layer_input: int) -> dict[str, tuple[int, ...]]:
        """The parameters of one layer and direction, in their order."""
        rows = self._op.gates * self.hidden_size
        shapes = {"weight_ih": (rows, layer_input), "weight_hh": (rows, self.hidden_size), "bias": (rows,)}
        return shapes if self.bias else {name: shapes[name] for name in ("weight_ih", "weight_hh")}

    def reset_parameters(self) -> None:
        """Draws all parameters from U(-1/sqrt(H), 1/sqrt(H)), as nn.LSTM does."""
        init_uniform(self, self.hidden_size)

    def _parameters_of(self, layer: int, direction: int) -> tuple[Tensor | None, ...]:
        end = f"_l{layer}{('', '_reverse')[direction]}"
        return (
            getattr(self, "weight_ih" + end),
            getattr(self, "weight_hh" + end),
            getattr(self, "bias" + end) if self.bias else None,
        )

    def _check_input(self, input: Tensor, dims: tuple[int, ...]) -> None:
        if input.dim() not in dims or input.shape[-1] != self.input_size:
            layout = "[batch, length, input_size]" if self.batch_first else "[length, batch, input_size]"
            raise RuntimeError(
                f"{self._name}: expected input of shape {layout} or [length, input_size] with "
                f"input_size = {self.input_size}, got {list(input.shape)}"
            )

    def extra_repr(self) -> str:
        names = ("num_layers", "bias", "batch_first", "dropout", "bidirectional")
        defaults = CellLayer.__init__.__defaults__ or ()  # of these, in this order, and then of others
        options = (
            (name, getattr(self, name), default) for name, default in zip(names, defaults, strict=False)
        )
        changed = [f"{name}={value}" for name, value, default in options if value != default]
        return ", ".join([str(self.input_size), str(self.hidden_size), *changed])


class TorchLayer(SequenceLayer):
    """A layer that is one of torch's too.

    Torch's class declares the parameters and serves the calls of :meth:`_is_for_torch`.
    """

    bias: bool
    proj_size: int
    _torch_class: type[nn.RNNBase]
    _flat_weights: list[Any]  # of all layers and directions, in the order of _flat_weights_names
    _flat_weights_names: list[str]
    _flat_weight_refs: list[Any]
    _has_expanded_weights = False  # those of torch.nn.utils' call_for_per_sample_grads

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Any = None,
        reset: Tensor | PackedSequence | None = None,  # positional: torch.onnx passes defaults by position
        reset_to: str = "zeros",
    ) -> tuple[Tensor | PackedSequence, Any]:
        return self._call(input, hx, reset, reset_to)

    def _call(self, input: Any, hx: Any, reset: Any, reset_to: str) -> Any:
        if not isinstance(input, (Tensor, PackedSequence)) and self._is_symbolic(input):
            return self._as_leaf(input, hx, reset, reset_to)
        self._update_flat_weights()
        if self._is_for_torch(input):
            if reset is None:
                return super(SequenceLayer, self).forward(input, hx)
            if self.proj_size > 0:
                got = type(reset).__name__
                raise ValueError(
                    f"{self._name}: expected reset to be None with a proj_size, for which torch's own "
                    f"{self._name} runs, got {got}"
                )
        is_plain = reset is None and reset_to == "zeros"
        return self._forward(input, hx, NO_STEPS if is_plain else self._steps(input, reset, reset_to, {}))

    def _is_for_torch(self, input: Any) -> bool:
        """Whether torch's own forward serves a call. The one place that decides it."""
        return (
            self.proj_size > 0
            or tracing_state() is not None  # torch.jit.trace would record numbers that depend on the lengths
            or self._has_expanded_weights
            or self._flat_weights[0].is_complex()
            or (type(input) is not Tensor and torch.onnx.is_in_onnx_export())
        )

    def _is_symbolic(self, input: Any) -> bool:
        from torch.fx import Proxy  # which takes long to import

        return isinstance(input, Proxy) and getattr(input.tracer, "root", None) is not self

    def _as_leaf(self, input: Any, hx: Any, reset: Any, reset_to: str) -> Any:
        """A call in a graph of torch.fx, which does not trace through torch's modules either."""
        named = {} if reset is None else {"reset": reset, "reset_to": reset_to}
        name = input.tracer.path_of_module(self)
        return input.tracer.create_proxy("call_module", name, (input, hx), named)

    def _update_flat_weights(self) -> None:
        """As torch's does, but in less time, and without a copy to where cuDNN looks for them."""
        own = map(self._parameters.get, self._flat_weights_names)
        if all(map(is_, own, self._flat_weights)):
            return
        weights = [getattr(self, name, None) for name in self._flat_weights_names]
        known = zip(weights, self._flat_weight_refs, strict=True)
        if any(w is not None and ref is not None and ref() is not w for w, ref in known):
            self._flat_weights = weights
            self._flat_weight_refs = [None if w is None else weakref.ref(w) for w in weights]
            self._has_expanded_weights = any(type(w).__name__ == "ExpandedWeight" for w in weights)

    def _own_parameters_of(self, layer: int, direction: int) -> list[Any]:
        """weight_ih, weight_hh and, if the layer has them, bias_ih and bias_hh."""
        number = 4 if self.bias else 2
        first = (layer * self._directions + direction) * number
        return self._flat_weights[first : first + number]

    def _parameters_of(self, layer: int, direction: int) -> tuple[Tensor | None, ...]:
        weight_ih, weight_hh, *biases = self._own_parameters_of(layer, direction)
        return weight_ih, weight_hh, sum_of_biases(*biases) if biases else None

    def _check_input(self, input: Tensor, dims: tuple[int, ...]) -> None:
        if input.dim() not in dims:
            raise ValueError(f"{self._name}: expected input of 2 or 3 dimensions, got {list(input.shape)}")

    def _check_hx(
        self,
        input: Tensor,
        hx: Any,
        batch: int,
        batch_sizes: Tensor | None = None,
        order: Tensor | None = None,
    ) -> tuple[Tensor, ...] | None:
        if hx is not None:
            self.check_forward_args(input, hx, batch_sizes)
            return self._as_states(self._permuted(hx, order))
        if getattr(self.check_forward_args, "__func__", None) is TorchLayer.check_forward_args:
            self.check_input(input, batch_sizes)
            return None
        zeros = input.new_zeros((self._slices, batch, self.hidden_size))
        hx = self._as_hx([zeros for _ in self._state_names])
        self.check_forward_args(input, hx, batch_sizes)
        return self._as_states(hx)

    def check_input(self, input: Tensor, batch_sizes: Tensor | None) -> None:
        if input.shape[-1] != self.input_size:
            raise RuntimeError(
                f"{self._name}: expected input of input_size = {self.input_size} features, "
                f"got {list(input.shape)}"
            )
        weight = self._flat_weights[0]
        if input.dtype != weight.dtype and not torch._C._is_any_autocast_enabled():
            raise WrongDtype(
                f"{self._name}: expected input of dtype {dtype_name(weight.dtype)}, as the weights have, "
                f"got {dtype_name(input.dtype)}"
            )

    def check_forward_args(self, input: Tensor, hidden: Any, batch_sizes: Tensor | None) -> None:
        """Torch's hook for all checks of a call, which subclasses may override."""
        self.check_input(input, batch_sizes)
        batch = input.shape[0 if self.batch_first else 1] if batch_sizes is None else int(batch_sizes[0])
        shape, dtype = (self._slices, batch, self.proj_size or self.hidden_size), input.dtype
        states = check_states(self._name, hidden, self._state_names)
        for i, state in enumerate(states):
            if state.shape != shape:
                raise RuntimeError(
                    f"{self._name}: expected {self._state_names[i]} of shape {list(shape)}, "
                    f"got {list(state.shape)}"
                )
            if state.dtype != dtype:
                self._check_state_dtype(self._state_names[i], state, input)
            if self.proj_size > 0:  # which h has, but not c
                shape = (*shape[:2], self.hidden_size)

    def _check_state_dtype(self, argument: str, state: Tensor, input: Tensor) -> None:
        is_wide = argument != "h0" and state.dtype == torch.float32 and input.dtype != torch.float64
        if not is_wide and not torch._C._is_any_autocast_enabled():
            raise WrongStates(
                f"{self._name}: expected {argument} of dtype {dtype_name(input.dtype)}, "
                f"got {dtype_name(state.dtype)}"
            )

    def _permuted(self, hx: Any, order: Tensor | None) -> Any:
        # Torch's hook, which subclasses may override.
        return self.permute_hidden(hx, order)  # type: ignore[operator]

    def __prepare_scriptable__(self) -> nn.Module:
        """torch.jit.script's hook: torch's layer with the same parameters."""
        if type(self).forward is not TorchLayer.forward:
            return self
        layer = copy.copy(self)
        layer.__class__ = self._torch_class  # type: ignore[assignment]
        return layer


def leave_to_eager(function: Callable[..., Any]) -> None:
    """Makes torch.compile call a function as it is, between two graphs, as it calls torch's layers.

    Only with ``torch._dynamo.config.allow_rnn`` does it trace a layer's ``forward``, and this call in it. A
    torch without this private function traces all calls, which is slower.
    """
    eval_frame = torch._C._dynamo.eval_frame
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


leave_to_eager(TorchLayer._call)


def sum_of_biases(bias_ih: Tensor, bias_hh: Tensor) -> Tensor:
    """``bias_ih + bias_hh``, whose gradients have memory of their own.

    Those of torch's sum share it: a gradient that is scaled in place would change the other one too. A
    difference is slower, but has the rules of all transforms.
    """
    if _portable.in_use or torch.compiler.is_compiling() or transforms_active() or has_tangents():
        return torch.sub(bias_ih, bias_hh, alpha=-1)
    return ops.sum_of_biases(bias_ih, bias_hh)


def one_bias(bias: Tensor | None, bias_hh: Tensor | None) -> Tensor | None:
    """What a bias and, if there is one, a second one add to the gates."""
    return bias if bias_hh is None else sum_of_biases(bias, bias_hh)  # type: ignore[arg-type]


def at_next_step(reset: Tensor, batch_sizes: list[int] | None, is_reverse: bool = False) -> Tensor:
    """The reset of each row's next step in the order of computation; zeros at its last step."""
    if batch_sizes is None:
        zeros = torch.zeros_like(reset[:1])
        return torch.cat([zeros, reset[:-1]] if is_reverse else [reset[1:], zeros])
    none = reset[:0]
    around = (none, *reset.split(batch_sizes), none)
    following = around[:-2] if is_reverse else around[2:]
    zeros = torch.zeros_like(reset[: max(batch_sizes, default=0)])
    parts = [(y[:n], zeros[len(y) : n]) for n, y in zip(batch_sizes, following, strict=True)]
    return torch.cat([none, *(part for pair in parts for part in pair)])


def check_sizes(name: str, **sizes: int) -> None:
    for argument, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{name}: expected {argument} to be an int, got {type(size).__name__}")
        if size <= 0:
            raise ValueError(f"{name}: expected {argument} to be positive, got {size}")
        if size >= 2**31:
            raise ValueError(f"{name}: expected {argument} to be below 2^31, got {size}")


def init_uniform(module: nn.Module, hidden_size: int) -> None:
    bound = 1 / math.sqrt(hidden_size)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -bound, bound)
