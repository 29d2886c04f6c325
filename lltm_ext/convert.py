"""from_torch and to_torch turn the recurrent layers of a model from torch's classes into ours, and back.

A layer here has the attributes of torch's and only another forward. So a conversion changes the layer's
class, and everything that the layer has or that refers to it stays as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lltm_ext._rl import Adapter, adapt, restore
from lltm_ext.lstm import LSTM
from lltm_ext.rnn import GRU, RNN

__all__ = ["from_torch", "slstm_from_xlstm", "to_torch"]

Model = TypeVar("Model", bound=nn.Module)

FROM_TORCH: dict[type, type] = {nn.LSTM: LSTM, nn.GRU: GRU, nn.RNN: RNN}
TO_TORCH = {ours: theirs for theirs, ours in FROM_TORCH.items()}


def from_torch(model: Model) -> Model:
    """Makes each :class:`torch.nn.LSTM`, GRU and RNN of a model a layer of lltm_ext, in place.

    The layers remain the same objects: parameters, buffers, hooks, parametrizations and training mode are
    kept, and an optimizer made before continues. So do :class:`torch.compile` and DistributedDataParallel
    around the model. Recurrent modules of torchrl and sb3-contrib get a class that treats resets in less
    time (docs/libraries.md). These layers stay as they are:

    - those of a subclass of torch's, which may have a forward of its own
    - those of a scripted model, whose code is fixed

    Args:
        model: a module, also a layer itself.

    Returns:
        ``model``. If it has none of these layers, with a warning.

    Raises:
        TypeError: for anything but a module.
    """
    _check_module("from_torch", model)
    classes = [_own_class(module) for module in model.modules()]
    if not any(cls in FROM_TORCH or cls in TO_TORCH for cls in classes):
        warnings.warn(
            f"from_torch: found no nn.LSTM, nn.GRU or nn.RNN in {type(model).__name__}, so it stays as it is "
            "(layers of a subclass stay too)",
            stacklevel=2,
        )
    for module in model.modules():
        if _own_class(module) in FROM_TORCH:
            _convert(module, FROM_TORCH)
        elif not is_parametrized(module):
            adapt(module)
    return model


def to_torch(model: Model) -> Model:
    """Makes each LSTM, GRU and RNN of lltm_ext one of torch, in place: the way back of :func:`from_torch`.

    The whole model can then be saved, and loaded where lltm_ext is not installed, or be given to an exporter
    that knows torch's layers. A call with ``reset=`` fails afterwards.

    Args:
        model: a module, also a layer itself.

    Returns:
        ``model``.

    Raises:
        TypeError: for a model with other modules of lltm_ext, such as LLTM, Recurrent or Sigmoid, or with
            modules of subclasses of any of them. The error names them, and the model remains as it was. Also
            for anything but a module.
    """
    _check_module("to_torch", model)
    others = [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if _own_class(module) not in TO_TORCH and _needs_lltm_ext(_own_class(module))
    ]
    if others:
        raise TypeError(
            "to_torch: expected no modules of lltm_ext except LSTM, GRU and RNN, got " + ", ".join(others)
        )
    for module in model.modules():
        if _own_class(module) in TO_TORCH:
            _convert(module, TO_TORCH)
        elif isinstance(module, Adapter):
            restore(module)
    return model


def slstm_from_xlstm(state_dict: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The state_dict of an sLSTM layer here from a checkpoint of the xlstm package.

    ::

        found = lltm_ext.slstm_from_xlstm(checkpoint, prefix="blocks.0.xlstm.slstm_cell.")
        layer = lltm_ext.Recurrent(lltm_ext.cells.slstm, None, hidden_size=512, heads=4)
        layer.load_state_dict(found)
        output, states = layer(gates)  # [T, B, 4*512], in the order i, f, z, o of that cell's input

    Args:
        state_dict: of an ``sLSTMCell``, or of a model that has one. The layouts of both of its backends,
            "cuda" and "vanilla", are known by their shapes.
        prefix: the name of the cell in the model, with the dot at its end.

    Returns:
        ``weight_hh_l0`` [4*H, H/heads] and ``bias_l0`` [4*H], which share no memory with the checkpoint.

    Raises:
        KeyError: if a tensor of this prefix is missing.
        ValueError: for another shape.
    """
    names = [f"{prefix}_recurrent_kernel_", f"{prefix}_bias_"]
    for name in names:
        if name not in state_dict:
            raise KeyError(f"slstm_from_xlstm: expected {name!r} in the state_dict, but it is missing")
    kernel, bias = (state_dict[name] for name in names)
    heads, size = kernel.shape[0], min(kernel.shape[1:])
    layouts: dict[tuple[int, ...], str] = {
        (heads, size, 4 * size): "cuda",
        (heads, 4 * size, size): "vanilla",
    }
    if tuple(kernel.shape) not in layouts or bias.numel() != 4 * heads * size:
        raise ValueError(
            f"slstm_from_xlstm: expected {names[0]} of shape [heads, size, 4*size] or [heads, 4*size, size] "
            f"and {names[1]} with 4*heads*size values, got {list(kernel.shape)} and {list(bias.shape)}"
        )
    if layouts[tuple(kernel.shape)] == "cuda":
        kernel, bias = kernel.reshape(heads, size, 4, size).permute(2, 0, 3, 1), bias.view(heads, 4, size)
        bias = bias.transpose(0, 1)
    else:
        kernel = kernel.reshape(heads, 4, size, size).transpose(0, 1)
    return {
        "weight_hh_l0": kernel.reshape(4 * heads * size, size).clone(),
        "bias_l0": bias.reshape(-1).clone(),
    }


def _needs_lltm_ext(cls: type) -> bool:
    return any(base.__module__.partition(".")[0] == "lltm_ext" for base in cls.__mro__)


def _own_class(module: nn.Module) -> type:
    """The class of a module, below the one that parametrize or :func:`from_torch` made for it."""
    cls = type(module)
    if isinstance(module, Adapter):
        return cls.__bases__[1]
    return cls.__bases__[0] if is_parametrized(module) else cls


def _convert(module: nn.Module, classes: dict[type, type]) -> None:
    new = classes[_own_class(module)]
    if is_parametrized(module):  # parametrize's class has the properties; copies share it
        content = {k: v for k, v in vars(type(module)).items() if k not in ("__dict__", "__weakref__")}
        new = type(f"Parametrized{new.__name__}", (new,), content)
    module.__class__ = new


def _check_module(name: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}: expected model to be a torch.nn.Module, got {type(model).__name__}")
