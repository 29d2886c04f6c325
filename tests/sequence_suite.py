"""Tests that every recurrence must pass. Its test classes inherit them, as those of an op do (op_suite.py).

`SequenceSuite` tests the function of a sequence, `lltm` or `lstm`, whose arguments differ only in the number
of gates. `LayerSuite` tests the layer, `LLTM` or `LSTM`, which is called like nn.LSTM.
"""

import copy
import dataclasses
import functools
import itertools
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from op_suite import (
    BACKWARD,
    DOUBLE,
    FLOATING,
    FORWARD,
    Call,
    Make,
    ModuleSuite,
    SmoothSuite,
    assert_all_near,
    assert_checkpointing_frees,
    assert_near,
    assert_same_bits,
    cotangents,
    forward_and_gradients,
    needs_cuda,
    pairwise,
    sum_of_squares,
)
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import lltm_ext
from lltm_ext._custom_cell import CustomCellFunction
from lltm_ext.lltm import lltm_cell_reference, lltm_reference
from lltm_ext.lstm import lstm_reference


class Recorder(TorchDispatchMode):
    """The names of the ops that run below it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func).removesuffix(".default"))
        return func(*args, **(kwargs or {}))

    @property
    def ours(self):
        return [n.removeprefix("lltm_ext.") for n in self.names if n.startswith("lltm_ext.")]


# ---- lltm and lstm, called in one way ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Recurrence:
    name: str
    gates: int
    function: Callable
    algorithm_of: Callable
    reference: Callable
    # (h, c) of x, h, c, weight_ih, weight_hh and bias, by code that `reference` does not share
    step: Callable

    def __call__(self, *tensors, sizes=None, reverse=False, algorithm="auto"):
        """(output, h_n, c_n) of (input, h0, c0, weight_ih, weight_hh, bias)."""
        return getattr(torch.ops.lltm_ext, self.name)(*tensors, sizes, reverse, algorithm)

    def bidirectional(self, input, forward, reverse, sizes=None, algorithm="auto"):
        """The op of a layer's two directions: (output, h_n, c_n) of each."""
        op = getattr(torch.ops.lltm_ext, f"{self.name}_bidirectional")
        return op(input, forward, reverse, sizes, algorithm)

    def one_by_one(self, input, forward, reverse, sizes=None, algorithm="auto"):
        """As bidirectional, by two calls."""
        return [
            *self(input, *forward, sizes=sizes, algorithm=algorithm),
            *self(input, *reverse, sizes=sizes, reverse=True, algorithm=algorithm),
        ]

    def bidirectional_loop(self, input, forward, reverse, sizes=None):
        """As bidirectional, by the reference."""
        return [
            *self.loop(input, *forward, sizes=sizes),
            *self.loop(input, *reverse, sizes=sizes, reverse=True),
        ]

    def bidirectional_call(self, make, length, batch, hidden, input_size=20, sizes=None):
        (input, *forward), (_, *reverse) = (
            self.call(make, length, batch, hidden, input_size, sizes=sizes).args for _ in range(2)
        )
        return Call(input, forward, reverse, sizes)

    def plan(self, *tensors, sizes=None, algorithm="auto", backward=False):
        return getattr(torch.ops.lltm_ext, f"{self.name}_algorithm")(*tensors, sizes, algorithm, backward)

    def loop(self, input, h, c, *weights, sizes=None, reverse=False):
        """As the op, by the reference, which takes no packed rows and no reverse direction."""
        if sizes is None:
            output, (h, c) = self.reference(input.flip(0) if reverse else input, (h, c), *weights)
            return output.flip(0) if reverse else output, h, c
        outputs = []
        steps = input.split(sizes)
        for x in reversed(steps) if reverse else steps:
            n = len(x)
            output, (new_h, new_c) = self.reference(x[None], (h[:n], c[:n]), *weights)
            outputs.append(output[0])
            h, c = torch.cat([new_h, h[n:]]), torch.cat([new_c, c[n:]])
        return torch.cat(outputs[::-1] if reverse else outputs), h, c

    def weights(self, make, hidden, input_size=20, bias=True):
        rows = self.gates * hidden
        return (
            make(rows, input_size, scale=input_size**-0.5),
            make(rows, hidden, scale=0.5 * hidden**-0.5),
            make(rows) if bias else None,
        )

    def call_with(self, make, length, batch, weights, sizes=None):
        """Random input and states for these weights. `sizes` are the rows of each step of packed input."""
        weight_ih, weight_hh, _ = weights
        input_size, hidden = weight_ih.shape[1], weight_hh.shape[1]
        input = make(length, batch, input_size) if sizes is None else make(sum(sizes), input_size)
        return Call(input, make(batch, hidden, scale=0.5), make(batch, hidden), *weights)

    def call(self, make, length, batch, hidden, input_size=20, bias=True, sizes=None):
        return self.call_with(make, length, batch, self.weights(make, hidden, input_size, bias), sizes)


def lltm_step(x, h, c, weight_ih, weight_hh, bias):
    return lltm_cell_reference(x, torch.cat([weight_hh, weight_ih], 1), bias, h, c)


def lstm_step(x, h, c, weight_ih, weight_hh, bias):
    biases = () if bias is None else (bias, torch.zeros_like(bias))
    return torch.lstm_cell(x, (h, c), weight_ih, weight_hh, *biases)


OPS = {
    "lltm": Recurrence("lltm", 3, lltm_ext.lltm, lltm_ext.lltm_algorithm, lltm_reference, lltm_step),
    "lstm": Recurrence("lstm", 4, lltm_ext.lstm, lltm_ext.lstm_algorithm, lstm_reference, lstm_step),
}


def relative_errors(found, exact):
    return [((y.double() - e).norm() / e.norm()).item() for y, e in zip(found, exact, strict=True)]


# ---- Functions -------------------------------------------------------------------------------------------


def sequence_arguments(make, gates, length, batch, input_size, hidden_size, bias=True):
    return {
        "input": make(length, batch, input_size),
        "h0": make(batch, hidden_size, scale=0.5),
        "c0": make(batch, hidden_size),
        "weight_ih": make(gates * hidden_size, input_size, scale=max(input_size, 1) ** -0.5),
        "weight_hh": make(gates * hidden_size, hidden_size, scale=0.5 * max(hidden_size, 1) ** -0.5),
        "bias": make(gates * hidden_size) if bias else None,
    }


def packed_arguments(make, gates, rows, *sizes):
    """Arguments of the dispatcher op for packed input: the first `rows` rows."""
    input, *others = sequence_arguments(make, gates, *sizes).values()
    return [input.flatten(0, 1)[:rows], *others]


def bidirectional_arguments(make, gates, *sizes, rows=None, bias=True):
    """Arguments of the bidirectional op, dense or for packed input: its first `rows` rows."""
    (input, *forward), (_, *reverse) = (
        sequence_arguments(make, gates, *sizes, bias=bias).values() for _ in range(2)
    )
    directions = ([x for x in direction if x is not None] for direction in (forward, reverse))
    return [input if rows is None else input.flatten(0, 1)[:rows], *directions]


def as_call(input, h0, c0, weight_ih, weight_hh, bias):
    return Call(input, (h0, c0), weight_ih, weight_hh, bias)


def sample(gates, *sizes, **options):
    return lambda make: as_call(**sequence_arguments(make, gates, *sizes, **options))


