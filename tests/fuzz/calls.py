"""Random calls of the public functions: one that fits equals the reference in float64, others are refused.

    python tests/fuzz/calls.py --op gemm --examples 1000 --seed 0

A call is drawn that fits; then none, one or two of its arguments are changed. Before each call the program
writes it to --log, so that the call that ends the process is known.
"""

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

import lltm_ext
from lltm_ext._arguments import SequenceCall
from lltm_ext._loop import run_loop
from lltm_ext.cells import gru
from lltm_ext.fake_quantize import fake_quantize_reference
from lltm_ext.gemm import gemm_reference
from lltm_ext.lltm import lltm_cell_reference, lltm_reference
from lltm_ext.lstm import lstm_reference
from lltm_ext.round import binarize_reference

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from op_suite import BACKWARD, FORWARD, expanded, misaligned, negated_view, stepped, transposed

REFUSALS = (TypeError, ValueError, RuntimeError)
SIZES = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 16, 17, 31, 33, 64, 129])
SHAPES = st.lists(SIZES, max_size=4).filter(lambda shape: torch.Size(shape).numel() <= 1 << 16)
LAYOUTS = st.sampled_from([Tensor.contiguous, transposed, stepped, misaligned, expanded, negated_view])
OTHER_DTYPES = [torch.int64, torch.bool, torch.complex64, torch.float8_e5m2, *FORWARD]


class Draw:
    """Tensors and numbers of one example."""

    def __init__(self, data, device, large):
        self.data, self.device = data, device
        self.dtype = self(st.sampled_from(list(FORWARD)), "dtype")
        self.scale = self(st.sampled_from([0.0, 0.1, 1.0, *large]), "scale")
        self.generator = torch.Generator().manual_seed(self(st.integers(0, 2**32 - 1), "values"))

    def __call__(self, strategy, label=""):
        return self.data.draw(strategy, label)

    def tensor(self, *shape, scale=None):
        scale = self.scale if scale is None else scale
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
        return self(LAYOUTS, "layout")(values.to(self.device, self.dtype))

    def sizes(self, count):
        return [self(SIZES, "size") for _ in range(count)]


class Op(NamedTuple):
    arguments: Callable[[Draw], dict[str, Any]]  # of a call that fits
    call: Callable[..., Any]
    reference: Callable[..., Any]  # in float64
    exact: bool = False  # whether rounding is all that may differ
    large: tuple[float, ...] = ()  # of what size values may be, too; sums of large ones may cancel


def of_input(draw):
    return {"input": draw.tensor(*draw(SHAPES, "shape"))}


def of_binarize(draw):
    return of_input(draw) | {"threshold": draw(st.sampled_from([0.5, 0.0, -1.0]), "threshold")}


def of_gemm(draw):
    (m, n, k), batch = draw.sizes(3), draw(st.sampled_from([(), (1,), (3,)]), "batch")
    a, b = draw.tensor(*batch, m, k), draw.tensor(*batch, k, n)
    bias = draw.tensor(n) if draw(st.booleans(), "bias") else None
    activation = draw(st.sampled_from([None, "relu", "sigmoid", "tanh", "gelu"]), "activation")
    return {"a": a, "b": b, "bias": bias, "activation": activation}


def of_cell(draw):
    b, i, h = draw.sizes(3)
    return {
        "input": draw.tensor(b, i),
        "weights": draw.tensor(3 * h, h + i, scale=0.3),
        "bias": draw.tensor(3 * h),
        "old_h": draw.tensor(b, h, scale=0.5),
        "old_cell": draw.tensor(b, h),
    }


def of_sequence(gates):
    def arguments(draw):
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


def with_hx(function):
    def call(input, h0, c0, **weights):
        output, (h_n, c_n) = function(input, (h0, c0), **weights)
        return output, h_n, c_n

    return call


