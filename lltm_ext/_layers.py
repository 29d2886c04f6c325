"""Layers of recurrent cells with the options and the call of nn.LSTM.

There are three kinds: :class:`SequenceLayer` runs them; :class:`CellLayer` declares its parameters itself;
:class:`TorchLayer` is one of torch's layers too.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lltm_ext._arguments import (
    SequenceCall,
    at_next_step,
    check_hx,
    check_reset_to,
    check_sizes,
    check_states,
    dtype_name,
    init_uniform,
)
from lltm_ext._custom_cell import tracing_state as tracing_state
from lltm_ext._custom_cell import unsafe_view
from lltm_ext._library import WrongDtype, WrongStates, check_tensor
from lltm_ext._scripting import scriptable_layer
from lltm_ext.recurrence import RecurrentCell, run, run_both


def _stack(states: Sequence[Tensor], is_fresh: bool) -> Tensor:
    """Stacks S tensors [B, H] to [S, B, H], without a copy of a single one.

    The result is no view of another tensor for autograd, because a view cannot be detached in place
    (``h_n.detach_()``). A state that nothing else refers to, ``is_fresh``, is reshaped itself, which takes
    less time.
    """
    if len(states) > 1:
        return torch.stack(list(states))
    state = states[0]
    if is_fresh:
        return state.unsqueeze_(0)
    if tracing_state() is not None:  # it would record the sizes of the example
        return state.unsqueeze(0)
    return unsafe_view(state, (1, *state.shape))


class Steps(NamedTuple):
    """What the steps of a call take except its input: [T, B] or [T, B, H], or packed rows [N] or [N, H]."""

    inputs: list[Tensor]  # in the cell's order
    resets: tuple[Tensor | None, Tensor | None] = (None, None)  # forward, and in reverse
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

    _cell: RecurrentCell  # torch's layers have no attribute `cell`, so their subclasses may
    _is_reverse: bool = False  # whether a single direction starts at the last step
    _permutes: bool = False  # whether a subclass must see each permutation of states, even None

    def _weights_of(self, layer: int, direction: int) -> tuple[Any, ...]:
        """What a call of the cell takes: (weight_ih, weight_hh, bias, bias_hh, parameters)."""
        raise NotImplementedError

    def _check_input(self, input: Tensor, dims: tuple[int, ...]) -> None:
        """Raises for an input with another number of dimensions, or of another input_size."""
        raise NotImplementedError

    def _call_of(
        self,
        layer: int,
        direction: int,
        input: Tensor,
        states: Sequence[Tensor | None],
        batch_sizes: list[int] | None,
        steps: Steps,
    ) -> SequenceCall:
        weight_ih, weight_hh, bias, bias_hh, parameters = self._weights_of(layer, direction)
        is_reverse = direction == 1 or self._is_reverse
        reset = steps.resets[1 if is_reverse else 0]
        of_steps = (steps.inputs, reset, batch_sizes, is_reverse)
        return SequenceCall(input, states, weight_ih, weight_hh, bias, parameters, *of_steps, bias_hh)

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Any = None,
        reset: Tensor | PackedSequence | None = None,  # positional: torch.onnx passes defaults by position
        reset_to: str = "zeros",
    ) -> tuple[Tensor | PackedSequence, Any]:
        is_plain = reset is None and reset_to == "zeros"
        return self._forward(input, hx, NO_STEPS if is_plain else self._steps(input, reset, reset_to))

    def _steps(self, input: Any, reset: Any, reset_to: str) -> Steps:
        check_reset_to(self._name, reset_to)
        return Steps([], self._resets(input, reset), reset_to)

    def _resets(self, input: Any, reset: Any) -> tuple[Tensor | None, Tensor | None]:
        """The resets for steps computed forward and in reverse, in the order of the steps."""
        if reset is None:
            return None, None
        reset = self._step_input("reset", reset, input)
        sizes = input.batch_sizes.tolist() if isinstance(input, PackedSequence) else None
        # In reverse an episode that starts at step t + 1 has no influence on step t.
        return reset, at_next_step(reset, sizes) if self.bidirectional or self._is_reverse else None

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
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx, steps)
        if not isinstance(input, Tensor) or input.is_nested:
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
        found = final[0] if len(final) == 1 else tuple(final)
        return output, self._permuted(found, None) if self._permutes else found

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
        """Returns the states of hx, [L*D, B, H] each, their rows in this order; None for None.

        ``input`` is in the caller's layout.
        """
        if hx is None:
            return None
        shape = (self._slices, batch, self.hidden_size)
        states = check_hx(self._name, hx, shape, self._cell.state_names)
        return states if order is None else self._as_states(self._permuted(self._as_hx(states), order))

    def _of_one_row(self, hx: Any) -> Any:
        """Turns the hx of an unbatched input into that of a batch of 1."""
        if hx is None:
            return None
        states = check_states(self._name, hx, self._cell.state_names)
        for argument, state in zip(self._cell.state_names, states, strict=True):
            if state.dim() != 2:
                expected = [self._slices, self.hidden_size]
                raise RuntimeError(
                    f"{self._name}: expected {argument} of shape {expected}, got {list(state.shape)}"
                )
        return self._as_hx([x.unsqueeze(1) for x in states])

    def _permuted(self, hx: Any, order: Tensor | None) -> Any:
        """Returns hx with its rows in this order."""
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
        """Runs all layers and directions over [T, B, I], or packed rows [N, I] with their ``batch_sizes``.

        Without ``states`` they start from zeros.
        """
        cell, reset_to = self._cell, steps.reset_to
        # The op's own results, which nothing else refers to, and not slices of one.
        is_fresh = len(cell.state_names) <= 2
        none: Sequence[Tensor | None] = (None,) * len(cell.state_names)
        if self.num_layers == 1 and not self.bidirectional:  # the general way takes some microseconds more
            given = none
            if states is not None:  # the op takes a single one besides h in a layer's shape too
                given = [states[0][0], states[1]] if len(states) == 2 else [x[0] for x in states]
            only = self._call_of(0, 0, input, given, batch_sizes, steps)
            output, last = run(cell, only, "auto", reset_to)
            return output, [x if x.dim() == 3 else _stack((x,), is_fresh) for x in last]
        final: list[Sequence[Tensor]] = []  # the states of each layer and direction

        def call(layer: int, direction: int) -> SequenceCall:
            given = none if states is None else [x[len(final) + direction] for x in states]
            return self._call_of(layer, direction, input, given, batch_sizes, steps)

        for layer in range(self.num_layers):
            if layer > 0 and self.dropout > 0:
                input = F.dropout(input, self.dropout, self.training)
            if self.bidirectional:
                both = [call(layer, 0), call(layer, 1)]
                (forward, of_forward), (reverse, of_reverse) = run_both(cell, both, reset_to)
                input = torch.cat([forward, reverse], dim=-1)
                final += [of_forward, of_reverse]
            else:
                input, last = run(cell, call(layer, 0), "auto", reset_to)
                final.append(last)
        return input, [_stack(slices, is_fresh) for slices in zip(*final, strict=True)]

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def _features(self) -> int:
        """Those of the output."""
        return self._directions * len(self._cell.declared.outputs) * self.hidden_size

    @property
    def _slices(self) -> int:
        return self.num_layers * self._directions


class CellLayer(SequenceLayer):
    """A layer that declares its own parameters, with one bias a gate, from the number of the op's gates."""

    bias: bool
    input_size: int | None  # type: ignore[assignment]  # None: the input is the product with weight_ih

    def __init__(
        self,
        input_size: int | None,
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
        if input_size is not None:
            check_sizes(self._name, input_size=input_size)
        check_sizes(self._name, hidden_size=hidden_size, num_layers=num_layers)
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
            layer_input = input_size if layer == 0 else self._features
            for suffix in ("", "_reverse")[: self._directions]:
                for name, shape in self._shapes(layer_input).items():
                    parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                    self.register_parameter(f"{name}_l{layer}{suffix}", parameter)
        self.reset_parameters()

    def _columns(self, weight: str) -> int:
        return self.hidden_size

    def _shapes(self, layer_input: int | None) -> dict[str, tuple[int, ...]]:
        """The parameters of one layer and direction, in their order."""
        rows, shapes = self._cell.gates * self.hidden_size, dict[str, tuple[int, ...]]()
        if layer_input is not None:
            shapes["weight_ih"] = (rows, layer_input)
        if self._cell.recurrent:
            own_rows = len(self._cell.recurrent_gates) * self.hidden_size
            shapes["weight_hh"] = (own_rows, self._columns("weight_hh"))
        if self.bias and rows > 0:
            shapes["bias"] = (rows,)
        return shapes

    def reset_parameters(self) -> None:
        """Draws all parameters from U(-1/sqrt(H), 1/sqrt(H)), as nn.LSTM does."""
        init_uniform(self, self.hidden_size)

    def _weights_of(self, layer: int, direction: int) -> tuple[Any, ...]:
        end = f"_l{layer}{('', '_reverse')[direction]}"
        weight_ih, weight_hh, bias = [
            self._parameter(name + end) for name in ("weight_ih", "weight_hh", "bias")
        ]
        return weight_ih, weight_hh, bias, None, ()

    def _parameter(self, name: str) -> Any:
        # nn.Module.__getattr__ takes a microsecond. It serves parametrizations and what is None.
        found = self._parameters.get(name)
        return getattr(self, name, None) if found is None else found

    def _check_input(self, input: Tensor, dims: tuple[int, ...]) -> None:
        gates, size = self._cell.gates, self.input_size
        features = gates * self.hidden_size if size is None else size
        if input.dim() not in dims or input.shape[-1] != features:
            name = f"{gates}*hidden_size" if size is None else "input_size"
            layout = f"[batch, length, {name}]" if self.batch_first else f"[length, batch, {name}]"
            raise RuntimeError(
                f"{self._name}: expected input of shape {layout} or [length, {name}] with "
                f"{name} = {features}, got {list(input.shape)}"
            )

    def __prepare_scriptable__(self) -> nn.Module:
        return scriptable_layer(self, CellLayer.forward)

    def extra_repr(self) -> str:
        names = ("num_layers", "bias", "batch_first", "dropout", "bidirectional")
        defaults = CellLayer.__init__.__defaults__ or ()  # these options come first, in this order
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
    _flat_weights: list[Any]  # those of _flat_weights_names, in this order
    _flat_weights_names: list[str]
    _flat_weight_refs: list[Any]
    _has_expanded_weights = False  # whether call_for_per_sample_grads replaced weights

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Any = None,
        reset: Tensor | PackedSequence | None = None,
        reset_to: str = "zeros",
    ) -> tuple[Tensor | PackedSequence, Any]:
        if isinstance(input, PackedSequence):
            return self._call_packed(input, hx, reset, reset_to)
        return self._call(input, hx, reset, reset_to)

    def _call_packed(self, input: PackedSequence, hx: Any, reset: Any, reset_to: str) -> Any:
        """Does what _call does. A compiled model's graph breaks here, and not in each function below too."""
        return self._call(input, hx, reset, reset_to)

    def _call(self, input: Any, hx: Any, reset: Any, reset_to: str) -> Any:
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
        return self._forward(input, hx, NO_STEPS if is_plain else self._steps(input, reset, reset_to))

    def _is_for_torch(self, input: Any) -> bool:
        """Whether torch's own forward serves a call. This is the one place that decides it."""
        return (
            self.proj_size > 0
            or tracing_state() is not None  # torch.jit.trace would record numbers that depend on the lengths
            or self._has_expanded_weights
            or self._flat_weights[0].is_complex()
            or (type(input) is not Tensor and torch.onnx.is_in_onnx_export())
        )

    def _update_flat_weights(self) -> None:
        """Does what torch's does in less time, without copying the weights to where cuDNN looks for them."""
        own = map(self._parameters.get, self._flat_weights_names)
        if all(map(is_, own, self._flat_weights)) or torch.compiler.is_dynamo_compiling():
            return
        weights = [getattr(self, name, None) for name in self._flat_weights_names]
        known = zip(weights, self._flat_weight_refs, strict=True)
        if any(w is not None and ref is not None and ref() is not w for w, ref in known):
            self._flat_weights = weights
            self._flat_weight_refs = [None if w is None else weakref.ref(w) for w in weights]
            self._has_expanded_weights = any(type(w).__name__ == "ExpandedWeight" for w in weights)

    def _weights_of(self, layer: int, direction: int) -> tuple[Any, ...]:
        i = layer * (2 if self.bidirectional else 1) + direction
        first, last = (4 * i, 4 * i + 4) if self.bias else (2 * i, 2 * i + 2)
        if torch.compiler.is_dynamo_compiling():  # a graph may not write its own weights into the layer
            weights = [getattr(self, name, None) for name in self._flat_weights_names[first:last]]
        else:
            weights = self._flat_weights[first:last]
        return (*weights, ()) if self.bias else (*weights, None, None, ())

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
            if order is not None or self._permutes:
                hx = self._permuted(hx, order)
            return (hx,) if isinstance(hx, Tensor) else tuple(hx)
        own = type(self).check_forward_args  # Dynamo traces no getattr(method, "__func__", None)
        if own is TorchLayer.check_forward_args and "check_forward_args" not in self.__dict__:
            self.check_input(input, batch_sizes)
            return None
        zeros = input.new_zeros((self._slices, batch, self.hidden_size))
        hx = self._as_hx([zeros for _ in self._cell.state_names])
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
        slices = self.num_layers * (2 if self.bidirectional else 1)
        shape, dtype = (slices, batch, self.proj_size or self.hidden_size), input.dtype
        names = self._cell.state_names
        for name, state in zip(names, check_states(self._name, hidden, names), strict=True):
            if state.shape != shape:
                raise RuntimeError(
                    f"{self._name}: expected {name} of shape {list(shape)}, got {list(state.shape)}"
                )
            if state.dtype != dtype:
                self._check_state_dtype(name, state, input)
            if self.proj_size > 0:  # h has this size, but not c
                shape = (*shape[:2], self.hidden_size)

    def _check_state_dtype(self, argument: str, state: Tensor, input: Tensor) -> None:
        is_wide = argument != "h0" and state.dtype == torch.float32 and input.dtype != torch.float64
        if not is_wide and not torch._C._is_any_autocast_enabled():
            raise WrongStates(
                f"{self._name}: expected {argument} of dtype {dtype_name(input.dtype)}, "
                f"got {dtype_name(state.dtype)}"
            )

    def _permuted(self, hx: Any, order: Tensor | None) -> Any:
        # This is torch's hook, which subclasses may override.
        return self.permute_hidden(hx, order)  # type: ignore[operator]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        hook, own = getattr(cls, "permute_hidden", None), getattr(cls, "_torch_class", None)
        cls._permutes = own is not None and hook is not own.permute_hidden

    def __prepare_scriptable__(self) -> nn.Module:
        """torch.jit.script's hook: torch's layer with the same parameters."""
        if type(self).forward is not TorchLayer.forward:
            return self
        layer = copy.copy(self)
        layer.__class__ = self._torch_class  # type: ignore[assignment]
        return layer


def leave_to_eager(function: Callable[..., Any]) -> None:
    """Makes torch.compile call a function as it is, between two graphs, as torch.compiler.disable does.

    That would import Dynamo, which takes over a second. A torch without this private function traces all
    calls, which is slower.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    eval_frame = torch._C._dynamo.eval_frame
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


leave_to_eager(SequenceLayer._forward_packed)
leave_to_eager(TorchLayer._call_packed)
