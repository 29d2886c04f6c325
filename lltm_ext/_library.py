"""What the Python sides of all ops share: how a function reaches its op, and its rules under torch.func.

Kernels, fake kernels, autograd and autocast are registered with the dispatcher by the C++ modules, so that
``torch.ops.lltm_ext.*`` is complete for torch.compile, torch.export and C++ programs. Only torch.func and
forward-mode AD need Python, because they cannot enter a C++ autograd function. Under torch.func's transforms
(vmap, grad, jacrev, ...) an op is the op's ``torch.autograd.Function`` (:func:`under_transforms`); with
tangents of ``torch.autograd.forward_ad`` a public function takes it (:func:`has_tangents`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lltm_ext import _portable

Function = TypeVar("Function", bound=Callable[..., Any])
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
_overridden: Callable[[Any], bool] = torch.overrides.has_torch_function
implement = torch.library.Library("lltm_ext", "IMPL").impl  # (name, function, dispatch key)


def under_transforms(name: str, function: Callable[..., Any]) -> None:
    """Makes ``function`` the op ``lltm_ext::<name>`` under torch.func's transforms.

    This is the dispatcher's first key, which is active only in a transform. So nothing else has to ask
    whether there is one, and torch.compile sees the op inside a transform as it sees it elsewhere.
    """
    implement(name, function, "FuncTorchDynamicLayerFrontMode")


def decompose_under_transforms(name: str) -> None:
    """Makes the dispatcher ops of the cell ``name`` calls of custom_cell under torch.func's transforms too.

    They are such calls everywhere (src/custom_cell/built_in.h), but a transform does not see a call
    that C++ makes, unless Python calls the C++.
    """
    for direction in ("", "_bidirectional"):
        for suffix in ("", "_forward", "_backward"):
            op = f"{name}{direction}{suffix}"
            under_transforms(op, getattr(torch.ops.lltm_ext, op).default.decompose)


def composed(name: str, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Makes ``rule``, in torch's differentiable ops, the op ``lltm_ext::<name>_composed``.

    C++ calls it instead of the kernel ``lltm_ext::<name>`` where gradients are differentiated again.
    """
    implement(f"{name}_composed", rule, "CompositeImplicitAutograd")
    return rule


def has_tangents() -> bool:
    """Whether arguments may have tangents of ``torch.autograd.forward_ad``, outside torch.func."""
    return forward_ad._current_level >= 0 and not transforms_active()


class WrongDtype(TypeError, ValueError):
    """A dtype that does not fit: a TypeError of all ops here, a ValueError of torch's layers."""


class WrongStates(TypeError, RuntimeError):
    """An hx that does not fit: a TypeError of all ops here, a RuntimeError of torch's layers."""


def check_tensor(op: str, name: str, value: Any) -> None:
    """Raises a TypeError that names the argument. The dispatcher's does not if no argument is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: expected {name} to be a Tensor, got {type(value).__name__}")
    if value.is_nested:  # a nested tensor has no shape
        raise RuntimeError(f"{op}: expected {name} of layout torch.strided, got a nested tensor")


def takes_over(op: str, name: str, value: Any) -> bool:
    """Whether an argument is no tensor but implements functions itself, as torch.fx's proxies do.

    For others this is :func:`check_tensor`.
    """
    if isinstance(value, Tensor) and not value.is_nested:
        return False
    if not isinstance(value, Tensor) and implements_functions(value):
        return True
    check_tensor(op, name, value)  # raises
    return False


def implements_functions(value: Any) -> bool:
    """Whether the value's class has ``__torch_function__``. torch's own question is also about modes."""
    method = getattr(type(value), "__torch_function__", None)
    return method not in (None, torch._C._disabled_torch_function_impl) and type(value) is not Tensor


def hand_over(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call by the arguments that implement functions, some of which are no tensors.

    If all are tensors, the error of the except block that calls this is raised again.
    """
    given = {name: value for name, value in kwargs.items() if value is not None}
    others = list(filter(implements_functions, torch.utils._pytree.tree_leaves((args, given))))
    if all(isinstance(x, Tensor) for x in others):
        raise
    return torch.overrides.handle_torch_function(function, others, *args, **given)


def no_check(op: str, name: str, value: Tensor) -> None:
    pass


check_tensor.__prepare_scriptable__ = lambda: no_check  # type: ignore[attr-defined]  # torch.jit.script's hook


