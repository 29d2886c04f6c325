"""What the Python sides of all ops share: how a function reaches its op, and its rules under torch.func.

Kernels, fake kernels, autograd and autocast are registered with the dispatcher by the C++ modules, so that
``torch.ops.lltm_ext.*`` is complete for torch.compile, torch.export and C++ programs. Only torch.func needs
Python: its transforms (vmap, grad, jacrev, ...) cannot enter a C++ autograd function, so under them a public
function takes the op's ``torch.autograd.Function`` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ops = torch.ops.lltm_ext

transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
_overridden: Callable[[Any], bool] = torch.overrides.has_torch_function


def check_tensor(op: str, name: str, value: Any) -> None:
    """Raises a TypeError that names the argument. The dispatcher's does not when no argument is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: expected {name} to be a Tensor, got {type(value).__name__}")


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether only the dispatcher must see a call with these: no tracing, no transform, no override."""
    return not (torch.compiler.is_compiling() or transforms_active() or _overridden(tensors))


def is_lazy(x: Tensor) -> bool:
    """Whether memory holds the negative or the conjugate of ``x``; False while a graph is traced."""
    return not torch.compiler.is_compiling() and (x.is_neg() or x.is_conj())


def describe(function: Any, module: str, name: str, doc: str | None) -> None:
    """Names what a declaration made. A function also gets its own code object, because torch.compile limits
    recompilations per code object."""
    function.__module__, function.__name__, function.__qualname__, function.__doc__ = module, name, name, doc
    if hasattr(function, "__code__"):
        function.__code__ = function.__code__.replace(co_name=name)
    else:
        node = function._backward_cls  # as it is printed in a graph
        node.__name__ = node.__qualname__ = f"{name}Backward"


def into(
    function: Callable[..., Tensor], op: Callable[..., None], out: Tensor, input: Tensor, *args: Any
) -> Tensor:
    """Writes ``function(input, *args)`` into ``out`` by its dispatcher op ``op``, and returns ``out``."""
    check_tensor(function.__name__, "out", out)
    if is_lazy(out):
        return out.copy_(function(input, *args))
    op(input.resolve_neg().resolve_conj(), *args, out)
    return out


def in_place(
    function: Callable[..., Tensor],
    op: Callable[..., None],
    input: Tensor,
    *args: Any,
    saves_input: bool = False,
) -> Tensor:
    """Overwrites ``input`` with ``function(input, *args)`` by its dispatcher op ``op``, and returns it."""
    check_tensor(f"{function.__name__}_", "input", input)
    if transforms_active() or torch.compiler.is_compiling() or is_lazy(input):  # these need a copy
        return input.copy_(function(input.clone() if saves_input else input, *args))
    op(input, *args)
    return input


def vmap_elementwise(op: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    """The vmap rule of an elementwise op: one call on the whole batch, its dimension first."""

    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Tensor, int]:
        batched = [
            a
            if not isinstance(a, Tensor)
            else a.expand(info.batch_size, *a.shape)
            if d is None
            else a.movedim(d, 0)
            for a, d in zip(args, in_dims, strict=True)
        ]
        return op(*batched), 0

    return rule


def vmap_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    """The vmap rule of an op without a batched form: one call per slice, stacked."""

    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        slices = [
            function(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if isinstance(slices[0], Tensor):
            return torch.stack(slices), 0
        stacked = tuple(torch.stack(outputs) for outputs in zip(*slices, strict=True))
        return stacked, (0,) * len(stacked)

    return rule


def vmap_rows(
    function: Callable[..., tuple[Tensor, ...]], args: dict[int, int], outputs: tuple[int, ...]
) -> Callable[..., Any]:
    """The vmap rule of an op whose rows are independent: the vmapped dimension joins the rows.

    ``args`` maps the positions of the arguments that have rows to the dimension of the rows; ``outputs`` has
    that dimension for each output. If another argument (a weight) is vmapped too, there is a call per slice.
    """
    loop = vmap_loop(function)

    def rule(info: Any, in_dims: Sequence[int | None], *values: Any) -> tuple[Any, Any]:
        if any(d is not None and i not in args for i, d in enumerate(in_dims)):
            return loop(info, in_dims, *values)
        folded = list(values)
        for i, row in args.items():
            x, d = values[i], in_dims[i]
            batched = x.movedim(d, row) if d is not None else torch.stack([x] * info.batch_size, row)
            folded[i] = batched.flatten(row, row + 1)
        found = function(*folded)
        return tuple(
            x.unflatten(row, (info.batch_size, -1)) for x, row in zip(found, outputs, strict=True)
        ), outputs

    return rule


def differentiable_gradients(
    reference: Callable[..., Any], inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Gradients that any transform can differentiate again: those of ``reference``, in pure PyTorch."""
    given = [i for i, x in enumerate(inputs) if x is not None]

    def of_given(*tensors: Tensor) -> Any:
        values = dict(zip(given, tensors, strict=True))
        return reference(*(values.get(i) for i in range(len(inputs))))

    outputs, pull_back = torch.func.vjp(  # type: ignore[misc]
        of_given, *(x for x in inputs if x is not None)
    )
    found = pull_back(
        tuple(torch.zeros_like(y) if g is None else g for y, g in zip(outputs, grad_outputs, strict=True))
    )
    gradients: list[Tensor | None] = [None] * len(inputs)
    for i, gradient in zip(given, found, strict=True):
        gradients[i] = gradient
    return tuple(gradients)
