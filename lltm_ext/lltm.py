"""LLTM (Long-Long-Term Memory): the cell of the PyTorch C++ extension tutorial, one step or a whole sequence.

The cell is an LSTM without a forget gate. With gates in the order input, output, candidate::

    i, o, z = split(x W_ih^T + h W_hh^T + b)
    c' = c + elu(z) * sigmoid(i)
    h' = tanh(c') * sigmoid(o)

Source: Goldsborough, "Custom C++ and CUDA Extensions", https://pytorch.org/tutorials/advanced/cpp_extension.html
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lltm_ext import cells
from lltm_ext._arguments import State, check_hx, check_sizes, init_uniform
from lltm_ext._C import lltm as _C
from lltm_ext._layers import CellLayer
from lltm_ext._library import (
    check_tensor,
    composed,
    decompose_under_transforms,
    differentiable_gradients,
    differentiable_tangents,
    hand_over,
    has_tangents,
    is_plain,
    ops,
    scripts_as_op,
    takes_over,
    under_transforms,
    vmap_loop,
    vmap_rows,
)
from lltm_ext._loop import reference
from lltm_ext._scripting import scriptable

__all__ = ["LLTM", "LLTMCell", "LLTMFunction", "lltm", "lltm_algorithm", "lltm_cell"]

decompose_under_transforms("lltm")


def _cell_reference(gates: Tensor, old_cell: Tensor) -> State:
    input_gate, output_gate, candidate = gates.chunk(3, dim=-1)
    new_cell = old_cell + F.elu(candidate) * torch.sigmoid(input_gate)
    new_h = torch.tanh(new_cell) * torch.sigmoid(output_gate)
    return new_h.to(gates.dtype), new_cell.to(old_cell.dtype)


@functools.partial(composed, "lltm_cell")
def lltm_cell_reference(
    input: Tensor, weights: Tensor, bias: Tensor | None, old_h: Tensor, old_cell: Tensor
) -> State:
    """:func:`lltm_cell` in pure PyTorch."""
    gates = torch.cat([old_h, input], dim=1) @ weights.t()
    return _cell_reference(gates if bias is None else gates + bias, old_cell)


class _CellFunction(torch.autograd.Function):
    """One step, which returns ``(new_h, new_cell, gates)``.

    The gates are for backward. They are an output because setup_context sees only inputs and outputs.
    """

    @staticmethod
    def forward(
        input: Tensor, weights: Tensor, bias: Tensor | None, old_h: Tensor, old_cell: Tensor
    ) -> tuple[Tensor, ...]:
        return ops.lltm_cell_forward(input, weights, bias, old_h, old_cell)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, ...]) -> None:
        _, new_cell, gates = output
        ctx.mark_non_differentiable(gates)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, new_cell, gates)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return (*differentiable_tangents(lltm_cell_reference, ctx.saved_tensors[:5], tangents), None)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, new_cell, gates = ctx.saved_tensors
        grad_h, grad_cell = grad_outputs[:2]
        if grad_h is None and grad_cell is None:
            return (None,) * 5
        if torch.is_grad_enabled():
            return differentiable_gradients(lltm_cell_reference, inputs, (grad_h, grad_cell))
        input, weights, bias, old_h, _ = inputs
        grad_input, grad_weights, grad_bias, *grads_of_state = ops.lltm_cell_backward(
            grad_h, grad_cell, new_cell, gates, input, weights, old_h, True, True, True
        )
        grad_bias = None if bias is None else grad_bias.view_as(bias)
        return grad_input, grad_weights, grad_bias, *grads_of_state

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        return vmap_rows(_CellFunction.apply, {0: 0, 3: 0, 4: 0}, (0, 0, 1))(info, in_dims, *args)


class LLTMFunction(_CellFunction):
    """``LLTMFunction.apply(input, weights, bias, old_h, old_cell)`` returns ``(new_h, new_cell)``.

    One step, with the arguments of the tutorial's function of the same name; see :func:`lltm_cell`. Outside
    torch.func's transforms it runs the op's C++ autograd node, in half the host time.
    """

    @classmethod
    def apply(cls, *args: Any) -> State:
        return lltm_cell(*args)


@scripts_as_op
def lltm_cell(
    input: Tensor, weights: Tensor, bias: Tensor | None, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]:
    """One step of the LLTM cell, in the tutorial's argument order.

    Args:
        input: [B, I], on CPU or CUDA; float16, bfloat16, float32 or float64.
        weights: [3*H, H+I]; the columns of ``old_h`` before those of ``input``, the rows of the input gate
            before those of the output gate and the candidate.
        bias: [3*H] (or [1, 3*H], as old checkpoints of the tutorial have it), or None.
        old_h: [B, H].
        old_cell: [B, H], in the dtype of ``input``; for half types also float32, so that the cell state is
            not rounded at every step.

    Returns:
        ``(new_h, new_cell)``, each [B, H]; new_h in the dtype of ``input``, new_cell in that of ``old_cell``.

    Raises:
        TypeError: for another dtype, or no tensor.
        RuntimeError: for shapes or devices that do not fit, or another layout.

    Source: the formula at the head of this module.
    """
    arguments = (input, weights, bias, old_h, old_cell)
    if (
        takes_over("lltm_cell", "input", input)
        or takes_over("lltm_cell", "weights", weights)
        or takes_over("lltm_cell", "old_h", old_h)
        or takes_over("lltm_cell", "old_cell", old_cell)
        or (bias is not None and takes_over("lltm_cell", "bias", bias))
    ):
        return hand_over(lltm_cell, *arguments)
    if is_plain(*arguments):
        return _C.call_lltm_cell(*arguments)
    return _CellFunction.apply(*arguments)[:2] if has_tangents() else ops.lltm_cell(*arguments)


def lltm(
    input: Tensor,
    hx: State,
    weight_ih: Tensor | None,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    *,
    reset: Tensor | None = None,
    reset_to: str = "zeros",
    reverse: bool = False,
    algorithm: str = "auto",
) -> tuple[Tensor, State]:
    """A whole sequence of the LLTM cell.

    Args:
        input: [T, B, I], on CPU or CUDA; float16, bfloat16, float32 or float64.
        hx: ``(h0, c0)``, each [B, H]; c0 in the dtype of ``input``, for half types also in float32.
        weight_ih: [3*H, I]; None for an input [T, B, 3*H] that is taken as it is, as the product with it.
        weight_hh: [3*H, H].
        bias: [3*H], or None.
        reset: [T, B], where an episode starts. Before such a step the states of the row become 0 (bool), or
            are multiplied by 1 - reset (numbers).
        reset_to: "zeros"; or "initial" for states that become those of ``hx`` of this call again, with
            numbers (1 - reset) * states + reset * initial states. ``hx`` gets gradients of all episodes.
            Without reset it does nothing.
        reverse: whether the last step is computed first. hx then is the state after the last step, and h_n
            and c_n that of step 0. Episodes start at the same places.
        algorithm: how the steps run. "auto" picks the fastest one that fits; :func:`lltm_algorithm` tells
            which. "stepwise" runs a matrix product and a pointwise kernel per step, or one kernel for both,
            for any size, dtype and device. "cluster" and "grid" are one kernel for all steps, on CUDA in
            float16, bfloat16 and float32; units of zeros make H a multiple of 8. "cluster" (compute
            capability 9.0 and above; H up to 512 in half types, 128 in float32) exchanges states through the
            shared memory of thread block clusters; "grid" (8.0 and above; H up to 1024, 2048 for few rows in
            half types; B*H up to about half a million) through the L2 cache.

    Products of float32 on CUDA are TF32 where nn.LSTM's are: where ``torch.backends.cudnn.allow_tf32``, by
    default True, or ``torch.backends.cudnn.rnn.fp32_precision`` says so.

    Returns:
        ``(output, (h_n, c_n))``: output [T, B, H] holds h of every step, h_n and c_n [B, H] the last state.
        Internally the cell state and its gradient stay float32 (float64 for float64).

    Raises:
        TypeError: for another dtype, or no tensor.
        ValueError: for another algorithm or reset_to.
        RuntimeError: for shapes or devices that do not fit, another layout, an algorithm that can't run here.

    Source: the formula at the head of this module.
    """
    options: Any = {"reset": reset, "reset_to": reset_to, "reverse": reverse, "algorithm": algorithm}
    return cells.lltm(input, hx, weight_ih, weight_hh, bias, **options)


lltm.__script_unsupported = (  # type: ignore[attr-defined]  # an attribute that torch.jit.script reads
    "lltm has options by keyword; a script can have a layer lltm_ext.LLTM, or torch.ops.lltm_ext.lltm"
)


def lltm_algorithm(
    input: Tensor,
    hx: State,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    *,
    algorithm: str = "auto",
    backward: bool = False,
) -> str:
    """The algorithm of :func:`lltm` for these arguments: "stepwise", "cluster" or "grid".

    Args:
        backward: True for the algorithm of the backward pass, which may differ from the forward's.

    The other arguments and all errors are those of :func:`lltm`.
    """
    return cells.lltm.algorithm(input, hx, weight_ih, weight_hh, bias, algorithm=algorithm, backward=backward)


def lltm_reference(
    input: Tensor,
    hx: State,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    *,
    reset: Tensor | None = None,
    reset_to: str = "zeros",
    reverse: bool = False,
) -> tuple[Tensor, State]:
    """:func:`lltm` in pure PyTorch."""
    output, (h_n, c_n) = reference(
        cells.lltm, input, hx, weight_ih, weight_hh, bias, reset, reset_to, reverse
    )
    return output, (h_n, c_n)


CELL = """\
def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    rows = input if input.dim() == 2 else input[None]
    zeros = rows.new_zeros([rows.shape[0], self.hidden_size])
    old_h, old_c = (zeros, zeros) if hx is None else hx
    h, c = torch.ops.lltm_ext.lltm_cell(
        rows, self.weights, self.bias, old_h.view_as(zeros), old_c.view_as(zeros)
    )
    return (h, c) if input.dim() == 2 else (h[0], c[0])
