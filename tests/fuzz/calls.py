"""Random calls of the public functions: one that fits equals the reference in float64, others are refused.

    python tests/fuzz/calls.py --op gemm --examples 1000 --seed 0

A call is drawn that fits; then none, one or two of its arguments are changed. Before each call the program
writes it to --log, so that the call that ends the process is known.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import torch
from hypothesis import strategies as st
from torch import Tensor

import lltm_ext
from lltm_ext.gemm import gemm_reference
from lltm_ext.lltm import lltm_cell_reference, lltm_reference
from lltm_ext.lstm import lstm_reference
from lltm_ext.round import binarize_reference

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from op_suite import FORWARD, expanded, misaligned, negated_view, stepped, transposed

REFUSALS = (TypeError, ValueError, RuntimeError)
SIZES = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 16, 17, 31, 33, 64, 129])
SHAPES = st.lists(SIZES, max_size=4).filter(lambda shape: torch.Size(shape).numel() <= 1 << 16)
LAYOUTS = st.sampled_from([Tensor.contiguous, transposed, stepped, misaligned, expanded, negated_view])
OTHER_DTYPES = [torch.int64, torch.bool, torch.complex64, torch.float8_e5m2, *FORWARD]


class Draw:
    """Tensors and numbers of one example."""

    def __init__(self, data: st.DataObject, device: str):
        self.data, self.device = data, device
        self.dtype = self(st.sampled_from(list(FORWARD)), "dtype")
        self.scale = self(st.sampled_from([0.0, 0.1, 1.0, 30.0]), "scale")
        self.generator = torch.Generator().manual_seed(self(st.integers(0, 2**32 - 1), "values"))

    def __call__(self, strategy: st.SearchStrategy[Any], label: str = "") -> Any:
        return self.data.draw(strategy, label)

    def tensor(self, *shape: int, scale: float | None = None) -> Tensor:
        scale = self.scale if scale is None else scale
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
        return self(LAYOUTS, "layout")(values.to(self.device, self.dtype))

    def sizes(self, count: int) -> list[int]:
        return [self(SIZES, "size") for _ in range(count)]


class Op(NamedTuple):
    arguments: Callable[[Draw], dict[str, Any]]  # of a call that fits
    call: Callable[..., Any]
    reference: Callable[..., Any]  # in float64
    exact: bool = False  # whether rounding is all that may differ


def of_input(draw: Draw) -> dict[str, Any]:
    return {"input": draw.tensor(*draw(SHAPES, "shape"))}


def of_binarize(draw: Draw) -> dict[str, Any]:
    return of_input(draw) | {"threshold": draw(st.sampled_from([0.5, 0.0, -1.0]), "threshold")}


def of_gemm(draw: Draw) -> dict[str, Any]:
    (m, n, k), batch = draw.sizes(3), draw(st.sampled_from([(), (1,), (3,)]), "batch")
    scale = 1.0 if draw.scale == 30 and draw.dtype == torch.float16 else None  # float16 ends at 65504
    a, b = draw.tensor(*batch, m, k, scale=scale), draw.tensor(*batch, k, n, scale=scale)
    bias = draw.tensor(n) if draw(st.booleans(), "bias") else None
    activation = draw(st.sampled_from([None, "relu", "sigmoid", "tanh", "gelu"]), "activation")
    return {"a": a, "b": b, "bias": bias, "activation": activation}


def of_cell(draw: Draw) -> dict[str, Any]:
    b, i, h = draw.sizes(3)
    return {
        "input": draw.tensor(b, i),
        "weights": draw.tensor(3 * h, h + i, scale=0.3),
        "bias": draw.tensor(3 * h),
        "old_h": draw.tensor(b, h, scale=0.5),
        "old_cell": draw.tensor(b, h),
    }


def of_sequence(gates: int) -> Callable[[Draw], dict[str, Any]]:
    def arguments(draw: Draw) -> dict[str, Any]:
        t, b, i, h = draw(st.sampled_from([0, 1, 2, 9]), "length"), *draw.sizes(3)
        return {
            "input": draw.tensor(t, b, i),
            "h0": draw.tensor(b, h, scale=0.5),
            "c0": draw.tensor(b, h),
            "weight_ih": draw.tensor(gates * h, i, scale=0.3),
            "weight_hh": draw.tensor(gates * h, h, scale=0.3),
            "bias": draw.tensor(gates * h) if draw(st.booleans(), "bias") else None,
        }

    return arguments


def with_hx(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(input: Any, h0: Any, c0: Any, **weights: Any) -> Any:
        output, (h_n, c_n) = function(input, (h0, c0), **weights)
        return output, h_n, c_n

    return call


OPS = {
    "sigmoid": Op(of_input, lltm_ext.sigmoid, torch.sigmoid),
    "relu": Op(of_input, lltm_ext.relu, torch.relu, exact=True),
    "round": Op(of_input, lltm_ext.round, torch.round, exact=True),
    "binarize": Op(of_binarize, lltm_ext.binarize, binarize_reference, exact=True),
    "gemm": Op(of_gemm, lltm_ext.gemm, gemm_reference),
    "lltm_cell": Op(of_cell, lltm_ext.lltm_cell, lltm_cell_reference),
    "lltm": Op(of_sequence(3), with_hx(lltm_ext.lltm), with_hx(lltm_reference)),
    "lstm": Op(of_sequence(4), with_hx(lltm_ext.lstm), with_hx(lstm_reference)),
}


def changed(draw: Draw, x: Any) -> Any:
    """Something else in the place of an argument."""
    others: list[Any] = [None, 2.5, "x", [1.0, 2.0]]
    if isinstance(x, Tensor):
        others += [x.to("meta"), x[None], x.to(draw(st.sampled_from(OTHER_DTYPES), "other dtype"))]
        others += [x.to_sparse()]
        for dim in range(x.dim()):
            size = x.shape[dim]
            others += [x.select(dim, 0), x.narrow(dim, 0, size - 1)] if size > 0 else []
            others += [torch.cat([x, x], dim)]
    return draw(st.sampled_from(range(len(others))).map(lambda i: others[i]), "change")


def wide(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.to(torch.complex128) if x.is_complex() else x.double()


def described(name: str, arguments: dict[str, Any]) -> str:
    def text(x: Any) -> str:
        if not isinstance(x, Tensor):
            return repr(x)
        layout = list(x.stride()) if x.layout == torch.strided else x.layout
        return f"{x.dtype} {list(x.shape)} by {layout} on {x.device}".removeprefix("torch.")

    return f"{name}({', '.join(f'{key}={text(x)}' for key, x in arguments.items())})"


def check(name: str, arguments: dict[str, Any], fits: bool) -> None:
    op = OPS[name]
    try:
        found = op.call(**arguments)
    except REFUSALS as error:
        assert not fits, f"refused: {described(name, arguments)}: {error}"
        assert str(error).startswith((name, f"lltm_ext::{name}")), (
            f"unnamed: {described(name, arguments)}: {error}"
        )
        return
    expected = op.reference(**{key: wide(x) for key, x in arguments.items()})
    outputs, exact = ((x,) if isinstance(x, Tensor) else x for x in (found, expected))
    for y, e in zip(outputs, exact, strict=True):
        assert y.shape == e.shape, described(name, arguments)
        if y.is_meta:
            continue
        if op.exact:
            assert torch.equal(y, e.to(y.dtype)), f"wrong: {described(name, arguments)}"
        else:
            error, norm = (wide(y) - e).norm(), e.norm()
            info = torch.finfo(y.dtype)
            bound = FORWARD.get(y.dtype, 10 * info.eps) * norm + y.numel() * info.smallest_normal
            assert error <= bound, f"wrong by {error}, not {bound}: {described(name, arguments)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", choices=OPS, required=True)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--log", type=Path, default=Path("/dev/null"))
    args = parser.parse_args()

    @hypothesis.seed(args.seed)
    @hypothesis.settings(
        max_examples=args.examples,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.data())
    def calls(data: st.DataObject) -> None:
        draw = Draw(data, args.device)
        arguments = OPS[args.op].arguments(draw)
        count = draw(st.sampled_from([0, 0, 1, 1, 2]), "changes")
        for key in draw(st.permutations(sorted(arguments)), "arguments")[:count]:
            arguments[key] = changed(draw, arguments[key])
        args.log.write_text(described(args.op, arguments))
        check(args.op, arguments, fits=count == 0)

    calls()


if __name__ == "__main__":
    main()