def of_gru(draw):
    t, b, i, h = draw(st.sampled_from([0, 1, 2, 9]), "length"), *draw.sizes(3)
    return {
        "input": draw.tensor(t, b, i),
        "hx": draw.tensor(b, h, scale=0.5),
        "weight_ih": draw.tensor(3 * h, i, scale=0.3),
        "weight_hh": draw.tensor(3 * h, h, scale=0.3),
        "bias": draw.tensor(3 * h) if draw(st.booleans(), "bias") else None,
        "b_hn": draw.tensor(h),
    }


def gru_reference(input, hx, weight_ih, weight_hh, bias, b_hn):
    output, (h_n,) = run_loop(gru, SequenceCall(input, [hx], weight_ih, weight_hh, bias, [b_hn]))
    return output, h_n


def of_fake_quantize(draw):
    shape = draw(SHAPES.filter(len), "shape")
    axis = draw(st.integers(0, len(shape) - 1), "axis")
    powers = 2.0 ** torch.randint(-6, 0, (shape[axis],), generator=draw.generator)  # divisions are exact
    return {
        "input": draw.tensor(*shape),
        "scale": powers.to(draw.device, torch.float32),
        "zero_point": draw(st.integers(-8, 7), "zero_point"),
        "quant_min": -8,
        "quant_max": 7,
        "axis": axis,
    }


def of_stochastic_round(draw):
    draw.dtype = torch.float32
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16]), "dtype")
    return of_input(draw) | {"dtype": dtype}


def neighbour(input, dtype):
    """Either neighbour in a half type is within the bounds of the input itself."""
    if dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"no half type: {dtype}")
    return input


class Layer(NamedTuple):
    """A layer with random options, and torch's with its parameters, in float64."""

    ours: torch.nn.Module
    theirs: torch.nn.Module

    def __repr__(self):
        return repr(self.ours)


def of_layer(name):
    ours, theirs = getattr(lltm_ext, name), getattr(torch.nn, name)

    def arguments(draw):
        t, b = draw(st.sampled_from([1, 2, 9]), "length"), draw(SIZES.filter(bool), "batch")
        i, h = (draw(SIZES.filter(bool), what) for what in ("inputs", "units"))
        layers = draw(st.integers(1, 3), "layers")
        bidirectional, batch_first, bias = (draw(st.booleans()) for _ in range(3))
        batched = draw(st.booleans(), "batched")
        options = {"bias": bias, "batch_first": batch_first, "bidirectional": bidirectional}
        options["num_layers"] = layers
        torch.manual_seed(draw(st.integers(0, 1000), "parameters"))
        exact = theirs(i, h, **options, dtype=torch.float64, device=draw.device)
        layer = ours(i, h, **options, dtype=draw.dtype, device=draw.device)
        layer.load_state_dict(exact.state_dict())
        exact.load_state_dict(layer.state_dict())  # rounded
        sizes = ([b, t] if batch_first else [t, b]) if batched else [t]
        found = {"layer": Layer(layer, exact), "input": draw.tensor(*sizes, i)}
        if batched and draw(st.booleans(), "packed"):
            found["lengths"] = torch.randint(1, t + 1, (b,), generator=draw.generator).tolist()
        if draw(st.booleans(), "states"):
            for state in ("h0", "c0") if name == "LSTM" else ("h0",):
                rows = [b] if batched else []
                found[state] = draw.tensor(layers * (1 + bidirectional), *rows, h, scale=0.5)
        return found

    return arguments


def run_layer(layer, input, others):
    hx = tuple(x for key, x in others.items() if key != "lengths")
    if "lengths" in others:
        lengths = others["lengths"]
        input = pack_padded_sequence(input, lengths, layer.batch_first, enforce_sorted=False)
    output, last = layer(input, *([hx] if len(hx) > 1 else hx))
    return output.data if "lengths" in others else output, *outputs_of(last)


def contiguous(others):
    """As cuDNN demands the states of torch's layers."""
    return {
        key: x.contiguous() if isinstance(x, Tensor) and x.layout == torch.strided else x
        for key, x in others.items()
    }