"""


class LLTMCell(nn.Module):
    """One step of the LLTM, called like :class:`torch.nn.LSTMCell`: ``h, c = cell(input, (h, c))``.

    Args:
        input_size: I, the number of features of the input.
        hidden_size: H, the number of units.
        bias: whether the gates have a bias.

    Attributes:
        weights: [3*H, H+I], as in the tutorial's module, whose checkpoints load here.
        bias: [3*H].

    Shapes:
        input [B, I] or [I]; the states [B, H] or [H], zeros where not given; the results likewise.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes("LLTMCell", input_size=input_size, hidden_size=hidden_size)
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.weights = nn.Parameter(
            torch.empty(3 * hidden_size, hidden_size + input_size, device=device, dtype=dtype)
        )
        if bias:
            self.bias = nn.Parameter(torch.empty(3 * hidden_size, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters from U(-1/sqrt(H), 1/sqrt(H)), as the tutorial and nn.LSTMCell do."""
        init_uniform(self, self.hidden_size)

    def forward(self, input: Tensor, hx: State | None = None) -> State:
        check_tensor("LLTMCell", "input", input)
        if input.dim() not in (1, 2) or input.shape[-1] != self.input_size:
            raise RuntimeError(
                f"LLTMCell: expected input of shape [batch, input_size] or [input_size] with "
                f"input_size = {self.input_size}, got {list(input.shape)}"
            )
        if hx is None:
            zeros = input.new_zeros(*input.shape[:-1], self.hidden_size)
            hx = (zeros, zeros)
        old_h, old_cell = check_hx("LLTMCell", hx, (*input.shape[:-1], self.hidden_size))
        if input.dim() == 2:
            return lltm_cell(input, self.weights, self.bias, old_h, old_cell)
        new_h, new_cell = lltm_cell(input[None], self.weights, self.bias, old_h[None], old_cell[None])
        return new_h[0], new_cell[0]

    def __prepare_scriptable__(self) -> nn.Module:
        return scriptable(self, LLTMCell.forward, CELL)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Checkpoints of the tutorial's repository have a bias of shape [1, 3*H].
        bias = state_dict.get(prefix + "bias")
        if isinstance(bias, Tensor) and bias.shape == (1, 3 * self.hidden_size):
            state_dict[prefix + "bias"] = bias[0]
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}" + ("" if self.bias is not None else ", bias=False")


class LLTM(CellLayer):
    """The LLTM as a layer, called like :class:`torch.nn.LSTM`: ``output, (h_n, c_n) = layer(input, hx)``.

    Args:
        input_size: I, the number of features of the input.
        hidden_size: H, the number of units.
        num_layers: L, the layers stacked, each fed with the output of the one below.
        bias: whether the gates have a bias.
        batch_first: whether batched input and output are [B, T, ...] instead of [T, B, ...]; states are not.
        dropout: the probability of dropout on the output of every layer but the last.
        bidirectional: whether each layer also runs from the last step to the first (D = 2 instead of 1). Both
            directions run side by side.

    Attributes:
        weight_ih_l{k}: [3*H, I], for layers above the first [3*H, D*H]; weight_hh_l{k}: [3*H, H];
        bias_l{k}: [3*H]. Those of the other direction end in ``_reverse``.

    Shapes:
        input [T, B, I], [B, T, I] if batch_first, [T, I], or a PackedSequence;
        hx ``(h0, c0)``, each [L*D, B, H] (unbatched [L*D, H]), zeros where not given;
        reset, by keyword: where an episode starts (:func:`lltm_ext.lltm`), as input, without its last
        dimension. The reverse direction is cut at the same places. With ``reset_to="initial"`` each layer and
        direction starts episodes from its own slice of hx;
        output [T, B, D*H] in the layout of the input, h_n and c_n as hx.

    Products of float32 on CUDA are TF32 where nn.LSTM's are: where ``torch.backends.cudnn.allow_tf32``, by
    default True, or ``torch.backends.cudnn.rnn.fp32_precision`` says so.
    """

    _cell = cells.lltm


under_transforms("lltm_cell", lambda *args: _CellFunction.apply(*args)[:2])
torch.library.register_vmap("lltm_ext::lltm_cell_backward", vmap_loop(ops.lltm_cell_backward))
