"""Cells derived from Python: their C++ against torch's autograd, what they save, and what is refused."""

import ctypes
import hashlib
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import lltm_ext
from lltm_ext import cells
from lltm_ext._formula.declaration import Declaration, arguments_of, call
from lltm_ext._formula.derive import derive

# Cells of the package, and how many values their forward must save.
SAVED = {
    "rnn_tanh": 1,
    "rnn_relu": 1,
    "lltm": 4,
    "cifg": 4,
    "peephole_lstm": 5,
    "gru": 5,
    "ugrnn": 3,
    "slstm": 10,
}
SAVED |= {"indrnn": 1, "cfc": 3}
SOURCES = Path(__file__).parents[1] / "src"
POINTS = 200
CELLS = {
    name: (getattr(cells, name).function, getattr(cells, name).declared, saved)
    for name, saved in SAVED.items()
}


def cell(saved, gates, **options):
    """Registers a function as another one."""

    def register(function):
        CELLS[function.__name__] = function, Declaration(function.__name__, gates, **options), saved
        return function

    return register


@cell(5, gates=4, states=("c",))
def lstm(x, s):
    i, f, o = torch.sigmoid(x[0]), torch.sigmoid(x[1]), torch.sigmoid(x[3])
    g = torch.tanh(x[2])
    c = f * s.c + i * g
    return o * torch.tanh(c), (c,)


@cell(4, gates=2)
def light_gru(x, h):
    update = torch.sigmoid(x[0])
    return update * h + (1 - update) * torch.relu(x[1]), ()


@cell(3, gates=2, states=("c",))
def janet(x, s, beta=1.0):
    c = torch.sigmoid(x[0]) * s.c + (1 - torch.sigmoid(x[0] - beta)) * torch.tanh(x[1])
    return c, (c,)


@cell(5, gates=4, states=("c",), inputs=("keep_h", "keep_c"))
def zoneout_lstm(x, h, s, u):
    new_h, (new_c,) = lstm(x, s)
    return torch.where(u.keep_h > 0, h, new_h), (torch.where(u.keep_c > 0, s.c, new_c),)


@cell(0, gates=2, states=("count", "index", "none"), parameters=("unused",))
def no_ops(x, s):
    return x[1], [s.index, s.count, s.none * 0]


@cell(5, gates=4, states=("c",), inputs=("reset",))
def lstm_with_reset(x, s, u):
    i, f, g, o = x
    c = torch.sigmoid(f) * (s[0] * (1 - u[0])) + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