def check_no_dtensor(op: str, **tensors: Any) -> None:
    """Raises for a DTensor: torch's own error names the dispatcher's op, which all cells share."""
    for name, x in tensors.items():
        if type(x).__name__ == "DTensor":
            raise NotImplementedError(
                f"{op}: expected {name} to be a plain tensor, got a DTensor ({name}.full_tensor() is plain)"
            )


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether only the dispatcher must see a call with these: no tracing, transform, tangent or override."""
    return not (
        torch.compiler.is_compiling()
        or transforms_active()
        or forward_ad._current_level >= 0
        or _overridden(tensors)
    )


def scripts_as_op(function: Function) -> Function:
    """Makes torch.jit.script call the op of this name. It takes the function's arguments except ``out``.

    A torch without this private table refuses to script the function.
    """
    table: dict[int, str] = getattr(torch.jit._builtins, "_get_builtin_table", dict)()
    table[id(function)] = f"lltm_ext::{function.__name__}"
    return function


ops: Any = torch.ops.lltm_ext
if _portable.in_use:
    from lltm_ext._portable_bindings import BypassAutograd

    ops = BypassAutograd(is_plain)


def describe(function: Any, module: str, name: str, doc: str | None) -> None:
    """Names what a declaration made. A function also gets its own code object, because torch.compile limits
    recompilations per code object."""
    function.__module__, function.__name__, function.__qualname__, function.__doc__ = module, name, name, doc
    if hasattr(function, "__code__"):
        function.__code__ = function.__code__.replace(co_name=name)
    else:
        node = function._backward_cls  # gives the name that a graph prints
        node.__name__ = node.__qualname__ = f"{name}Backward"


def into(
    function: Callable[..., Tensor], op: Callable[..., None], out: Tensor, input: Tensor, *args: Any
) -> Tensor:
    """Writes ``function(input, *args)`` into ``out`` by its dispatcher op ``op``, and returns ``out``."""
    check_tensor(function.__name__, "out", out)
    op(input, *args, out)
    return out


def in_place(
    function: Callable[..., Tensor],
    op: Callable[..., None],
    input: Tensor,
    *args: Any,
    saves_input: bool = False,
) -> Tensor:
    """Overwrites ``input`` with ``function(input, *args)`` by its dispatcher op ``op``, and returns it."""
    if takes_over(f"{function.__name__}_", "input", input):
        return hand_over(vars(sys.modules[function.__module__])[f"{function.__name__}_"], input, *args)
    if transforms_active() or has_tangents() or torch.compiler.is_compiling():  # these need a copy
        return input.copy_(function(input.clone() if saves_input else input, *args))
    op(input, *args)
    return input


def vmap_elementwise(op: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    """The vmap rule of an elementwise op: one call on the whole batch, whose dimension comes first."""

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

    def rule(info: Any, in_dims: Sequence[Any], *args: Any, **options: Any) -> tuple[Any, Any]:
        slices = [
            function(*(slice_of(a, d, i) for a, d in zip(args, in_dims, strict=True)), **options)
            for i in range(info.batch_size)
        ]
        if isinstance(slices[0], Tensor):
            return torch.stack(slices), 0
        kind = type(slices[0])
        stacked = [None if y[0] is None else torch.stack(y) for y in zip(*slices, strict=True)]
        return kind(stacked), kind([None if y is None else 0 for y in stacked])

    return rule


def slice_of(x: Any, dim: Any, index: int) -> Any:
    """An argument of one call out of a vmapped one: a slice of a tensor, or of those in a list."""
    if isinstance(x, (list, tuple)):
        dims = dim if isinstance(dim, (list, tuple)) else [dim] * len(x)
        return [slice_of(each, d, index) for each, d in zip(x, dims, strict=True)]
    return x if dim is None else x.select(dim, index)


def vmap_rows(
    function: Callable[..., tuple[Tensor, ...]],
    args: dict[int, int],
    outputs: tuple[int, ...],
    counts: int | None = None,
) -> Callable[..., Any]:
    """The vmap rule of an op whose rows are independent: the vmapped dimension joins the rows.

    ``args`` maps the positions of the arguments that have rows to the dimension of the rows; ``outputs`` has
    that dimension for each output; ``counts`` is the position of a list that counts rows, or None. If another
    argument (a weight) is vmapped too, there is a call per slice.
    """
    loop = vmap_loop(function)

    def rule(info: Any, in_dims: Sequence[Any], *values: Any) -> tuple[Any, Any]:
        if any(isinstance(d, int) and i not in args for i, d in enumerate(in_dims)):
            return loop(info, in_dims, *values)
        folded = list(values)
        for i, row in args.items():
            x, d = values[i], in_dims[i]
            # The slices of a row are next to each other, so that the rows of packed steps stay in order.
            batched = torch.stack([x] * info.batch_size, row + 1) if d is None else x.movedim(d, row + 1)
            folded[i] = batched.flatten(row, row + 1)
        if counts is not None and values[counts] is not None:
            folded[counts] = [n * info.batch_size for n in values[counts]]
        found = function(*folded)
        return tuple(
            x.unflatten(row, (-1, info.batch_size)) for x, row in zip(found, outputs, strict=True)
        ), tuple(row + 1 for row in outputs)

    return rule


def differentiable_gradients(
    reference: Callable[..., Any], inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of ``reference``, in pure PyTorch, which any transform can differentiate."""
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


def is_whole(x: Tensor) -> bool:
    """Whether ``x`` has integers, for which autograd makes zeros as tangents."""
    return not (x.is_floating_point() or x.is_complex())


def differentiable_tangents(
    reference: Callable[..., Any], inputs: Sequence[Tensor | None], tangents: Sequence[Tensor | None]
) -> Any:
    """The tangents of the results of ``reference``: its derivative along those of ``inputs``.

    It is computed as the gradient of the gradients with respect to the gradients of the results. Unlike
    torch.func.jvp this also runs inside forward-mode AD, which does not nest.
    """
    moving = [i for i, t in enumerate(tangents) if t is not None and not is_whole(t)]

    def of_moving(*tensors: Tensor) -> Any:
        values = dict(zip(moving, tensors, strict=True))
        return reference(*(values.get(i, x) for i, x in enumerate(inputs)))

    outputs, pull_back = torch.func.vjp(of_moving, *(inputs[i] for i in moving))  # type: ignore[misc]
    zeros = torch.utils._pytree.tree_map(torch.zeros_like, outputs)
    _, push_forward = torch.func.vjp(pull_back, zeros)  # type: ignore[misc]
    return push_forward(tuple(tangents[i] for i in moving))[0]
