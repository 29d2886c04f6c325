"""The arguments of calls of recurrent cells: checks, and what is made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lltm_ext import _portable
from lltm_ext._library import WrongStates, check_tensor, is_plain, ops

State = tuple[Tensor, Tensor]
PAIR = ("h0", "c0")  # the names of the states of an LSTM


class SequenceCall(NamedTuple):
    """The arguments of a call that runs a cell over a sequence in one direction.

    Attributes:
        input: [T, B, I]; with ``batch_sizes`` [N, I], the rows of all steps, as in a PackedSequence. The same
            holds for ``inputs`` and ``reset``. Without weight_ih I is G*H.
        states: h0 and the other states, each [B, H], a single other one also [1, B, H] as a layer has it; all
            may be None for zeros.
        weight_ih, weight_hh, bias: [G*H, I] or None; [R*H, H], or [R*H, H/heads], or None; [G*H] or None. R
            is the number of the cell's ``recurrent_gates``.
        parameters, inputs: in the cell's order; parameters [H] each, or together [P * H].
        reset: [T, B] or None. A reset precedes its step in the order of computation.
        is_reverse: whether the last step is the first to be computed.
        bias_hh: a second bias, as nn.LSTM has it, or None.
    """

    input: Any
    states: Sequence[Any]
    weight_ih: Any
    weight_hh: Any
    bias: Any = None
    parameters: Sequence[Any] | Tensor = ()
    inputs: Sequence[Any] = ()
    reset: Any = None
    batch_sizes: list[int] | None = None
    is_reverse: bool = False
    bias_hh: Any = None


def units_of(input: Tensor, weight_ih: Tensor | None, gates: int) -> int:
    """H of a call that gives no states."""
    return (input.shape[-1] if weight_ih is None else weight_ih.shape[0]) // gates


def hidden_of(call: SequenceCall, gates: int) -> int:
    """H of a call."""
    h0 = call.states[0]
    hidden: int = units_of(call.input, call.weight_ih, gates) if h0 is None else h0.shape[-1]
    return hidden


def check_step_input(
    name: str, argument: str, x: Any, input: Tensor, hidden: int, differentiable: bool = False
) -> None:
    check_tensor(name, argument, x)
    if x.device != input.device:
        raise RuntimeError(f"{name}: expected {argument} on {input.device}, got {x.device}")
    if x.layout != torch.strided:
        raise RuntimeError(f"{name}: expected {argument} of layout torch.strided, got {x.layout}")
    if x.is_complex():
        raise TypeError(f"{name}: expected {argument} of a real dtype, got {dtype_name(x.dtype)}")
    rows, is_reset = input.shape[:-1], argument == "reset"
    if x.shape != rows and (is_reset or x.shape != (*rows, hidden)):
        meaning = "[length, batch]" if input.dim() == 3 else "[rows of all steps]"
        wide = "" if is_reset else f" or, for each unit, {[*rows, hidden]}"
        raise RuntimeError(
            f"{name}: expected {argument} of shape {meaning} = {list(rows)}{wide}, got {list(x.shape)}"
        )
    if x.requires_grad and not differentiable and torch.is_grad_enabled():
        what = "reset" if is_reset else "input of a step of a cell given as text"
        raise RuntimeError(
            f"{name}: expected {argument} without a gradient, which no {what} has, got one that requires it "
            f"({argument}.detach() does not)"
        )


def check_no_input(name: str, cell: str, input: Any) -> None:
    """Raises for an input of a cell without gates."""
    if input is not None:
        got = type(input).__name__
        raise TypeError(f"{name}: expected input to be None, because {cell} has no gates, got {got}")


def check_reset_to(name: str, reset_to: Any) -> None:
    if reset_to not in ("zeros", "initial"):
        raise ValueError(f"{name}: expected reset_to to be 'zeros' or 'initial', got {reset_to!r}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_tensors(name: str, input: Any, weight_ih: Any, weight_hh: Any, bias: Any) -> None:
    check_tensor(name, "input", input)
    check_tensor(name, "weight_hh", weight_hh)
    for argument, x in (("weight_ih", weight_ih), ("bias", bias)):
        if x is not None:
            check_tensor(name, argument, x)


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


def check_hx(name: str, hx: Any, shape: tuple[int, ...], names: tuple[str, ...] = PAIR) -> tuple[Tensor, ...]:
    """hx as a tuple of tensors with these names, all of this shape."""
    states = check_states(name, hx, names)
    for argument, state in zip(names, states, strict=True):
        if state.shape != shape:
            raise RuntimeError(f"{name}: expected {argument} of shape {list(shape)}, got {list(state.shape)}")
    return states


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


def sum_of_biases(bias_ih: Tensor, bias_hh: Tensor) -> Tensor:
    """Returns ``bias_ih + bias_hh``, whose gradients have their own memory.

    Those of torch's sum share theirs: a gradient that is scaled in place would change the other one too. A
    difference is slower, but has the rules of all transforms.
    """
    if _portable.in_use or not is_plain(bias_ih, bias_hh):
        return torch.sub(bias_ih, bias_hh, alpha=-1)
    return ops.sum_of_biases(bias_ih, bias_hh)


def one_bias(bias: Tensor | None, bias_hh: Tensor | None) -> Tensor | None:
    """What a bias and, if there is one, a second one add to the gates."""
    return bias if bias_hh is None else sum_of_biases(bias, bias_hh)  # type: ignore[arg-type]


def at_next_step(reset: Tensor, batch_sizes: list[int] | None) -> Tensor:
    """The reset of each row's next step in time; zeros at its last step."""
    if batch_sizes is None:
        zeros = torch.zeros_like(reset[:1])
        return torch.cat([reset[1:], zeros])
    none = reset[:0]
    following = (*reset.split(batch_sizes)[1:], none)
    zeros = torch.zeros_like(reset[: max(batch_sizes, default=0)])
    parts = [(y[:n], zeros[len(y) : n]) for n, y in zip(batch_sizes, following, strict=True)]
    return torch.cat([none, *(part for pair in parts for part in pair)])
