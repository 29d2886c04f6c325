"""Layers of cells: :class:`Recurrent`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from lltm_ext._arguments import check_no_input, check_reset_to, check_sizes, init_uniform
from lltm_ext._layers import CellLayer, Steps
from lltm_ext._library import check_tensor
from lltm_ext._scripting import scriptable_layer
from lltm_ext.recurrence import RecurrentCell

__all__ = ["Recurrent"]


class Recurrent(CellLayer):
    """A layer of a cell of :func:`lltm_ext.recurrence`, called like :class:`torch.nn.LSTM`.

    ``output, states = layer(input, hx=None, *, reset=None, reset_to="zeros", **inputs)``

    Args:
        cell: the cell.
        input_size: I, the number of features of the input; None for an input of G*H features that the first
            layer takes as it is, as the product with a weight_ih, and for a cell without gates.
        hidden_size: H, the number of units.
        num_layers: L, the layers stacked, each fed with the output of the one below.
        bias: whether the gates have a bias.
        batch_first: whether batched input and output are [B, T, ...] instead of [T, B, ...]; states are not.
        dropout: the probability of dropout on the output of every layer but the last.
        bidirectional: whether each layer also runs from the last step to the first (D = 2 instead of 1).
        heads: into how many blocks the product with h is divided, and those with the cell's own weights. A
            unit sees h of its block's units only. A mapping from the names of weights ("weight_hh" or the
            cell's own) divides these only.
        reverse: whether all layers run from the last step to the first only, as the reverse direction of a
            bidirectional layer does: hx is the state after the last step, the final states are those of
            step 0.

    Attributes:
        weight_ih_l{k}: [G*H, I], none without input_size, for layers above the first [G*H, D*O*H],
        where the cell has O outputs;
        weight_hh_l{k}: [R*H, H/heads] of R recurrent gates, none for a cell without recurrent product;
        bias_l{k}: [G*H]; each parameter of the cell, {name}_l{k}: [H]; each of its own weights: as the cell
        declares it, or [n*H, H/heads]. Those of the other direction end in ``_reverse``.

    Shapes:
        input [T, B, I], [B, T, I] if batch_first, [T, I], or a PackedSequence; None for a cell without gates,
        whose first input of the steps has these layouts, without the last dimension;
        hx h0, or for a cell with states ``(h0, *states0)``, each [L*D, B, H] (unbatched [L*D, H]), zeros
        where not given;
        reset, which starts episodes (:class:`~lltm_ext.RecurrentCell`), as input, without its last dimension;
        a reverse direction is cut at the same places. With ``reset_to="initial"`` each layer and direction
        starts them from its own slice of hx;
        inputs of the steps, by their names: as reset, or with a last dimension of H. Like reset, they go to
        all layers and directions. For a packed input they are packed with the same lengths;
        output [T, B, D*O*H] in the layout of the input, first all of the first direction; the final states
        as hx.

    Products of float32 on CUDA are TF32 where nn.LSTM's are: where ``torch.backends.cudnn.allow_tf32``, by
    default True, or ``torch.backends.cudnn.rnn.fp32_precision`` says so.
    """

    reverse = False  # in layers pickled by older versions
    _cell_of_heads: RecurrentCell | None = None  # its program says what heads its own weights have

    def __init__(
        self,
        cell: RecurrentCell,
        input_size: int | None = ...,  # type: ignore[assignment]  # needed, but Recurrent(32, 64) lacks the cell
        hidden_size: int = ...,  # type: ignore[assignment]
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        heads: int | Mapping[str, int] = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reverse: bool = False,
    ) -> None:
        if not isinstance(cell, RecurrentCell):
            raise TypeError(
                f"{self._name}: expected cell to be made by recurrence, got {type(cell).__name__}"
            )
        check_sizes(self._name, hidden_size=hidden_size)
        self._check_heads(cell, hidden_size, heads)
        if cell.gates == 0 and (input_size is not None or num_layers != 1):
            what, got = (
                ("input_size=None", input_size) if input_size is not None else ("num_layers=1", num_layers)
            )
            raise ValueError(
                f"{self._name}: expected {what} for {cell.__name__}, which has no gates, got {got}"
            )
        if reverse and bidirectional:
            raise ValueError(f"{self._name}: expected reverse=False with bidirectional=True, got True")
        self.cell, self.heads, self.reverse = cell, heads, reverse
        options = (num_layers, bias, batch_first, dropout, bidirectional)
        super().__init__(input_size, hidden_size, *options, device=device, dtype=dtype)
        columns = [self._columns(name) if size[1] == 1 else 0 for name, size in cell.weights.items()]
        self._cell_of_heads = cell.with_heads(tuple(n if n < hidden_size else 0 for n in columns))

    def _check_heads(self, cell: RecurrentCell, hidden_size: int, heads: int | Mapping[str, int]) -> None:
        weights = ["weight_hh", *(name for name, size in cell.weights.items() if size[1] == 1)]
        for name, count in heads.items() if isinstance(heads, Mapping) else [("", heads)]:
            if name and name not in weights:
                expected = " or ".join(weights)
                raise ValueError(f"{self._name}: expected heads of {expected}, got those of {name!r}")
            what = f"heads[{name!r}]" if name else "heads"
            check_sizes(self._name, **{what: count})
            if hidden_size % count != 0 or (count > 1 and not cell.recurrent):
                why = f"divide hidden_size = {hidden_size}"
                why = why if cell.recurrent else "be 1 without a recurrent product"
                raise ValueError(f"{self._name}: expected {what} to {why}, got {count}")

    def _columns(self, weight: str) -> int:
        """Those of a weight with a block for each head."""
        heads = self.heads.get(weight, 1) if isinstance(self.heads, Mapping) else self.heads
        return self.hidden_size // heads

    @property
    def _cell(self) -> RecurrentCell:  # type: ignore[override]
        return self.cell if self._cell_of_heads is None else self._cell_of_heads

    @property
    def _is_reverse(self) -> bool:  # type: ignore[override]
        return self.reverse

    def forward(
        self,
        input: Tensor | PackedSequence | None = None,
        hx: Any = None,
        reset: Tensor | PackedSequence | None = None,
        reset_to: str = "zeros",
        **inputs: Tensor | PackedSequence,
    ) -> tuple[Tensor | PackedSequence, Any]:
        self._check_names(inputs)
        check_reset_to(self._name, reset_to)
        if self.cell.gates == 0:
            input = self._input_of_no_gates(input, hx, inputs[self.cell.inputs[0]])
        found = [self._step_input(name, inputs[name], input) for name in self.cell.inputs]
        return self._forward(input, hx, Steps(found, self._resets(input, reset), reset_to))  # type: ignore[arg-type]

    def _input_of_no_gates(self, input: Any, hx: Any, steps: Any) -> Tensor | PackedSequence:
        """An input without features, in the layout of an input of the steps and the dtype of the states."""
        check_no_input(self._name, self.cell.__name__, input)
        is_packed = isinstance(steps, PackedSequence)
        rows = steps.data if is_packed else steps
        check_tensor(self._name, self.cell.inputs[0], rows)
        dtypes = (x.dtype for x in (*tree_leaves(hx), *self.parameters(), rows) if isinstance(x, Tensor))
        dtype = next((t for t in dtypes if t.is_floating_point), torch.get_default_dtype())
        sizes = rows.shape[: 1 if is_packed else 2]
        found = rows.new_empty((*sizes, 0), dtype=dtype)
        return PackedSequence(found, *steps[1:]) if is_packed else found

    def _check_hx(
        self,
        input: Tensor,
        hx: Any,
        batch: int,
        batch_sizes: Tensor | None = None,
        order: Tensor | None = None,
    ) -> tuple[Tensor, ...] | None:
        if hx is None and self.cell.gates == 0:  # only the states tell hidden_size
            zeros = input.new_zeros((self._slices, batch, self.hidden_size))
            return (zeros,) * len(self.cell.state_names)
        return super()._check_hx(input, hx, batch, batch_sizes, order)

    def _check_names(self, inputs: dict[str, Any]) -> None:
        names = self.cell.inputs
        for name in inputs:
            if name not in names:
                expected = f"the inputs {', '.join(names)}" if names else "no such input"
                raise TypeError(f"{self._name}: expected {expected} of {self.cell.__name__}, got {name}")
        for name in names:
            if inputs.get(name) is None:
                raise TypeError(f"{self._name}: expected {name} to be a Tensor, but it is missing")

    def _shapes(self, layer_input: int | None) -> dict[str, tuple[int, ...]]:
        size = self.hidden_size
        own: dict[str, tuple[int, ...]] = {name: (n * size,) for name, n in self.cell.widths().items()}
        for name, (rows, columns) in self.cell.weights.items():
            own[name] = (rows * size, self._columns(name) if columns == 1 else columns * size)
        return super()._shapes(layer_input) | own

    def _weights_of(self, layer: int, direction: int) -> tuple[Any, ...]:
        end = f"_l{layer}{('', '_reverse')[direction]}"
        weights = list(super()._weights_of(layer, direction)[:-1])
        own = {name: self._parameter(name + end) for name in (*self.cell.parameters, *self.cell.weights)}
        if self.cell.has_own_weights:
            weights[1] = self.cell.weights_of_products(weights[1], self.hidden_size, own)
        return (*weights, self.cell.values_of_units(own, self.hidden_size))

    def reset_parameters(self) -> None:
        """Draws all parameters from U(-1/sqrt(H), 1/sqrt(H)), or fills those whose number the cell gives."""
        init_uniform(self, self.hidden_size)
        for name, parameter in self.named_parameters():
            value = self.cell.parameters.get(name.rpartition("_l")[0])
            if isinstance(value, Sequence):
                for x, part in zip(value, parameter.detach().chunk(len(value)), strict=True):
                    part.fill_(x)
            elif value is not None:
                nn.init.constant_(parameter, value)

    def __prepare_scriptable__(self) -> nn.Module:
        if self.cell.gates == 0 or self.cell.weights:
            expected = "with gates" if self.cell.gates == 0 else "without weights of its own"
            raise NotImplementedError(
                f"{self._name}: expected a cell {expected} for torch.jit.script, got {self.cell.__name__}"
            )
        return scriptable_layer(self, Recurrent.forward)

    def extra_repr(self) -> str:
        heads = f", heads={self.heads}" if self.heads != 1 else ""
        reverse = ", reverse=True" if self.reverse else ""
        return f"{self.cell.__name__}, {super().extra_repr()}{heads}{reverse}"