# Functions of one, two or three numbers, as cells without states: the rows of the tables of ops.
OPS = {
    "add": lambda a, b: torch.add(a, b, alpha=3),
    "sub": lambda a, b: torch.sub(a, b, alpha=2) - 1,
    "rsub": lambda a, b: torch.rsub(a, b, alpha=0.5) + (4 - a),
    "mul": lambda a, b: 2 * a * b * -1,
    "div": lambda a, b: a / b + a / 3 + 5 / b + 1 / a,
    "reciprocal": lambda a: torch.reciprocal(a) + 1 / a,
    "neg": lambda a: torch.neg(-a) - 2 * a,
    "abs": lambda a: abs(a),
    "sign": lambda a, b: torch.sign(a) * b + torch.sgn(b),
    "maximum": lambda a, b: torch.maximum(a, b),
    "minimum": lambda a, b: torch.minimum(a, b),
    "max": lambda a, b: torch.max(a, b) - torch.min(a, -b),
    "where": lambda a, b, c: torch.where(a > b, c, a) + torch.where(b <= 1, 2.0, c),
    "compare": lambda a, b, c: c * ((a < b).double() + (a >= 1) + (a == b).to(a.dtype) * 3 + (a != 0.5)),
    "logic": lambda a, b: a * torch.where((a > 0) & (b > 0) | ~(a < 1) ^ (b < 0), b, 1),
    "logical": lambda a, b: torch.where(torch.logical_xor(torch.logical_or(a, b), a > 1), a, 2 * b),
    "logical_and": lambda a, b: torch.where(torch.logical_and(a, b > 0), a, torch.logical_not(b) * a),
    "isnan": lambda a, b: torch.where(torch.isnan(a - b), b, a).masked_fill(a > 2, 0.5),
    "bool": lambda a, b: torch.where(a.bool().detach(), b, a + 1) * torch.where(a > b, a > 1, 0.5),
    "lerp": lambda a, b, c: torch.lerp(a, b, c) + torch.lerp(b, a, 0.25),
    "addcmul": lambda a, b, c: torch.addcmul(a, b, c, value=0.5) + torch.addcdiv(a, b, 1 + c * c, value=2),
    "clamp": lambda a: a.clamp(-1, 3) + a.clamp(min=0.5) + torch.clamp_max(a, 1),
    "clamp_tensor": lambda a, b: torch.clamp(a, min=b) + torch.clamp(a, b - 1, b + 1) + a.clamp_min(b),
    "hardtanh": lambda a: F.hardtanh(a) + F.hardtanh(a, -3, 20),
    "relu6": lambda a: F.relu6(a),
    "hardsigmoid": lambda a: F.hardsigmoid(a),  # torch's derivative has the 1/6 of float32
    "hardswish": lambda a: F.hardswish(torch.where(a.abs() == 3, a + 1, a)),  # torch's changed there
    "threshold": lambda a: F.threshold(a, 1, 20),
    "leaky_relu": lambda a: F.leaky_relu(a) + F.leaky_relu(a, 0.5),
    "relu": lambda a: torch.relu(a),
    "elu": lambda a: F.elu(a) + F.elu(a, 0.5),
    "selu": lambda a: F.selu(a),
    "celu": lambda a: F.celu(a, 2.0),
    "silu": lambda a: F.silu(a),
    "mish": lambda a: F.mish(a),
    "gelu": lambda a: F.gelu(a),
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
    "softsign": lambda a: F.softsign(a),
    "tanhshrink": lambda a: F.tanhshrink(a),
    "sigmoid": lambda a: torch.sigmoid(a),
    "tanh": lambda a: torch.tanh(a),
    "softplus": lambda a: F.softplus(a) + F.softplus(a, beta=2, threshold=3),
    "logsigmoid": lambda a: F.logsigmoid(a),
    "log_of_sigmoid": lambda a: torch.log(torch.sigmoid(a.clamp(-100, 100))),
    "logaddexp": lambda a, b: torch.logaddexp(a, b),
    "exp": lambda a, b: torch.exp(a.clamp(max=30)) + torch.exp2(b.clamp(max=30)),
    "expm1": lambda a: torch.expm1(a.clamp(max=30)),
    "log": lambda a, b: torch.log(abs(a)) + torch.log2(b * b) * torch.log10(abs(b) + 1),
    "log1p": lambda a: torch.log1p(abs(a)),
    "sqrt": lambda a, b: torch.sqrt(a * a + 1) + abs(b) ** 0.5,
    "rsqrt": lambda a: torch.rsqrt(a * a + 1) + (a * a + 2) ** -0.5,
    "sin": lambda a, b: torch.sin(a) * torch.cos(b),
    "erf": lambda a: torch.erf(a),
    "sinh": lambda a, b: torch.sinh(a.clamp(-9, 9)) * torch.cosh(b.clamp(-9, 9)),
    "atan": lambda a: torch.atan(a),
    "floor": lambda a, b: torch.floor(a) * b + torch.ceil(b) * (a.detach() // 0.1),
    "trunc": lambda a, b: torch.trunc(a) * b + torch.frac(b) * a,
    "round_half": lambda a, b: torch.round(2 * a) / 2 * b,  # ties to even
    "fmod": lambda a, b: torch.fmod(a, 0.75) + torch.fmod(a, abs(b) + 0.5),
    "div_rounded": lambda a, b: b * (a / 3).div(0.5, rounding_mode="floor") + a.div(b, rounding_mode="trunc"),
    "heaviside": lambda a, b: b * torch.heaviside(a.detach(), torch.full_like(a, 0.5)),
    "straight_through": lambda a, b: lltm_ext.round(a) * b + lltm_ext.floor(b) - lltm_ext.trunc(a + b),
    "binarized": lambda a, b: sum(lltm_ext.binarize(a * b, 0.5, -1, 2, g) for g in ("identity", "tanh")),
    "binarized_clipped": lambda a: lltm_ext.binarize(a, 0.3, -1, 2, "clipped"),
    "spike": lambda a, b: lltm_ext.spike(a * b) + b * lltm_ext.spike(a, "sigmoid", 3),
    "spike_fast": lambda a, b: lltm_ext.spike(a - b, "fast_sigmoid") * lltm_ext.spike(b, "triangle"),
    "power": lambda a: a**2 + a**3 + a**4 + a**-1 + torch.square(a) + a**0 + a**1,
    "power_of": lambda a, b: 2.0 ** a.clamp(-9, 9) + abs(a) ** 1.5 + (abs(a) + 0.5) ** b.clamp(-9, 9),
    "power_zero": lambda a, b: torch.pow(abs(a), torch.relu(b.clamp(max=9))),
    "detach": lambda a, b: a * b.detach() + a.clone(),
    "constants": lambda a: a + torch.tensor(0.5) * torch.zeros_like(a) + torch.full_like(a, 2) * 1 + 0,
    "infinite": lambda a, b: torch.where(a < math.inf, torch.maximum(a * 1, b), math.nan).clamp(-math.inf),
}


def op_cell(name):
    function = OPS[name]
    operands = function.__code__.co_argcount
    return lambda x: function(*x[:operands]), Declaration(name, operands)


DERIVED = {name: derive(function, declared) for name, (function, declared, _) in CELLS.items()}
DERIVED |= {name: derive(*op_cell(name)) for name in OPS}
WIDE = [name for name, cell in DERIVED.items() if cell.wide]  # with another struct for half types
FUNCTIONS = {name: CELLS[name][0] if name in CELLS else op_cell(name)[0] for name in DERIVED}

HARNESS = """
#include "common/math.h"

namespace lltm_ext {
template <class Cell, typename A>
struct CellInputs {
  A x[Cell::kGates], r[Cell::kGates], h, parameters[Cell::kParameters + 1], steps[Cell::kStepInputs + 1];
};
template <class Cell, typename A>
struct CellGradients {
  A x[Cell::kGates], r[Cell::kGates], h, parameters[Cell::kParameters + 1];
};

// Rows of x, r, h, s, p, u, grad_h, grad_s; and of the new h, states, the gradients of x, r, h, s, p.
template <class Cell, typename A>
void run(long count, const double* in, double* out) {
  constexpr int kArray = Cell::kStates ? Cell::kStates : 1, kSaved = Cell::kSaved ? Cell::kSaved : 1;
  constexpr int kSeparate = Cell::kSeparate ? Cell::kGates : 0;
  for (long n = 0; n < count; ++n) {
    CellInputs<Cell, A> inputs, known{};
    CellGradients<Cell, A> grads;
    A states[kArray], grad_states[kArray], saved[kSaved];
    for (int i = 0; i < Cell::kGates; ++i) inputs.x[i] = *in++;
    for (int i = 0; i < kSeparate; ++i) inputs.r[i] = *in++;
    inputs.h = *in++;
    for (int i = 0; i < Cell::kStates; ++i) states[i] = *in++;
    for (int i = 0; i < Cell::kParameters; ++i) known.parameters[i] = inputs.parameters[i] = *in++;
    for (int i = 0; i < Cell::kStepInputs; ++i) known.steps[i] = inputs.steps[i] = *in++;
    const A grad_h = *in++;
    for (int i = 0; i < Cell::kStates; ++i) grad_states[i] = *in++;
    grads.h = 0;
    for (int i = 0; i < Cell::kGates && !Cell::kRecurrent; ++i) known.x[i] = inputs.x[i];
    if (!Cell::kRecurrent) known.h = inputs.h;
    *out++ = Cell::template forward<ExactMath, A>(inputs, states, saved);
    for (int i = 0; i < Cell::kStates; ++i) *out++ = states[i];
    Cell::template backward<ExactMath, A>(saved, known, grad_h, grad_states, grads);
    for (int i = 0; i < Cell::kGates; ++i) *out++ = grads.x[i];
    for (int i = 0; i < kSeparate; ++i) *out++ = grads.r[i];
    *out++ = grads.h;
    for (int i = 0; i < Cell::kStates; ++i) *out++ = grad_states[i];
    for (int i = 0; i < Cell::kParameters; ++i) *out++ = grads.parameters[i];
  }
}
"""
EXPORT = """
namespace cell_{name} {{
{source}
extern "C" void {name}_double(long n, const double* in, double* out) {{ run<Cell, double>(n, in, out); }}
extern "C" void {name}_float(long n, const double* in, double* out) {{ run<Cell, float>(n, in, out); }}
}}
"""


def library_of(sources, folder):
    """The structs of cells, by their names, as one library of C functions."""
    if not shutil.which("g++"):
        pytest.skip("needs g++ to compile the cells for the host")
    texts = [EXPORT.format(name=name, source=source) for name, source in sources.items()]
    (folder / "cells.cpp").write_text(HARNESS + "".join(texts) + "}\n")
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Werror", "-shared", "-fPIC"]
    command = ["g++", *options, f"-I{SOURCES}", "cells.cpp", "-o", "cells.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "cells.so"))


def run_in_library(library, function, rows, results):
    """A function of a library on rows of float64, each of which gives a row of so many results."""
    rows, found = rows.contiguous(), torch.empty(len(rows), results, dtype=torch.float64)
    getattr(library, function)(
        ctypes.c_long(len(rows)), ctypes.c_void_p(rows.data_ptr()), ctypes.c_void_p(found.data_ptr())
    )
    return list(found.unbind(1))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    sources = {name: cell.struct.source for name, cell in DERIVED.items()}
    sources |= {f"{name}_half": DERIVED[name].half_struct.source for name in WIDE}
    return library_of(sources, tmp_path_factory.mktemp("derived"))


def points(name):
    """The values of x, r, h, s, p and u in columns of random numbers, each a tensor [POINTS]."""
    generator = torch.Generator().manual_seed(int.from_bytes(name.encode()[:4], "big"))
    return {
        argument: [
            torch.randn(POINTS, generator=generator, dtype=torch.float64) * (2 if argument == "x" else 1)
            for _ in nodes
        ]
        for argument, nodes in DERIVED[name].leaves.items()
    }


SPECIAL = (-1000.0, -30, -20, -3, -1, -0.5, -1e-8, -0.0, 0, 1e-8, 0.5, 1, 2, 3, 6, 20, 20.5, 30, 1000)


def special_points(name):
    """All combinations of two special values, the third in another order."""
    a, b = (grid.flatten() for grid in torch.meshgrid(*2 * [torch.tensor(SPECIAL).double()], indexing="ij"))
    values = {argument: [] for argument in ("x", "r", "s", "p", "u")}
    values["x"] = [a, b, a.roll(7)][: len(DERIVED[name].leaves["x"])]
    return {**values, "h": [torch.zeros_like(a)]}


def cotangents(name, values):
    generator = torch.Generator().manual_seed(1)
    shape = values["x"][0].shape
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in DERIVED[name].outputs]


def flat(values):
    return [tensor for argument in "xrhsp" for tensor in values[argument]]


def autograd(name, values, grads):
    """[new h, new states, gradients of x, r, h, s and p] by torch."""
    leaves = {argument: [t.clone().requires_grad_() for t in tensors] for argument, tensors in values.items()}
    declared = DERIVED[name].declaration
    arguments = {**leaves, "h": leaves["h"][0], "u": values["u"]}
    function = FUNCTIONS[name]
    h, states = call(function, declared, arguments_of(function, declared), arguments)
    inputs = flat(leaves)
    found = torch.autograd.grad([h, *states], inputs, grads, allow_unused=True, materialize_grads=True)
    return [x.detach() for x in (h, *states, *found)]


def in_cpp(compiled, name, values, grads, kind):
    # u follows p in a row, and the gradients follow u
    rows = torch.stack([*flat(values), *values["u"], *grads], dim=1)
    return run_in_library(compiled, f"{name}_{kind}", rows, len(DERIVED[name].outputs) + len(flat(values)))


TOLERANCE = {"hardsigmoid": 1e-7, "softplus": 1e-8}  # torch's softplus is linear from 20 on
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def assert_near(name, actual, expected, tolerance=1e-12):
    tolerance = TOLERANCE.get(name, tolerance)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        near = torch.isclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
        at = (~near).nonzero().flatten()[:3].tolist()
        assert near.all(), f"result {i} at {at}: got {a[at].tolist()}, expected {b[at].tolist()}"


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("kind,tolerance", [("double", 1e-12), ("float", 2e-4)])
def test_the_cpp_of_a_cell_equals_autograd(compiled, name, kind, tolerance):
    values = points(name)
    grads = cotangents(name, values)
    assert_near(name, in_cpp(compiled, name, values, grads, kind), autograd(name, values, grads), tolerance)


AT_BOUNDS = ("clamp", "clamp_tensor", "exp", "expm1")  # special points are at the bounds of these ops' clamp


@pytest.mark.parametrize("make", [points, special_points])
@pytest.mark.parametrize("name", OPS)
def test_the_cpp_of_an_op_equals_autograd(compiled, name, make):
    if make is special_points and name in AT_BOUNDS and TORCH >= (2, 15):
        pytest.skip("torch 2.15 changed clamp's derivative at its bounds")
    values = make(name)
    grads = cotangents(name, values)
    assert_near(name, in_cpp(compiled, name, values, grads, "double"), autograd(name, values, grads))


@pytest.mark.parametrize("name", WIDE)
def test_the_cpp_for_half_types_equals_autograd(compiled, name):
    """With its saved values in float64 and in float32."""
    values = points(name)
    grads = cotangents(name, values)
    expected = autograd(name, values, grads)
    for kind, tolerance in (("half_double", 1e-12), ("half_float", 1e-3)):
        assert_near(name, in_cpp(compiled, name, values, grads, kind), expected, tolerance)


@pytest.mark.parametrize("name", DERIVED)
def test_the_nodes_on_whole_tensors_equal_autograd(name):
    values = points(name)
    grads = cotangents(name, values)
    outputs, saved = DERIVED[name].forward(values)
    gradients = DERIVED[name].backward(saved, values, grads)
    shaped = [x.expand(POINTS) for x in (*outputs, *flat(gradients))]
    assert_near(name, shaped, autograd(name, values, grads))


@pytest.mark.parametrize("name", CELLS)
def test_what_a_cell_saves(name):
    assert DERIVED[name].struct.saved == CELLS[name][2], DERIVED[name].saved_names


def test_clamp_passes_the_whole_gradient_at_its_bounds():
    """As torch's does up to 2.14; in 2.15 it is 0 or half of it there."""
    derived = derive(lambda x: x[0].clamp(-1, 3), Declaration("cell", gates=1))
    x = torch.tensor([-2.0, -1.0, 0.0, 3.0, 4.0])
    values = {"x": [x], "r": [], "h": [torch.zeros(5)], "s": [], "p": [], "u": []}
    _, saved = derived.forward(values)
    gradients = derived.backward(saved, values, [torch.ones(5)])
    assert gradients["x"][0].tolist() == [0, 1, 1, 1, 0]


@pytest.mark.parametrize(
    "formula,stay",
    [
        (lambda x, h: torch.tanh(x[0]) * torch.sigmoid(h), True),
        (lambda x: torch.sigmoid(x[0]), False),
        (lambda x: torch.exp(x[0]) - 1, True),
        (lambda x, h: x[0] / h, False),  # NaN
        (lambda x: torch.sqrt(x[0]), False),  # whose derivative at 0 is infinite
        (lambda x, h: torch.where(x[0] > 0, x[0] / h, h), False),  # the other branch's derivative is NaN
    ],
)
def test_zeros_stay(formula, stay):
    """Kernels add units of zeros to a hidden size that they do not take."""
    assert derive(formula, Declaration("cell", gates=1)).zeros_stay is stay


def test_states_of_zeros_stay():
    def counts(x, s):
        return torch.tanh(x[0]) * s.n, (s.n + 1,)

    assert not derive(counts, Declaration("cell", gates=1, states=("n",))).zeros_stay


def test_saved_values_have_the_users_names():
    assert DERIVED["lstm"].saved_names == ("i", "f", "o", "g", "s.c")
    assert DERIVED["gru"].saved_names == ("reset", "update", "r[2] + p.b_hn", "candidate", "h")


@pytest.mark.parametrize("scale", [1, 5])
@pytest.mark.parametrize("name", CELLS)
def test_saved_values_rounded_to_bfloat16_blow_up_no_error(name, scale):
    values = {argument: [x * scale for x in tensors] for argument, tensors in points(name).items()}
    if name == "slstm":
        values["s"][1] = values["s"][1].abs() + 1  # the normaliser, which is positive
    grads = cotangents(name, values)
    _, saved = DERIVED[name].forward(values)
    rounded = [x if x.dtype == torch.bool else x.bfloat16().double() for x in saved]
    exact = DERIVED[name].backward(saved, values, grads)
    for a, b in zip(flat(DERIVED[name].backward(rounded, values, grads)), flat(exact), strict=True):
        assert (a - b).abs().max() <= 6 * 2**-8 * b.abs().max()


def test_a_divisor_is_saved_and_not_computed_again():
    def cell(x):
        z = torch.sigmoid(x[0])
        rest = 1 - z
        return z * torch.tanh(x[1]) / rest

    assert "rest" in derive(cell, Declaration("cell", 2)).saved_names


def test_the_numbers_of_ops():
    assert (DERIVED["lstm"].forward_ops, DERIVED["lstm"].backward_ops) == (9, 26)
    assert DERIVED["gru"].reads_h and not DERIVED["lstm"].reads_h


WEIGHT = torch.nn.Parameter(torch.ones(3))


def swallow(x, s):
    try:
        return float(x[0]), (s.c,)
    except RuntimeError:
        return x[0], (s.c,)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def no_gradient(x):
    with torch.no_grad():
        return torch.tanh(x[0])


def changes_its_argument(x, s):
    c = s.c
    c += x[0]
    return c, (c,)


LINEAR = torch.nn.Linear(3, 3)
REFUSALS = {
    RuntimeError: {
        "branch": (
            lambda x: x[0] if x[0] > 0 else x[1],
            r"branches .* on x\[0\] > 0, which.*torch.where(?s:.*)if x\[0\] > 0 else",
        ),
        "max": (lambda x: max(x), r"torch.maximum(?s:.*)max\(x\)"),
        "item": (lambda x: x[0] * x[1].item(), r"reads the value of x\[1\] .*torch's"),
        "float": (lambda x: math.tanh(x[0]), r"reads the value of x\[0\]"),
        "swallowed": (swallow, r"reads the value(?s:.*)return float\(x\[0\]\), \(s.c,\)"),
        "tolist": (lambda x: x[0] * x[1].tolist(), "reads a value"),
        "cpu": (lambda x: x[0].cpu(), "moves it to a device"),
        "parameter": (
            lambda x: x[0] * WEIGHT,
            r"uses WEIGHT of shape \[3\] on cpu.*parameters=(?s:.*)x\[0\] \* WEIGHT",
        ),
        "parameter_only": (lambda x: torch.tanh(WEIGHT), "uses WEIGHT"),
        "parameter_returned": (lambda x, s: (WEIGHT, (s.c,)), r"uses a tensor of shape \[3\](?s:.*)WEIGHT, "),
        "made_inside": (
            lambda x: x[0] * torch.ones(4),
            r"calls ones, which makes a tensor; write a Python number",
        ),
        "list_inside": (lambda x: x[0] * torch.tensor([1.0]), "makes a tensor"),
        "mean": (lambda x: x[0] - x[0].mean(), "calls mean, a reduction over units"),
        "sum": (lambda x: torch.sum(x[0], -1), "calls sum, a reduction"),
        "softmax": (lambda x: torch.softmax(x[0], 0), "calls softmax, a reduction"),
        "Linear": (
            lambda x: LINEAR(x[0]),
            "a product over units; .*units.linear.v, w.name. multi",
        ),
        "stack": (lambda x: torch.stack([*x]), "calls stack, a reduction"),
        "cat": (lambda x: torch.cat([*x]), "calls cat, a reduction"),
        "layer_norm": (lambda x: F.layer_norm(x[0], ()), "calls layer_norm, a reduction"),
        "matmul": (lambda x: x[0] @ x[1], "matmul.*one hidden unit of one row"),
        "mm": (lambda x: torch.mm(x[0], x[1]), "calls mm, a product over units"),
        "view": (lambda x: x[0].view(1), "calls view, which changes a shape"),
        "rand": (lambda x: x[0] * torch.rand(()), r"calls rand, which draws random.*inputs="),
        "rand_like": (lambda x: torch.rand_like(x[0]), "calls rand_like, which draws random"),
        "dropout": (lambda x: F.dropout(x[0]), "calls bernoulli_, .*dropout"),
        "in_place": (lambda x: x[0].add_(1), r"calls add_, .* in place"),
        "augmented": (changes_its_argument, r"calls add_.*a = a \+ b(?s:.*)c \+= x\[0\]"),
        "out": (lambda x: torch.tanh(x[0], out=x[1]), "in place"),
        "other_op": (lambda x: torch.lgamma(x[0]), "calls lgamma.*none of.*sigmoid"),
        "decimals": (lambda x: torch.round(x[0], decimals=1), "calls round with decimals"),
        "own_function": (lambda x: Doubled.apply(x[0]), "autograd.Function Doubled, whose.*lltm_ext.spike"),
        "no_grad": (no_gradient, r"calls tanh under torch.no_grad\(\).*detach"),
        "type": (lambda x: x[0].half(), "converts to torch.float16"),
        "where": (
            lambda x, u: torch.where(u.mask, x[0], x[1]),
            r"calls where on u.mask, a number; write a condition like u.mask > 0",
        ),
        "bitwise": (lambda x: torch.bitwise_and(x[0], x[1]), "takes conditions"),
        "conditions": (lambda x: x[0] * ((x[0] > 0) * (x[1] > 0)), "combine them by &"),
    },
    TypeError: {
        "two_indices": (lambda x: x[0, 0], r"x\[0, 0\]: expected one number, as in x\[0\]"),
        "softmax of all": (
            lambda x: torch.softmax(x, 0)[0],
            "calls softmax on several values at once, a reduction",
        ),
        "numpy": (lambda x: x[0].numpy(), "converts a tensor to NumPy.*use torch's functions"),
        "nothing": (lambda x, s: None, "got None"),
        "number": (lambda x, s: (0.5, (s.c,)), "the new h to be a tensor, got 0.5"),
        "number_state": (lambda x: (x[0], (1,)), "the new c to be a tensor, got 1"),
        "nested": (lambda x, s: ((x[0],), (s.c,)), r"return \(h, \(c,\)\), got a tuple of 2"),
        "condition": (lambda x, s: (x[0] > 0, (s.c,)), r"new h to be a number, got the condition"),
        "unpack": (lambda x: (lambda a: a)(*x), "takes 1 positional argument but 2"),
        "argument": (
            lambda x, y: x[0],
            "any of x, r, h, s, p, u, w, units, got the argument y",
        ),
        "variadic": (lambda *x: x[0], r"got the argument \*x"),
    },
    ValueError: {
        "too_few_states": (lambda x: x[0], r"return \(h, \(c,\)\), got 0 states"),
        "too_many_states": (lambda x, s: (x[0], (s.c, s.c)), r"\(h, \(c,\)\), got 2 states"),
        "together": (lambda x, r: x[0] + r[0], "the argument r needs separate=True"),
    },
    IndexError: {
        "range": (lambda x: x[5], r"x\[5\] is out of range: x has 2 values(?s:.*)x\[5\]"),
        "index": (lambda x: x[0][0], r"indexes a value: x\[0\] is one number"),
    },
    AttributeError: {
        "unknown": (lambda x, p: x[0] * p.bias, "p.bias does not exist: p has p.w"),
        "unknown_state": (lambda x, s: x[0] * s.h, "s.h does not exist: s has s.c"),
    },
}
CASES = {name: (error, *case) for error, cases in REFUSALS.items() for name, case in cases.items()}


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_a_cell_is_refused(name):
    error, function, pattern = CASES[name]
    options = {"states": ("c",), "parameters": ("w",), "inputs": ("mask",)}
    with pytest.raises(error, match="^my_cell: .*" + pattern):
        derive(function, Declaration("my_cell", 2, **options))


def test_an_argument_may_be_empty():
    def unused(x, r, h, s, p, u):
        return x[0] + r[0], ()

    def missing(x, s):
        return x[0] + s.c

    assert derive(unused, Declaration("my_cell", 1, separate=True)).saved == []
    with pytest.raises(AttributeError, match=r"^my_cell: s.c does not exist: the cell declares no states="):
        derive(missing, Declaration("my_cell", 1))


PRINT_SOURCES = """
import hashlib, sys
import test_derive
text = "".join(cell.struct.source for cell in test_derive.DERIVED.values())
print(hashlib.sha256(text.encode()).hexdigest(), "torch._dynamo" in sys.modules)
"""


def test_the_text_is_the_same_in_every_process_and_needs_no_compiler_of_torch():
    text = "".join(cell.struct.source for cell in DERIVED.values())
    expected = f"{hashlib.sha256(text.encode()).hexdigest()} False"
    folders = os.pathsep.join([str(Path(__file__).parent), str(Path(lltm_ext.__file__).parents[1])])
    another_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": another_seed, "PYTHONPATH": folders}
    command = [sys.executable, "-c", PRINT_SOURCES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")
    assert done.stdout.strip() == expected, done.stderr