def changed(gates, **changes):
    """A sample with some arguments changed by functions."""

    def build(make):
        arguments = sequence_arguments(make, gates, 6, 4, 3, 5)
        return as_call(**{name: changes.get(name, lambda x: x)(x) for name, x in arguments.items()})

    return build


def with_hx(gates, hx):
    def build(make):
        call = sample(gates, 6, 4, 3, 5)(make)
        return Call(call.args[0], hx, *call.args[2:])

    return build


def with_algorithm(gates, algorithm):
    return lambda make: Call(*sample(gates, 6, 4, 3, 5)(make).args, algorithm=algorithm)


def state_in_float32(gates):
    return changed(gates, c0=lambda c0: c0 if c0.dtype == DOUBLE else c0.float())


def assert_values_and_gradients(function, reference, call, dtype=DOUBLE, **options):
    """Those of the call, against those of the reference in float64. Returns those of the call."""
    outputs, gradients = forward_and_gradients(function, call, **options)
    exact, exact_gradients = forward_and_gradients(
        reference, call.map(torch.Tensor.double), cotangents(outputs), **options
    )
    assert_all_near(outputs, exact, FORWARD[dtype], "output")
    assert_all_near(gradients, exact_gradients, BACKWARD[dtype], "gradient of argument")
    return outputs, gradients


def single_gradients(function, call):
    """The gradient of each tensor of the call if no other one requires a gradient."""
    gradients = []
    for i in range(len(call.tensors)):
        tensors = [x.detach().requires_grad_(i == j) for j, x in enumerate(call.tensors)]
        outputs = call.with_tensors(tensors).run(function)
        used = [(y, g) for y, g in zip(outputs, cotangents(outputs), strict=True) if y.requires_grad]
        gradients += torch.autograd.grad([y for y, _ in used], tensors[i], [g for _, g in used])
    return gradients


def for_any_algorithm(reference):
    """The reference with the function's signature. It ignores `algorithm`."""
    return lambda *args, algorithm="auto": reference(*args)


def sequence_samples(gates):
    return {
        "small": sample(gates, 3, 2, 3, 2),
        "1": sample(gates, 1, 1, 1, 1),
        "63": sample(gates, 7, 5, 9, 63),
        "500": sample(gates, 3, 21, 63, 500),
        "one step": sample(gates, 1, 4, 3, 5),
        "no bias": sample(gates, 6, 4, 3, 5, bias=False),
        "long": sample(gates, 100, 2, 3, 5),
        "states in float32": state_in_float32(gates),
        "stepwise": with_algorithm(gates, "stepwise"),
    }


def sequence_empty_samples(gates):
    return {
        "no steps": sample(gates, 0, 4, 3, 5),
        "no rows": sample(gates, 6, 0, 3, 5),
        "no steps and no rows": sample(gates, 0, 0, 3, 5),
        "no features": sample(gates, 6, 4, 0, 5),
        "no units": sample(gates, 6, 4, 3, 0),
    }


# Refusals: the argument, its change, the exception, and what the message says after "expected".


def no_tensor(argument, value, got):
    return argument, lambda _: value, TypeError, f"{argument} to be a Tensor, got {got}"


def of_dtype(argument, change, got, expected="float32"):
    return argument, change, TypeError, f"{argument} of dtype {expected}, got {got}"


def of_shape(argument, change, names, got, expected=None):
    of_names = f"[{names}] = {expected}" if expected else f"[{names}]"
    return argument, change, RuntimeError, f"{argument} of shape {of_names}, got {got}"


def sequence_bad_calls(op, gates):
    def no_pair(hx, got):
        return with_hx(gates, hx), TypeError, rf"^{op}: expected hx to be a pair \(h0, c0\), got {got}"

    n, rows, tensors = 5 * gates, f"{gates}*hidden_size", ("input", "h0", "c0", "weight_ih", "weight_hh")
    refusals = {f"{name} None": no_tensor(name, None, "None") for name in tensors} | {
        "bias a number": no_tensor("bias", 0.5, "float"),
        "integers": of_dtype("input", torch.Tensor.long, "int64", FLOATING),
        "h0 in float64": of_dtype("h0", torch.Tensor.double, "float64"),
        "c0 in float16": of_dtype("c0", torch.Tensor.half, "float16"),
        "weight_hh in bfloat16": of_dtype("weight_hh", torch.Tensor.bfloat16, "bfloat16"),
        "input of 2-D": of_shape("input", lambda x: x[0], "length, batch, input_size", [4, 3]),
        "h0 of the layer's shape": of_shape("h0", lambda x: x[None], "batch, hidden_size", [1, 4, 5]),
        "h0 of another batch": of_shape("h0", lambda x: x[:1], "batch, hidden_size", [1, 5], [4, 5]),
        "c0 of another size": of_shape("c0", lambda x: x[:, 1:], "batch, hidden_size", [4, 4], [4, 5]),
        "weight_ih transposed": of_shape("weight_ih", torch.t, f"{rows}, input_size", [3, n], [n, 3]),
        "fewer rows": of_shape("weight_hh", lambda x: x[5:], f"{rows}, hidden_size", [n - 5, 5], [n, 5]),
        "fewer columns": of_shape("weight_hh", lambda x: x[:, :3], f"{rows}, hidden_size", [n, 3], [n, 5]),
        "bias of one row": of_shape("bias", lambda x: x[None], rows, [1, n], [n]),
        "both biases": of_shape("bias", lambda x: torch.cat([x, x]), rows, [2 * n], [n]),
        "sparse input": (
            "input",
            torch.Tensor.to_sparse,
            RuntimeError,
            "input of layout torch.strided, got Sparse",
        ),
    }
    algorithms = "'auto', 'stepwise', 'cluster' or 'grid'"
    return {
        **{
            name: (
                changed(gates, **{argument: change}),
                exception,
                "^" + re.escape(f"{op}: expected {message}"),
            )
            for name, (argument, change, exception, message) in refusals.items()
        },
        "no states": no_pair(None, "NoneType"),
        "one state": no_pair(torch.zeros(4, 5), "(Fake)?Tensor"),
        "three states": no_pair((torch.zeros(4, 5),) * 3, "tuple"),
        "algorithm": (
            with_algorithm(gates, "fastest"),
            ValueError,
            f"^{op}: expected algorithm to be {algorithms}, got 'fastest'",
        ),
    }