def straight_through_round(input):
    return input + (torch.round(input) - input).detach()


LARGE = (30.0, 1e4)
OPS = {
    "sigmoid": Op(of_input, lltm_ext.sigmoid, torch.sigmoid, large=LARGE),
    "relu": Op(of_input, lltm_ext.relu, torch.relu, exact=True, large=LARGE),
    "round": Op(of_input, lltm_ext.round, straight_through_round, large=LARGE),
    "binarize": Op(of_binarize, lltm_ext.binarize, binarize_reference, large=LARGE),
    "gemm": Op(of_gemm, lltm_ext.gemm, gemm_reference),
    "lltm_cell": Op(of_cell, lltm_ext.lltm_cell, lltm_cell_reference),
    "lltm": Op(of_sequence(3), with_hx(lltm_ext.lltm), with_hx(lltm_reference)),
    "lstm": Op(of_sequence(4), with_hx(lltm_ext.lstm), with_hx(lstm_reference)),
    "gru": Op(of_gru, gru, gru_reference),
    "fake_quantize": Op(
        of_fake_quantize, lltm_ext.fake_quantize, fake_quantize_reference, exact=True, large=LARGE
    ),
    "stochastic_round": Op(of_stochastic_round, lltm_ext.stochastic_round, neighbour),
    **{
        name: Op(
            of_layer(name),
            lambda layer, input, **others: run_layer(layer.ours, input, others),
            lambda layer, input, **others: run_layer(layer.theirs, input, contiguous(others)),
        )
        for name in ("LSTM", "GRU", "RNN")
    },
}


def changed(draw, x):
    """Something else in the place of an argument."""
    others = [None, 2.0, "x", [1.0, 2.0]]
    if isinstance(x, Tensor):
        others += [x.to("meta"), x[None], x.to(draw(st.sampled_from(OTHER_DTYPES), "other dtype"))]
        others += [x.to_sparse()]
        for dim in range(x.dim()):
            size = x.shape[dim]
            others += [x.select(dim, 0), x.narrow(dim, 0, size - 1)] if size > 0 else []
            others += [torch.cat([x, x], dim)]
    return draw(st.sampled_from(range(len(others))).map(lambda i: others[i]), "change")


def wide(x):
    if not isinstance(x, Tensor):
        return x
    return x.to(torch.complex128) if x.is_complex() else x.double()


def described(name, arguments):
    def text(x):
        if not isinstance(x, Tensor):
            return repr(x)
        layout = list(x.stride()) if x.layout == torch.strided else x.layout
        return f"{x.dtype} {list(x.shape)} by {layout} on {x.device}".removeprefix("torch.")

    return f"{name}({', '.join(f'{key}={text(x)}' for key, x in arguments.items())})"


def check(name, arguments, fits, saturates, generator):
    op, call = OPS[name], described(name, arguments)
    leaves = {key: leaf(x) for key, x in arguments.items()}
    try:
        found = outputs_of(op.call(**leaves))
    except REFUSALS as error:
        assert not fits, f"refused: {call}: {error}"
        names_op = str(error).lower().startswith((name.lower(), f"lltm_ext::{name}"))
        assert names_op or str(error) == torchs_error(arguments), f"unnamed: {call}: {error}"
        return
    # What fits, torch computes below.
    if not fits and (refusal := torchs_error(arguments)) is not None:
        assert "sequence length to be larger than 0" in refusal, f"torch refuses {call}: {refusal}"
        return
    exact_leaves = {key: leaf(wide(x)) for key, x in arguments.items()}
    exact = outputs_of(op.reference(**exact_leaves))
    assert [y.shape for y in found] == [e.shape for e in exact], call
    for y, e in zip(found, exact, strict=True):
        if op.exact and not y.is_meta:
            assert torch.equal(y, e.to(y.dtype)), f"wrong: {call}"
        else:
            check_near(y, e, bound_of(FORWARD, y, arguments), call)
    # Where functions saturate, little is left of a gradient, and rounded values give it large errors.
    if not fits or saturates:
        return
    cotangents = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in found]
    of_ours, of_theirs = (parameters_of(arguments, whose) for whose in ("ours", "theirs"))
    gradients = gradients_of([*leaves.values(), *of_ours], found, cotangents)
    expected = gradients_of([*exact_leaves.values(), *of_theirs], exact, cotangents)
    for g, e in zip(gradients, expected, strict=True):
        # Sums may cancel. The norm of many still says how large their terms are, that of few does not. In a
        # layer terms are no larger than the cotangents, because torch initializes its weights to at most 1.
        few = of_ours and g.numel() < 8
        terms = sum(c.double().norm().item() for c in cotangents) if few else 0.0
        check_near(g, e, bound_of(BACKWARD, g, arguments), f"gradient of {call}", terms)


def torchs_error(arguments):
    """What torch's layer says to the same call."""
    if "layer" not in arguments:
        return None
    others = dict(arguments)
    layer, input = others.pop("layer"), others.pop("input")
    dtype = next(layer.ours.parameters()).dtype
    try:
        run_layer(copy.deepcopy(layer.theirs).to(dtype), input, contiguous(others))
    except REFUSALS as error:
        return str(error)
    return None


def leaf(x):
    is_leaf = isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
    return x.detach().requires_grad_(x.dtype in FORWARD) if is_leaf else x


def outputs_of(result):
    return (result,) if isinstance(result, Tensor) else result


def parameters_of(arguments, whose):
    if "layer" not in arguments:
        return []
    return [p for _, p in sorted(getattr(arguments["layer"], whose).named_parameters())]


def gradients_of(leaves, outputs, cotangents):
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    used = [(y, g.to(y)) for y, g in zip(outputs, cotangents, strict=True) if y.requires_grad]
    if not used:
        return [torch.zeros_like(x) for x in tensors]
    outputs, cotangents = zip(*used, strict=True)
    return torch.autograd.grad(outputs, tensors, cotangents, allow_unused=True, materialize_grads=True)


def bound_of(bounds, found, arguments):
    """That of the least precise dtype: a state may be float32 where the input is of a half type."""
    tensors = [found, *(x for x in arguments.values() if isinstance(x, Tensor))]
    dtypes = [x.dtype for x in tensors if x.is_floating_point() or x.is_complex()]
    return max(bounds.get(dtype, 10 * torch.finfo(dtype).eps) for dtype in dtypes)


def check_near(found, exact, bound, what, terms=0.0):
    """Whether the error is within three times the bound of a norm: the larger of exact's and `terms`."""
    if found.is_meta:
        return
    error, norm = (wide(found) - exact).norm(), max(exact.norm().item(), terms)
    allowed = 3 * bound * norm + found.numel() * torch.finfo(found.dtype).smallest_normal
    assert error <= allowed, f"wrong by {error}, not {allowed}: {what}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", choices=OPS, required=True)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--log", type=Path, default=Path("/dev/null"))
    args = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False  # the bounds are those of float32

    @hypothesis.seed(args.seed)
    @hypothesis.settings(
        max_examples=args.examples,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.data())
    def calls(data):
        draw = Draw(data, args.device, OPS[args.op].large)
        arguments = OPS[args.op].arguments(draw)
        count = draw(st.sampled_from([0, 0, 1, 1, 2]), "changes")
        # torch packs sequences, and refuses what it can't pack by errors of its own: these stay as they are.
        kept = arguments.keys() if "lengths" in arguments else {"layer"}
        others = draw(st.permutations(sorted(arguments.keys() - kept)), "arguments")[:count]
        for key in others:
            arguments[key] = changed(draw, arguments[key])
        args.log.write_text(described(args.op, arguments))
        check(args.op, arguments, not others, draw.scale > 0.1, draw.generator)

    calls()


if __name__ == "__main__":
    main()