class SequenceSuite(SmoothSuite):
    gates: int  # stacked in the rows of the weights
    adds_a_quarter: list  # a bias by which each step adds 0.25 to the cell state
    lowered_by_autocast = True
    exports_as = "custom_cell"
    saved = 4  # weight_hh
    resized = ("63", "long")

    def apply(self, input, hx, weight_ih, weight_hh, bias=None):
        """The Function that torch.func's transforms see."""
        output, h_n, c_n = self.by_function(input, *hx, weight_ih, weight_hh, bias)
        return output, (h_n, c_n)

    def by_function(self, input, h0, c0, weight_ih, weight_hh, bias, bias_hh=None):
        tensors = (input, h0, c0, weight_ih, weight_hh, bias, None, None, None)
        return CustomCellFunction.apply(*tensors, None, False, "auto", self.op, bias_hh)[:3]

    def dispatcher_calls(self, call):
        input, (h0, c0), *rest = call.args
        yield self.sequence, Call(input, h0, c0, *rest)

    @property
    def sequence(self):
        """The dispatcher op, which also takes batch_sizes of packed rows and reverse."""
        return getattr(torch.ops.lltm_ext, self.op).default

    @property
    def bidirectional(self):
        """The dispatcher op of a layer's two directions: input, forward, reverse, batch_sizes."""
        return getattr(torch.ops.lltm_ext, f"{self.op}_bidirectional").default

    def one_by_one(self, input, forward, reverse, batch_sizes=None):
        """As bidirectional, by two calls."""
        forward, reverse = ([*direction, None][:5] for direction in (forward, reverse))
        return self.sequence(input, *forward, batch_sizes), self.sequence(input, *reverse, batch_sizes, True)

    # Packed rows and the reverse direction

    def test_opcheck_of_packed_rows_and_the_reverse_direction(self, device):
        for grad, reverse in ((False, True), (True, False)):
            arguments = packed_arguments(Make(DOUBLE, device), self.gates, 5, 2, 3, 3, 2)
            call = Call(*arguments, [3, 2], reverse)
            call = call.leaves() if grad else call
            torch.library.opcheck(self.sequence, call.args)

    def test_opcheck_of_the_forward_and_backward_ops(self, device):
        forward, backward = (
            getattr(torch.ops.lltm_ext, f"{self.op}_{name}") for name in ("forward", "backward")
        )
        dense = [*sequence_arguments(Make(DOUBLE, device), self.gates, 2, 3, 3, 2).values()]
        packed = packed_arguments(Make(DOUBLE, device), self.gates, 5, 2, 3, 3, 2)
        for inputs, sizes, reverse in ((dense, None, False), (packed, [3, 2], True)):
            torch.library.opcheck(forward.default, (*inputs, sizes, reverse, "auto"))
            output, h_n, c_n, gates, extra = forward(*inputs, sizes, reverse, "auto")
            torch.library.opcheck(
                backward.default,
                (output, h_n, c_n, *inputs[:5], output, gates, extra, sizes, reverse, "auto", True, True),
            )

    # Transforms of torch.func

    def transformed_calls(self, device):
        """Calls of the dispatcher ops in reverse, of packed rows, and in both directions."""
        make = Make(DOUBLE, device)
        dense = [*sequence_arguments(make, self.gates, 3, 3, 4, 2).values()]
        packed = packed_arguments(make, self.gates, 5, 2, 3, 4, 2)
        reset = torch.tensor([[0, 1, 0], [1, 0, 0], [0, 0, 1]], dtype=torch.bool, device=device)
        yield self.sequence, Call(*dense, None, True)
        yield self.sequence, Call(*dense, None, False, "auto", reset)
        for reverse in (False, True):
            yield self.sequence, Call(*packed, [3, 2], reverse)
        for rows, sizes in ((None, None), (5, [3, 2])):
            arguments = bidirectional_arguments(make, self.gates, 2, 3, 4, 2, rows=rows, bias=rows is None)
            yield self.bidirectional, Call(*arguments, sizes)

    @staticmethod
    def of_floating(call, op):
        """The tensors of a call except those of bool, and the op as a function of them."""
        floating = [i for i, x in enumerate(call.tensors) if x.is_floating_point()]

        def function(*xs):
            tensors = list(call.tensors)
            for i, x in zip(floating, xs, strict=True):
                tensors[i] = x
            return tuple(call.with_tensors(tensors).run(op))

        return tuple(call.tensors[i] for i in floating), function

    def test_gradients_under_transforms(self, device):
        for op, call in self.transformed_calls(device):
            tensors, function = self.of_floating(call, op)
            argnums = tuple(range(len(tensors)))

            def loss(*xs, function=function):
                return sum_of_squares(function(*xs))

            def second(*xs, loss=loss, argnums=argnums):
                return sum_of_squares(torch.func.grad(loss, argnums)(*xs))

            leaves = tuple(x.detach().requires_grad_() for x in tensors)
            first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
            of_first = torch.autograd.grad(sum_of_squares(first), leaves)
            assert_all_near(torch.func.grad(loss, argnums)(*tensors), first, BACKWARD[DOUBLE])
            assert_all_near(torch.func.grad(second, argnums)(*tensors), of_first, 10 * BACKWARD[DOUBLE])
            jacobians = (
                pytree.tree_leaves(jacobian(function, argnums)(*tensors))
                for jacobian in (torch.func.jacrev, torch.func.jacfwd)
            )
            assert_all_near(*jacobians, BACKWARD[DOUBLE])

    def test_vmap_over_each_argument_and_all(self, device):
        for op, call in self.transformed_calls(device):
            tensors, function = self.of_floating(call, op)
            count = len(tensors)
            for batched in [{i} for i in range(count)] + [set(range(count))]:
                in_dims = tuple(-1 if i in batched else None for i in range(count))
                stacked = [
                    torch.stack([x, x.cos(), x / 2], -1) if i in batched else x for i, x in enumerate(tensors)
                ]
                singles = [
                    function(*(x[..., j] if i in batched else x for i, x in enumerate(stacked)))
                    for j in range(3)
                ]
                expected = [torch.stack(ys) for ys in zip(*singles, strict=True)]
                found = torch.vmap(function, in_dims)(*stacked)
                assert_all_near(found, expected, FORWARD[DOUBLE], f"vmap over {in_dims}, output")

    def test_batched_cotangents_of_packed_rows_and_both_directions(self, device):
        for op, call in self.transformed_calls(device):
            tensors, function = self.of_floating(call, op)
            leaves = [x.detach().requires_grad_() for x in tensors]
            outputs = function(*leaves)
            batch = [torch.stack([g, g.cos()]) for g in cotangents(outputs)]
            together = torch.autograd.grad(outputs, leaves, batch, is_grads_batched=True, retain_graph=True)
            for i in range(2):
                single = torch.autograd.grad(outputs, leaves, [g[i] for g in batch], retain_graph=True)
                assert_all_near([g[i] for g in together], single, BACKWARD[DOUBLE])

    @pytest.mark.parametrize("reverse", [False, True])
    def test_gradcheck_of_packed_rows(self, reverse, device):
        call = Call(*packed_arguments(Make(DOUBLE, device), self.gates, 6, 3, 3, 2, 2)).leaves()

        def packed(*tensors):
            return self.sequence(*tensors, [3, 2, 1], reverse)

        assert torch.autograd.gradcheck(packed, call.tensors)
        assert torch.autograd.gradgradcheck(packed, call.tensors)

    @pytest.mark.parametrize("way", ["sequence", "Function"])
    def test_derivatives_with_two_biases(self, way, device):
        make = Make(DOUBLE, device)
        input, hx, *weights, bias = sample(self.gates, 3, 2, 2, 2)(make).args
        function = self.by_function if way == "Function" else self.sequence

        def of(bias, bias_hh):
            return function(input, *hx, *weights, bias, bias_hh=bias_hh)[0]

        biases = Call(bias, make(*bias.shape)).leaves().args
        assert torch.autograd.gradcheck(of, biases, check_forward_ad=way == "Function")
        assert torch.autograd.gradgradcheck(of, biases)
        gradients = torch.autograd.grad(of(*biases).sum(), biases)
        assert gradients[0].data_ptr() != gradients[1].data_ptr()
        jacobians = torch.func.jacrev(of, (0, 1))(*biases)
        assert_all_near(jacobians, [torch.func.jacfwd(of)(*biases)] * 2, BACKWARD[DOUBLE])

    @pytest.mark.parametrize("sizes", [[2, 3], [4, 2], [3, 1], [3, 3, 0], [3, 4, -1], []])
    def test_batch_sizes_that_do_not_fit_are_refused(self, sizes):
        arguments = packed_arguments(Make(), self.gates, 6, 2, 3, 3, 2)
        with pytest.raises(RuntimeError, match=rf"^{self.op}: expected batch_sizes to "):
            self.sequence(*arguments, sizes)

    @pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
    @pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
    def test_many_steps_equal_a_loop_over_cells(self, packed, reverse, device):
        """More rows than one chunk of the backward takes."""
        length, batch = 1100, 16
        sizes = [batch - t * (batch - 1) // length for t in range(length)] if packed else [batch] * length
        assert sum(sizes) > 8192
        call = Call(*packed_arguments(Make(DOUBLE, device), self.gates, sum(sizes), length, batch, 3, 2))

        def ours(rows, *others):
            if packed:
                return self.sequence(rows, *others, sizes, reverse)
            output, h_n, c_n = self.sequence(rows.unflatten(0, (length, batch)), *others, None, reverse)
            return output.flatten(0, 1), h_n, c_n

        def loop(rows, h, c, *weights):
            steps = list(enumerate(rows.split(sizes)))
            outputs = [None] * length
            for t, x in reversed(steps) if reverse else steps:
                new_h, new_c = OPS[self.op].step(x, h[: len(x)], c[: len(x)], *weights)
                h, c = torch.cat([new_h, h[len(x) :]]), torch.cat([new_c, c[len(x) :]])
                outputs[t] = new_h
            return torch.cat(outputs), h, c

        assert_values_and_gradients(ours, loop, call)

    # Both directions of a layer

    @pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
    @pytest.mark.parametrize("sizes", [None, [4, 4, 3, 1]], ids=["dense", "packed"])
    def test_both_directions_at_once_have_the_same_bits_as_one_by_one(self, sizes, bias, dtype, device):
        rows = sizes and sum(sizes)
        arguments = bidirectional_arguments(Make(dtype, device), self.gates, 4, 4, 3, 5, rows=rows, bias=bias)
        call = Call(*arguments, sizes)
        outputs, gradients = forward_and_gradients(self.bidirectional, call)
        expected, expected_gradients = forward_and_gradients(self.one_by_one, call)
        assert_same_bits(outputs, expected)
        assert_same_bits(gradients, expected_gradients)
        assert_same_bits(call.run(self.bidirectional), expected)

    def test_both_directions_of_more_packed_rows_than_a_chunk(self, device):
        """The backward may split them into other chunks in one direction than in the other."""
        length, batch = 300, 100
        sizes = [batch - t * (batch - 1) // length for t in range(length)]
        assert sum(sizes) > 8192
        make = Make(DOUBLE, device)
        call = Call(*bidirectional_arguments(make, self.gates, length, batch, 3, 2, rows=sum(sizes)), sizes)
        found, expected = (forward_and_gradients(f, call) for f in (self.bidirectional, self.one_by_one))
        assert_same_bits([*found[0], *found[1]], [*expected[0], *expected[1]])

    @pytest.mark.parametrize("sizes", [None, [2, 1]], ids=["dense", "packed"])
    def test_gradcheck_of_both_directions(self, sizes, device):
        rows = sizes and sum(sizes)
        arguments = bidirectional_arguments(Make(DOUBLE, device), self.gates, 2, 2, 1, 2, rows=rows)
        call = Call(*arguments, sizes).leaves()
        assert torch.autograd.gradcheck(call.bind(self.bidirectional), call.tensors)
        assert torch.autograd.gradgradcheck(call.bind(self.bidirectional), call.tensors)

    def test_a_gradient_of_both_directions_is_the_same_whichever_others_are_required(self, device):
        call = Call(*bidirectional_arguments(Make(DOUBLE, device), self.gates, 4, 4, 3, 5))
        _, gradients = forward_and_gradients(self.bidirectional, call)
        assert_same_bits(single_gradients(self.bidirectional, call), gradients)

    @pytest.mark.parametrize("used", range(6))
    def test_gradients_of_one_output_of_both_directions(self, used, device):
        """The other direction's are zeros."""
        call = Call(*bidirectional_arguments(Make(DOUBLE, device), self.gates, 4, 4, 3, 5))
        gradients = []
        for function in (self.bidirectional, self.one_by_one):
            leaves = call.leaves()
            loss = leaves.run(function)[used].sum()
            gradients.append(torch.autograd.grad(loss, leaves.tensors, materialize_grads=True))
        assert_all_near(*gradients, BACKWARD[DOUBLE])

    def test_opcheck_of_both_directions(self, device):
        make = Make(DOUBLE, device)
        dense = bidirectional_arguments(make, self.gates, 2, 3, 3, 2, bias=False), None
        packed = bidirectional_arguments(make, self.gates, 2, 3, 3, 2, rows=5), [3, 2]
        forward, backward = (
            getattr(torch.ops.lltm_ext, f"{self.op}_bidirectional_{name}").default
            for name in ("forward", "backward")
        )
        for call in (Call(*dense[0], dense[1]), Call(*packed[0], packed[1]).leaves()):
            torch.library.opcheck(self.bidirectional, call.args)
        for inputs, sizes in (dense, packed):
            torch.library.opcheck(forward, (*inputs, sizes, "auto"))
            y = forward(*inputs, sizes, "auto")
            saved = [y[i] for i in (0, 3, 4, 5, 8, 9)]
            grads = [y[0], None, y[2], *y[5:8]]
            torch.library.opcheck(backward, (grads, *inputs, saved, sizes, "auto", True, True))

    @pytest.mark.parametrize(
        "change,expectation",
        [
            (lambda x, d: (x, d[0], d[1][:3]), r"a direction to be \[h0, c0, .*, got 3 tensors"),
            (lambda x, d: (x, [*d[0], x], d[1]), r"a direction to be \[h0, c0, .*, got 6 tensors"),
            (lambda x, d: (x[0], *d), r"input of shape \[length, batch, input_size\], got \[4, 3\]"),
            (lambda x, d: (x, d[0], [d[1][0][1:], *d[1][1:]]), r"h0 of shape .*, got \[3, 5\]"),
            (lambda x, d: (x, d[0], [*d[1][:4], d[1][4].double()]), "bias of dtype float32, got float64"),
        ],
        ids=["three tensors", "six tensors", "2-D", "another batch", "another dtype"],
    )
    def test_both_directions_refuse_bad_input(self, change, expectation):
        input, *directions = bidirectional_arguments(Make(), self.gates, 6, 4, 3, 5)
        with pytest.raises((RuntimeError, TypeError), match=rf"^{self.op}\w*: expected {expectation}"):
            self.bidirectional(*change(input, directions))

    def test_directions_of_different_sizes_are_refused(self):
        input, forward, _ = bidirectional_arguments(Make(), self.gates, 6, 4, 3, 5)
        _, _, reverse = bidirectional_arguments(Make(), self.gates, 6, 4, 3, 7)
        with pytest.raises(
            RuntimeError, match=r"expected h0 of both directions to have one shape, got \[4, 5"
        ):
            self.bidirectional(input, forward, reverse)

    # Values

    def test_it_equals_a_loop_over_cells(self, dtype, device):
        call = sample(self.gates, 6, 4, 3, 5)(Make(dtype, device))
        output, h_n, c_n = call.run(self.function)
        input, (h, c), *weights = call.map(torch.Tensor.double).args
        for t, x in enumerate(input):
            h, c = OPS[self.op].step(x, h, c, *weights)
            assert_near(output[t], h, FORWARD[dtype])
        assert_all_near([h_n, c_n], [h, c], FORWARD[dtype])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    def test_autocast_leaves_the_cell_state_in_float32(self, dtype, device):
        """One of the other half type, too."""
        with torch.autocast(device, torch.bfloat16):
            outputs = self.call("63", dtype, device).run(self.function)
        assert [y.dtype for y in outputs] == [torch.bfloat16, torch.bfloat16, torch.float32]

    def test_differentiable_gradients_of_no_steps_are_zero(self, device):
        call = sample(self.gates, 0, 4, 3, 5)(Make(DOUBLE, device)).leaves()
        output, h_n, _ = call.run(self.function)
        found = torch.autograd.grad(output.sum() + h_n.sum(), call.tensors, create_graph=True)
        assert [int(g.count_nonzero()) for g in found] == [0, h_n.numel(), 0, 0, 0, 0]

    def test_nan_changes_no_other_row_and_no_earlier_step(self, device):
        call = sample(self.gates, 6, 4, 3, 5)(Make(device=device))
        good, _ = self.function(*call.args)
        call.args[0][2, 1, 0] = torch.nan
        output, (h_n, _) = self.function(*call.args)
        assert output[2:, 1].isnan().all()
        assert h_n[1].isnan().all()
        others = torch.ones(6, 4, dtype=torch.bool)
        others[2:, 1] = False
        assert_same_bits([output[others]], [good[others]])

    def test_a_batch_above_65535(self, device):
        call = sample(self.gates, 2, 65_537, 1, 2)(Make(device=device))
        assert_values_and_gradients(self.function, self.reference, call, torch.float32)

    def test_half_types_accumulate_the_cell_state_in_float32(self, device):
        """At 2048 float16 has steps of 2, so adding 0.25 many times changes nothing if each step rounds."""
        for dtype, of_state in itertools.product((torch.float16, torch.bfloat16), (None, torch.float32)):
            zeros = torch.zeros(1, 1, dtype=dtype, device=device)
            input = torch.zeros(256, 1, 1, dtype=dtype, device=device)
            weights = torch.zeros(self.gates, 1, dtype=dtype, device=device)
            bias = torch.tensor(self.adds_a_quarter, dtype=dtype, device=device)
            c0 = torch.full_like(zeros, 2048, dtype=of_state)
            _, (_, c_n) = self.function(input, (zeros, c0), weights, weights, bias)
            assert c_n.dtype == c0.dtype
            assert abs(c_n.item() - (2048 + 256 * 0.25)) < 1


# ---- Layers ----------------------------------------------------------------------------------------------


def weights_of(layer, k, suffix):
    """weight_ih, weight_hh and the sum of the biases of a layer's direction."""
    names = [f"{name}_l{k}{suffix}" for name in ("bias", "bias_ih", "bias_hh")]
    biases = [getattr(layer, name) for name in names if getattr(layer, name, None) is not None]
    weights = (getattr(layer, f"{name}_l{k}{suffix}") for name in ("weight_ih", "weight_hh"))
    return *weights, sum(biases) if biases else None


class LoopOverSteps(nn.Module):
    """A layer for [T, B, I] in float64: a Python loop over a step, (h, c) of x, h, c and the weights."""

    def __init__(self, layer, step):
        super().__init__()
        self.layer, self.step = copy.deepcopy(layer).double(), step

    def forward(self, input, hx=None):
        suffixes = ("", "_reverse")[: 1 + self.layer.bidirectional]
        if hx is None:
            states = self.layer.num_layers * len(suffixes)
            hx = [input.new_zeros(states, input.shape[1], self.layer.hidden_size)] * 2
        final = []
        for k in range(self.layer.num_layers):
            directions = []
            for suffix in suffixes:
                weights = weights_of(self.layer, k, suffix)
                h, c = (states[len(final)] for states in hx)
                outputs = []
                for x in reversed(input) if suffix else input:
                    h, c = self.step(x, h, c, *weights)
                    outputs.append(h)
                directions.append(torch.stack(outputs[::-1] if suffix else outputs))
                final.append((h, c))
            input = torch.cat(directions, -1)
        return input, tuple(torch.stack(states) for states in zip(*final, strict=True))


INPUT = 7
KINDS = {
    "plain": {},
    "two layers": {"num_layers": 2},
    "bidirectional": {"bidirectional": True},
    "three bidirectional layers": {"num_layers": 3, "bidirectional": True},
    "without bias": {"num_layers": 2, "bias": False, "bidirectional": True},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def states(make, layer, *batch):
    shape = (layer.num_layers * (2 if layer.bidirectional else 1), *batch, layer.hidden_size)
    return make(*shape, scale=0.5), make(*shape)


FORMS = {
    "batched": lambda layer, x: x.transpose(0, 1).contiguous() if layer.batch_first else x,
    "unbatched": lambda layer, x: x[:, 0],
    "packed": lambda layer, x: pack_padded_sequence(x, [6, 4, 4, 1]),
    "packed in any order": lambda layer, x: pack_padded_sequence(x, [2, 6, 1, 4], enforce_sorted=False),
}
forms = pytest.mark.parametrize("form", FORMS)


def tensors_of(result):
    """Output and states of a layer as one list."""
    output, states = result
    states = states if isinstance(states, tuple) else (states,)
    return [output.data if isinstance(output, PackedSequence) else output, *states]


def results_of_layer(layer, form, call):
    """The output, output and states as tensors, the gradients of the call's tensors and the parameters."""
    call = call.leaves()
    input, *hx = call.args
    result = layer(FORMS[form](layer, input), *hx)
    outputs = tensors_of(result)
    wanted = [*call.tensors, *layer.parameters()]
    return result[0], outputs, torch.autograd.grad(outputs, wanted, cotangents(outputs))


def layer_modules(Layer, hidden):
    def layer(**options):
        return functools.partial(Layer, INPUT, hidden, **options)

    def states(make, *shape):
        return make(*shape, hidden), make(*shape, hidden)

    return {
        Layer.__name__: (layer(), lambda make: Call(make(6, 4, INPUT), states(make, 1, 4))),
        "batch_first": (layer(batch_first=True), lambda make: Call(make(4, 6, INPUT))),
        "unbatched": (layer(), lambda make: Call(make(6, INPUT), states(make, 1))),
        "all options": (
            layer(num_layers=2, bias=False, batch_first=True, bidirectional=True),
            lambda make: Call(make(4, 6, INPUT), states(make, 4, 4)),
        ),
    }


def layer_bad_calls(name, hidden):
    """(arguments, exception, pattern) of calls that every layer refuses."""
    input, n = torch.zeros(6, 4, INPUT), hidden
    unbatched, packed = input[:, 0], pack_sequence([torch.zeros(3, INPUT)])

    def zeros(*shape, **where):
        return torch.zeros(*shape, hidden, **where)

    def two(*shape, **where):
        return (zeros(*shape, **where),) * 2

    h0, c0 = rf"^{name}: expected h0 of shape", rf"^{name}: expected c0 of shape"
    return [
        ((None,), TypeError, f"^{name}: expected input to be a Tensor, got NoneType"),
        ((input, zeros(1, 4)), TypeError, f"^{name}: expected hx to be a pair .*got Tensor"),
        ((input, (zeros(1, 4), None)), TypeError, f"^{name}: expected c0 .*got NoneType"),
        ((input, two(4)), RuntimeError, rf"{h0} \[1, 4, {n}\], got \[4, {n}\]"),
        ((input, (zeros(1, 4), zeros(2, 4))), RuntimeError, rf"{c0} \[1, 4, {n}\], got \[2, 4, {n}\]"),
        ((unbatched, two(1, 1)), RuntimeError, rf"{h0} \[1, {n}\], got \[1, 1, {n}\]"),
        ((unbatched, two(1, 6)), RuntimeError, rf"{h0} \[1, {n}\], got \[1, 6, {n}\]"),
        ((unbatched, (torch.zeros(1, n + 1), zeros(1))), RuntimeError, rf"{h0} .*, got \[1, (1, )?{n + 1}\]"),
        ((packed, two(1, 2)), RuntimeError, rf"{h0} \[1, 1, {n}\], got \[1, 2, {n}\]"),
        ((input, two(1, 4, dtype=DOUBLE)), TypeError, "expected h0 of dtype float32, got float64"),
        ((input.double(),), TypeError, "expected (weight_ih|input) of dtype .*float64"),
        ((input.long(),), TypeError, "expected input of dtype .*got int64"),
    ]


class LayerSuite(ModuleSuite):
    Layer = None  # the class
    hidden: int  # the hidden size of the layers
    lowers_states = False  # whether autocast returns the final cell state in its dtype, too
    near = (FORWARD[DOUBLE], BACKWARD[DOUBLE])  # error bounds against the peer, of outputs and of gradients

    def build(self, kind, device="cpu", dtype=DOUBLE, **more):
        torch.manual_seed(0)
        return self.Layer(INPUT, self.hidden, **KINDS[kind], **more, device=device, dtype=dtype)

    def peer(self, layer):
        """A module in float64 with the same parameters, which gives the expected results for [T, B, I]."""
        raise NotImplementedError

    # Values and gradients

    @kinds
    def test_values_in_every_dtype(self, kind, dtype, device):
        layer, make = self.build(kind, device, dtype), Make(dtype, device)
        call = Call(make(6, 4, INPUT), states(make, layer, 4))
        expected = call.map(torch.Tensor.double).run(self.peer(layer))
        assert_all_near(call.run(layer), expected, FORWARD[dtype])

    @kinds
    @pytest.mark.parametrize("given", [False, True], ids=["no hx", "hx"])
    def test_values_and_gradients_equal_those_of_the_peer(self, kind, given, device):
        layer, make = self.build(kind, device), Make(DOUBLE, device)
        call = Call(make(6, 4, INPUT), *([states(make, layer, 4)] if given else [])).leaves()
        outputs, gradients = [], []
        for function in (layer, self.peer(layer)):
            outputs.append(call.run(function))
            wanted = [*call.tensors, *function.parameters()]
            gradients.append(torch.autograd.grad(outputs[-1], wanted, cotangents(outputs[-1])))
        assert_all_near(*outputs, self.near[0])
        assert_all_near(*gradients, self.near[1])

    @pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
    def test_gradients_of_a_long_sequence_summed_in_chunks(self, packed, device):
        """More rows than one chunk of the backward takes."""
        layer, make = self.build("bidirectional", device), Make(DOUBLE, device)
        length, batch = 311, 60
        lengths = [length - 2 * (i % 7) if packed else length for i in range(batch)]
        assert sum(lengths) > 2 * 4096
        input, peer = make(length, batch, INPUT, scale=0.1).requires_grad_(), self.peer(layer)
        given = pack_padded_sequence(input, lengths, enforce_sorted=False) if packed else input
        output = layer(given)[0]
        ours = torch.autograd.grad(
            (output.data if packed else output).sin().sum(), [input, *layer.parameters()]
        )
        loops = [peer(input[:n, [i for i in range(batch) if lengths[i] == n]])[0] for n in set(lengths)]
        loss = sum(output.sin().sum() for output in loops)
        assert_all_near(ours, torch.autograd.grad(loss, [input, *peer.parameters()]), self.near[1])

    @kinds
    def test_a_packed_batch_in_half_types(self, kind, device):
        for dtype in (torch.float16, torch.bfloat16):
            layer = self.build(kind, device, dtype)
            packed = pack_sequence([Make(dtype, device)(n, INPUT) for n in (6, 3, 2)])
            exact, exact_states = copy.deepcopy(layer).double()(packed.to(DOUBLE))
            output, final = layer(packed)
            assert_all_near([output.data, *final], [exact.data, *exact_states], FORWARD[dtype])

    @pytest.mark.parametrize("used", ["output", "h_n", "c_n"])
    def test_gradients_of_one_output(self, used, device):
        layer = self.build("three bidirectional layers", device)
        found = []
        for function in (layer, self.peer(layer)):
            input = Make(DOUBLE, device)(6, 4, INPUT).requires_grad_()
            output, (h_n, c_n) = function(input)
            y = {"output": output, "h_n": h_n, "c_n": c_n}[used]
            wanted = [input, *function.parameters()]
            found.append(torch.autograd.grad(sum_of_squares(y), wanted, materialize_grads=True))
        assert_all_near(*found, self.near[1])

    @kinds
    @pytest.mark.parametrize("length, batch", [(0, 4), (6, 0), (0, 0), (1, 1), (1, 4)])
    def test_few_or_no_steps_and_rows(self, kind, length, batch, device):
        layer, make = self.build(kind, device), Make(DOUBLE, device)
        values, hx = make(length, batch, INPUT), states(make, layer, batch)
        input = values.clone().requires_grad_()
        output, (h_n, c_n) = layer(input, hx)
        assert output.shape == (length, batch, self.hidden * (2 if layer.bidirectional else 1))
        assert h_n.shape == c_n.shape == hx[0].shape
        (output.sum() + h_n.sum() + c_n.sum()).backward()
        assert input.grad.shape == input.shape
        if length == 0:
            assert_same_bits([h_n, c_n], hx)
        if length * batch == 0:
            assert all((p.grad == 0).all() for p in layer.parameters())
        else:
            expected, states_expected = self.peer(layer)(values, hx)
            assert_all_near([output, h_n, c_n], [expected, *states_expected], self.near[0])

    @kinds
    @pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
    def test_activation_checkpointing_frees_what_it_recomputes(self, kind, packed, device):
        layer, make = self.build(kind, device, torch.float32), Make(device=device)

        def of_rows(*rows):
            return layer(pack_sequence(rows))[0].data if packed else layer(torch.stack(rows, 1))

        assert_checkpointing_frees(of_rows, Call(make(6, INPUT), make(6, INPUT)))

    def test_autocast(self, device):
        """As near to float64 as the lower dtype allows, for the cell state is float32 between the steps."""
        layer = self.build("three bidirectional layers", device, torch.float32)
        peer, input = self.peer(layer), Make(device=device)(6, 4, INPUT)
        low = torch.float16 if device == "cuda" else torch.bfloat16
        exact = Call(input.double()).run(peer)
        with torch.autocast(device, low):
            output, (h_n, c_n) = layer(input)
        of_state = low if self.lowers_states else torch.float32
        assert [y.dtype for y in (output, h_n, c_n)] == [low, low, of_state]
        assert_all_near([output, h_n, c_n], exact, 3 * FORWARD[low])
        output.float().square().sum().backward()
        assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())
        exact[0].square().sum().backward()
        for (name, p), q in zip(layer.named_parameters(), peer.parameters(), strict=True):
            assert_near(p.grad, q.grad, 0.1, name)

    def test_per_sample_gradients_equal_those_of_each_sample(self):
        layer = self.build("bidirectional")
        parameters = {k: v.detach() for k, v in layer.named_parameters()}
        inputs = Make(DOUBLE)(3, 6, INPUT)

        def loss(parameters, x):
            return sum_of_squares(torch.func.functional_call(layer, parameters, (x,))[0])

        together = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, inputs)
        for b, x in enumerate(inputs):
            layer.zero_grad()
            sum_of_squares(layer(x)[0]).backward()
            for name, p in layer.named_parameters():
                assert_near(together[name][b], p.grad, BACKWARD[DOUBLE], name)

    def test_transforms_of_a_packed_sequence(self):
        layer = self.build("bidirectional")
        rows, sizes = Make(DOUBLE)(3, 5, INPUT), torch.tensor([3, 2])

        def output(x):
            return layer(PackedSequence(x, sizes))[0].data

        def loss(x):
            return sum_of_squares(output(x))

        leaves = rows.clone().requires_grad_()
        singles = torch.stack([output(x) for x in leaves])
        expected = torch.autograd.grad(sum_of_squares(singles), leaves)[0]
        assert_near(torch.vmap(output)(rows), singles.detach(), FORWARD[DOUBLE])
        assert_near(torch.vmap(torch.func.grad(loss))(rows), expected, BACKWARD[DOUBLE])
        _, along = torch.func.jvp(loss, (rows[0],), (rows[1],))
        assert_near(along, (expected[0] * rows[1]).sum(), BACKWARD[DOUBLE])

    def test_the_default_device_changes_nothing(self):
        layer = self.build("bidirectional")
        x = Make(DOUBLE)(5, INPUT).requires_grad_()

        def gradient():
            packed = layer(PackedSequence(x, sizes))[0].data
            return torch.autograd.grad(sum_of_squares([packed, layer(x)[0]]), x)[0]

        sizes = torch.tensor([3, 2])
        expected = gradient()
        with torch.device("meta"):
            assert torch.equal(gradient(), expected)

    def test_frozen_parameters_get_no_gradient_and_change_no_other(self, device):
        layer, input = self.build("two layers", device), Make(DOUBLE, device)(6, 4, INPUT)
        layer(input)[0].sum().backward()
        expected = {name: p.grad for name, p in layer.named_parameters()}
        frozen = ["weight_hh_l0", [*expected][-1]]
        layer.zero_grad()
        for name in frozen:
            layer.get_parameter(name).requires_grad_(False)
        layer(input)[0].sum().backward()
        found = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
        assert list(found) == [name for name in expected if name not in frozen]
        assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())

    def test_it_learns_to_remember_the_first_input(self, device):
        """40 steps of Adam halve the loss."""
        layer = self.build("plain", device, torch.float32)
        optimizer = torch.optim.Adam(layer.parameters(), 0.05)
        input = Make(device=device)(4, 32, INPUT)
        target = input[0, :, :5].tanh()
        losses = []
        for _ in range(40):
            optimizer.zero_grad()
            loss = (layer(input)[0][-1, :, :5] - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0]

    @needs_cuda
    def test_gradients_are_the_same_bits_each_time(self):
        layer = self.build("three bidirectional layers", "cuda", torch.float32)
        input = Make(device="cuda")(50, 64, INPUT)
        runs = []
        for _ in range(3):
            layer.zero_grad()
            layer(input)[0].square().sum().backward()
            runs.append([p.grad.clone() for p in layer.parameters()])
        assert_same_bits(runs[1], runs[0])
        assert_same_bits(runs[2], runs[0])

    # Called like nn.LSTM

    @kinds
    @pytest.mark.parametrize("batch_first", [False, True])
    @pytest.mark.parametrize("batched", [False, True], ids=["unbatched", "batched"])
    def test_it_is_called_like_nn_lstm(self, kind, batch_first, batched, device):
        options = {**KINDS[kind], "batch_first": batch_first, "device": device}
        layer, peer = (Layer(INPUT, self.hidden, **options) for Layer in (self.Layer, nn.LSTM))
        make = Make(device=device)
        input = make(4, 6, INPUT) if batched else make(6, INPUT)
        hx = states(make, layer, 6 if not batch_first else 4)
        hx = hx if batched else tuple(x[:, 0].contiguous() for x in hx)  # cuDNN demands contiguous ones
        for arguments in ((input,), (input, hx), (input, None)):
            output, (h_n, c_n) = layer(*arguments)
            peer_output, (peer_h_n, peer_c_n) = peer(*arguments)
            assert output.shape == peer_output.shape
            assert (h_n.shape, c_n.shape) == (peer_h_n.shape, peer_c_n.shape)

    @kinds
    def test_no_states_are_zero_states(self, kind, device):
        layer, make = self.build(kind, device), Make(DOUBLE, device)
        input = make(6, 4, INPUT)
        zeros = tuple(torch.zeros_like(x) for x in states(make, layer, 4))
        assert_same_bits(Call(input).run(layer), Call(input, zeros).run(layer))

    @kinds
    def test_batch_first_swaps_input_and_output_but_no_state(self, kind, device):
        layer, make = self.build(kind, device), Make(DOUBLE, device)
        swapped = self.build(kind, device, batch_first=True)
        input, hx = make(6, 4, INPUT), states(make, layer, 4)
        output, (h_n, c_n) = layer(input, hx)
        ours, (our_h_n, our_c_n) = swapped(input.transpose(0, 1), hx)
        assert_all_near([ours.transpose(0, 1), our_h_n, our_c_n], [output, h_n, c_n], FORWARD[DOUBLE])

    @kinds
    @pytest.mark.parametrize("batch_first", [False, True])
    def test_an_unbatched_sequence_equals_a_batch_of_one(self, kind, batch_first, device):
        layer, make = self.build(kind, device, batch_first=batch_first), Make(DOUBLE, device)
        dim = 0 if batch_first else 1
        input, hx = make(6, INPUT), states(make, layer, 1)
        output, (h_n, c_n) = layer(input.unsqueeze(dim), hx)
        ours, (our_h_n, our_c_n) = layer(input, tuple(x[:, 0] for x in hx))
        assert_all_near(
            [ours, our_h_n, our_c_n], [output.squeeze(dim), h_n[:, 0], c_n[:, 0]], FORWARD[DOUBLE]
        )

    def test_loading_a_checkpoint_of_another_shape_fails(self):
        layer, deeper = self.Layer(7, 5), self.Layer(7, 5, num_layers=2)
        with pytest.raises(RuntimeError, match="weight_ih_l1"):
            layer.load_state_dict(deeper.state_dict())
        with pytest.raises(RuntimeError, match="size mismatch for weight_hh_l0"):
            layer.load_state_dict(self.Layer(7, 6).state_dict())

    def test_copies_do_not_share_parameters(self, device):
        layer = self.build("three bidirectional layers", device)
        input = Make(DOUBLE, device)(6, 4, INPUT)
        expected = layer(input)[0].detach()
        copies = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
        with torch.no_grad():
            for p in layer.parameters():
                p.zero_()
        for copied in copies:
            assert type(copied) is self.Layer
            assert_same_bits([copied(input)[0]], [expected])
        assert not torch.equal(layer(input)[0], expected)

    def assert_refused(self, arguments, exception, pattern):
        """The call raises, and the same layer's next call is right."""
        layer = self.build("plain", dtype=torch.float32)
        with pytest.raises(exception, match=pattern):
            layer(*arguments)
        input = Make()(6, 4, INPUT)
        assert_near(layer(input)[0], self.peer(layer)(input.double())[0], FORWARD[torch.float32])

    # Packed sequences

    @pairwise(
        kind=[*KINDS],
        lengths=[(6, 4, 4, 1), (2, 6, 1, 4), (3, 3, 3), (1,), (5, 1)],
        given={"no hx": False, "hx": True},
    )
    def test_a_packed_batch_equals_its_sequences_one_by_one(self, kind, given, lengths, device):
        layer, make = self.build(kind, device), Make(DOUBLE, device)
        sequences = [make(n, INPUT).requires_grad_() for n in lengths]
        hx = states(make, layer, len(lengths)) if given else None
        is_sorted = list(lengths) == sorted(lengths, reverse=True)
        for enforce_sorted in {False, is_sorted}:
            packed = pack_sequence(sequences, enforce_sorted=enforce_sorted)
            output, (h_n, c_n) = layer(packed, hx)
            assert isinstance(output, PackedSequence)
            padded, found_lengths = pad_packed_sequence(output)
            assert found_lengths.tolist() == list(lengths)
            ours, expected = [h_n, c_n], [[], []]
            for b, x in enumerate(sequences):
                output, state = layer(x, tuple(s[:, b] for s in hx) if given else None)
                ours.append(padded[: len(x), b])
                expected.append(output)
                for stack, s in zip(expected[:2], state, strict=True):
                    stack.append(s)
            expected = [torch.stack(s, 1) for s in expected[:2]] + expected[2:]
            assert_all_near(ours, expected, FORWARD[DOUBLE])
            wanted = [*sequences, *layer.parameters()]
            gradients, exact = (torch.autograd.grad(ys, wanted, cotangents(ys)) for ys in (ours, expected))
            assert_all_near(gradients, exact, BACKWARD[DOUBLE])

    def test_a_packed_batch_keeps_the_order_of_nn_lstm(self, device):
        layer = self.build("bidirectional", device)
        peer = nn.LSTM(INPUT, self.hidden, bidirectional=True, device=device, dtype=DOUBLE)
        padded = Make(DOUBLE, device)(6, 4, INPUT)
        packed = pack_padded_sequence(padded, [2, 6, 1, 4], enforce_sorted=False)
        ours, theirs = layer(packed)[0], peer(packed)[0]
        assert ours.data.shape == theirs.data.shape
        for a, b in zip(ours[1:], theirs[1:], strict=True):
            assert torch.equal(a, b)

    def test_gradients_of_hx_of_a_packed_batch_match_finite_differences(self, device):
        layer, make = self.build("two layers", device), Make(DOUBLE, device)
        hx = tuple(x.requires_grad_() for x in states(make, layer, 3))
        packed = pack_sequence([make(n, INPUT) for n in (2, 5, 3)], enforce_sorted=False)
        output, (h_n, c_n) = layer(packed, hx)
        loss = sum_of_squares([output.data, h_n, c_n])
        gradients = torch.autograd.grad(loss, hx)
        h = 1e-6
        for x, gradient in zip(hx, gradients, strict=True):
            direction = Make(DOUBLE, device, seed=5)(*x.shape)
            ends = []
            for sign in (1, -1):
                moved = tuple(s + sign * h * direction if s is x else s for s in hx)
                output, final = layer(packed, moved)
                ends.append(sum_of_squares([output.data, *final]))
            torch.testing.assert_close(
                ((ends[0] - ends[1]) / (2 * h)), (gradient * direction).sum(), rtol=1e-6, atol=1e-8
            )

    # Dropout

    def test_dropout_is_random_seeded_and_only_in_training(self, device):
        layer = self.build("two layers", device, dropout=0.5)
        input = Make(DOUBLE, device)(6, 4, INPUT)
        first, second = layer(input)[0], layer(input)[0]
        assert not torch.equal(first, second)
        torch.manual_seed(1)
        first = layer(input)[0]
        torch.manual_seed(1)
        assert torch.equal(layer(input)[0], first)
        layer.eval()
        plain = self.build("two layers", device)
        assert_all_near(Call(input).run(layer), Call(input).run(plain), FORWARD[DOUBLE])

    def test_dropout_changes_neither_the_last_layers_output_nor_states(self, device):
        layer = self.build("two layers", device, dropout=0.5)
        input = Make(DOUBLE, device)(6, 4, INPUT)
        plain_output, (plain_h_n, plain_c_n) = self.build("two layers", device)(input)
        output, (h_n, c_n) = layer(input)
        assert torch.equal(h_n[0], plain_h_n[0])
        assert torch.equal(c_n[0], plain_c_n[0])
        assert not torch.equal(output, plain_output)
        assert torch.equal(output[-1], h_n[1])
        assert (output != 0).all()

    def test_dropout_of_1_feeds_zeros_to_the_upper_layer(self, device):
        layer = self.build("two layers", device, dropout=1.0)
        input = Make(DOUBLE, device)(6, 4, INPUT).requires_grad_()
        output, _ = layer(input)
        expected, _ = self.upper_of(layer)(torch.zeros(6, 4, self.hidden, dtype=DOUBLE, device=device))
        assert_near(output, expected, FORWARD[DOUBLE])
        (gradient,) = torch.autograd.grad(output.sum(), input)
        assert (gradient == 0).all()

    def test_dropout_drops_its_share_and_scales_the_rest(self, device):
        """Of many equal rows, each has the upper layer's output for zero or for the scaled value."""
        layer = self.Layer(1, 1, num_layers=2, dropout=0.25, device=device, dtype=DOUBLE)
        output, (h_n, _) = layer(torch.ones(1, 10_000, 1, dtype=DOUBLE, device=device))
        upper, lower = self.upper_of(layer), h_n[:1, :1]
        is_dropped, is_kept = (torch.isclose(output, upper(x)[0]) for x in (0 * lower, lower / 0.75))
        assert (is_dropped ^ is_kept).all()
        assert abs(is_kept.double().mean().item() - 0.75) < 0.02

    def upper_of(self, layer):
        """The upper one of two layers as a layer by itself."""
        upper = self.Layer(
            layer.hidden_size, layer.hidden_size, device=layer.weight_ih_l0.device, dtype=DOUBLE
        )
        upper.load_state_dict({k.replace("l1", "l0"): v for k, v in layer.state_dict().items() if "l1" in k})
        return upper
