import functools
import re

import pytest
import torch
from op_suite import (
    DOUBLE,
    FLOATING,
    FORWARD,
    Call,
    Make,
    ModuleSuite,
    SmoothSuite,
    assert_accurate,
    assert_all_near,
    assert_same_bits,
    cotangents,
    expected_by,
    forward_and_gradients,
    kernels_of,
    needs_cuda,
    results,
)
from torch import zeros

import lltm_ext
from lltm_ext.lltm import _CellFunction, lltm_cell_reference


def cell_arguments(make, batch, input_size, hidden_size, bias=True):
    weights = make(3 * hidden_size, hidden_size + input_size, scale=(hidden_size + input_size) ** -0.5)
    input, bias = make(batch, input_size), make(3 * hidden_size) if bias else None
    return [input, weights, bias, make(batch, hidden_size, scale=0.5), make(batch, hidden_size)]


def sample(*sizes, **options):
    return lambda make: Call(*cell_arguments(make, *sizes, **options))


def changed(**changes):
    """A sample with some arguments changed by functions."""
    names = ("input", "weights", "bias", "old_h", "old_cell")

    def build(make):
        arguments = dict(zip(names, cell_arguments(make, 4, 3, 5), strict=True))
        arguments.update({name: change(arguments[name]) for name, change in changes.items()})
        return Call(*arguments.values())

    return build


TYPE_ERRORS = {
    **{
        f"{name} to be a Tensor, got None": changed(**{name: lambda x: None})
        for name in ("input", "weights", "old_h", "old_cell")
    },
    "bias to be a Tensor, got float": changed(bias=lambda x: 0.5),
    f"input of dtype {FLOATING}, got int64": changed(input=torch.Tensor.long),
    "weights of dtype float32, got float64": changed(weights=torch.Tensor.double),
    "bias of dtype float32, got float16": changed(bias=torch.Tensor.half),
    "old_h of dtype float32, got float64": changed(old_h=torch.Tensor.double),
    "old_cell of dtype float32, got float16": changed(old_cell=torch.Tensor.half),
}
OF_STATE = r"of shape \[batch, hidden_size\] = \[4, 5\], got"
RUNTIME_ERRORS = {
    r"input of shape \[batch, input_size\], got \[3\]": changed(input=lambda x: x[0]),
    rf"old_h {OF_STATE} \[3, 5\]": changed(old_h=lambda x: x[:3]),
    rf"old_cell {OF_STATE} \[4, 4\]": changed(old_cell=lambda x: x[:, :4]),
    r"weights of shape \[3\*hidden_size, .*\] = \[15, 8\], got \[15, 7\]": changed(
        weights=lambda x: x[:, 1:]
    ),
    r"bias of shape \[3\*hidden_size\] = \[15\], got \[5\]": changed(bias=lambda x: x[:5]),
    "weights of layout torch.strided, got Sparse": changed(weights=torch.Tensor.to_sparse),
}
bias_of_one_row = changed(bias=lambda bias: bias[None])
cell_in_float32 = changed(old_cell=lambda c: c if c.dtype == DOUBLE else c.float())


class TestLLTMCellFunction(SmoothSuite):
    op = "lltm_cell"
    function = staticmethod(lltm_ext.lltm_cell)
    reference = staticmethod(lltm_cell_reference)
    lowered_by_autocast = True
    saved = 1
    samples = {
        "small": sample(2, 3, 2),
        "1": sample(1, 1, 1),
        "63": sample(63, 5, 9),
        "500": sample(21, 63, 500),
        "the largest fused": sample(64, 128, 128),
        "too many rows to fuse": sample(65, 7, 30),
        "too many columns to fuse": sample(3, 260, 253),
        "no bias": sample(4, 3, 5, bias=False),
        "bias of one row": bias_of_one_row,
        "cell state in float32": cell_in_float32,
    }
    empty_samples = {"no rows": sample(0, 3, 5), "no features": sample(4, 0, 5)}
    bad_calls = expected_by("lltm_cell", {TypeError: TYPE_ERRORS, RuntimeError: RUNTIME_ERRORS})

    def apply(self, *args):
        """The Function that torch.func's transforms see."""
        return _CellFunction.apply(*args)[:2]

    def test_lltm_function_equals_the_function(self, case, device):
        call = self.call(case, DOUBLE, device)
        found = results(lltm_ext.LLTMFunction.apply, call)
        assert_same_bits(found, results(self.function, call))
        stacked = call.map(lambda x: torch.stack([x, 2 * x]))
        mapped = torch.vmap(call.bind(lltm_ext.LLTMFunction.apply))(*stacked.tensors)
        assert_all_near([y[0] for y in mapped], found[:2], FORWARD[DOUBLE])

    def test_the_cell_state_keeps_its_own_dtype(self, device):
        for dtype in (torch.float16, torch.bfloat16):
            call = cell_in_float32(Make(dtype, device))
            (new_h, new_cell), gradients = forward_and_gradients(self.function, call)
            assert (new_h.dtype, new_cell.dtype) == (dtype, torch.float32)
            assert [g.dtype for g in gradients] == [x.dtype for x in call.tensors]
            expected = call.map(torch.Tensor.double).run(self.reference)
            assert_all_near([new_cell], expected[1:], FORWARD[dtype])

    def test_autocast_leaves_the_cell_state_in_float32(self, device):
        """Also of a cell of the other half type."""
        arguments = cell_arguments(Make(device=device), 4, 3, 5)
        cell = lltm_ext.LLTMCell(3, 5, device=device).half()
        with torch.autocast(device, torch.bfloat16):
            for outputs in (lltm_ext.lltm_cell(*arguments), cell(arguments[0].half())):
                assert [y.dtype for y in outputs] == [torch.bfloat16, torch.float32]

    def test_saturated_gates(self, dtype, device):
        """Gates become 0 or 1, the candidate -1 or its pre-activation. Gradients stay finite."""
        gates = [[1e3, 1e3, -1e3], [-1e3, -1e3, 1e3], [1e3, -1e3, 1e3]]
        zeros = torch.zeros(1, 1, dtype=dtype, device=device)
        for row, cell in zip(gates, (-1, 0, 1e3), strict=True):
            bias = torch.tensor(row, dtype=dtype, device=device, requires_grad=True)
            weights = torch.zeros(3, 2, dtype=dtype, device=device)
            new_h, new_cell = lltm_ext.lltm_cell(zeros, weights, bias, zeros, zeros)
            assert new_cell.item() == cell
            assert abs(new_h.item()) <= 1
            (new_h + new_cell).sum().backward()
            assert bias.grad.isfinite().all()

    def test_infinities_and_nan_propagate_as_in_the_reference(self, dtype, device):
        """In every gate and in the cell, with enough units for vector loops and their tails."""
        values = torch.tensor([0, 1, -1, torch.inf, -torch.inf, torch.nan], dtype=dtype, device=device)
        bias = torch.cartesian_prod(values, values, values).t().flatten()
        hidden, batch = len(bias) // 3, len(values)
        zeros = torch.zeros(batch, hidden, dtype=dtype, device=device)
        weights = torch.zeros(3 * hidden, hidden + 1, dtype=dtype, device=device)
        call = Call(zeros[:, :1], weights, bias, zeros, values[:, None].expand(-1, hidden))
        near = 8 * torch.finfo(dtype).eps
        exact = call.map(torch.Tensor.double).run(self.reference)
        for y, expected in zip(call.run(self.function), exact, strict=True):
            torch.testing.assert_close(y.double(), expected, rtol=near, atol=near, equal_nan=True)

    def test_nan_stays_in_its_row(self, dtype, device):
        arguments = cell_arguments(Make(dtype, device), 4, 3, 5)
        expected = lltm_ext.lltm_cell(*arguments)
        arguments[0][1, 0] = torch.nan
        for y, good in zip(lltm_ext.lltm_cell(*arguments), expected, strict=True):
            assert y[1].isnan().all()
            torch.testing.assert_close(y[[0, 2, 3]], good[[0, 2, 3]])

    def test_a_batch_above_65535(self, device):
        call = Call(*cell_arguments(Make(device=device), 65_537, 1, 2))
        assert_accurate(self.function, self.reference, call, torch.float32)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, DOUBLE])
def test_a_small_step_is_one_kernel_in_each_direction(dtype, profiler_sees_kernels):
    for sizes, is_small in (((64, 128, 128), True), ((65, 7, 30), False), ((3, 260, 253), False)):
        call = Call(*cell_arguments(Make(dtype, "cuda"), *sizes)).leaves()
        outputs = call.run(lltm_ext.lltm_cell)
        backward = functools.partial(
            torch.autograd.grad, outputs, call.tensors, cotangents(outputs), retain_graph=True
        )
        backward()  # all modules are loaded before the profiler looks
        found = kernels_of([functools.partial(call.run, lltm_ext.lltm_cell), backward])
        for direction, kernels in zip(("forward", "backward"), found, strict=True):
            fused = [bool(re.search(rf"\blltm_fused_cell_{direction}_kernel\b", name)) for name in kernels]
            expected = [True] if is_small and dtype != DOUBLE else [False] * len(kernels)
            assert fused == expected and kernels, (sizes, direction, kernels)


def module(**options):
    return lambda **where: lltm_ext.LLTMCell(7, 5, **options, **where)


def of_rows(*rows, states=True):
    """A call with an input and two states."""
    return lambda make: Call(make(*rows, 7), *([(make(*rows, 5), make(*rows, 5))] if states else []))


class TestLLTMCell(ModuleSuite):
    modules = {
        "LLTMCell": (module(), of_rows(4)),
        "without bias": (module(bias=False), of_rows(4)),
        "without states": (module(), of_rows(4, states=False)),
        "unbatched": (module(), of_rows()),
    }

    def test_it_is_called_like_nn_lstmcell(self, module, device):
        built, call = self.module_and_call(module, device=device)
        peer = torch.nn.LSTMCell(7, 5, bias=built.bias is not None, device=device)
        ours, theirs = built(*call.args), peer(*call.args)
        assert isinstance(ours, tuple)
        assert [y.shape for y in ours] == [y.shape for y in theirs]

    def test_it_equals_the_reference(self, device):
        built, call = self.module_and_call("LLTMCell", DOUBLE, device)
        input, hx = call.args
        zeros = input.new_zeros(4, 5)
        for given, states in (([hx], hx), ([], (zeros, zeros))):
            expected = lltm_cell_reference(input, built.weights, built.bias, *states)
            assert_all_near(built(input, *given), expected, FORWARD[DOUBLE])

    def test_an_unbatched_step_equals_a_batch_of_one(self, device):
        built, call = self.module_and_call("unbatched", DOUBLE, device)
        input, (h, c) = call.args
        expected = [y[0] for y in built(input[None], (h[None], c[None]))]
        assert_all_near(built(input, (h, c)), expected, FORWARD[DOUBLE])

    def test_it_has_the_parameters_of_the_tutorial(self):
        shapes = {name: tuple(x.shape) for name, x in lltm_ext.LLTMCell(7, 5).state_dict().items()}
        assert shapes == {"weights": (15, 12), "bias": (15,)}
        assert list(lltm_ext.LLTMCell(7, 5, bias=False).state_dict()) == ["weights"]

    def test_parameters_are_uniform_within_one_over_the_root_of_the_size(self):
        torch.manual_seed(0)
        cell = lltm_ext.LLTMCell(70, 100)
        for parameter in cell.parameters():
            assert 0.08 < parameter.abs().max() <= 0.1
            assert abs(parameter.mean()) < 0.02
        before = cell.weights.detach().clone()
        cell.reset_parameters()
        assert not torch.equal(cell.weights, before)

    @pytest.mark.parametrize(
        "exception, message, arguments",
        [
            (TypeError, "^LLTMCell: expected input to be a Tensor, got NoneType", [None]),
            (RuntimeError, r"^LLTMCell: expected input .*input_size = 7, got \[4, 6\]", [zeros(4, 6)]),
            (RuntimeError, r"^LLTMCell: expected input .*got \[2, 4, 7\]", [zeros(2, 4, 7)]),
            (TypeError, r"^LLTMCell: expected hx to be a pair .*got Tensor", [zeros(4, 7), zeros(4, 5)]),
            (TypeError, "^LLTMCell: expected c0 .*NoneType", [zeros(4, 7), (zeros(4, 5), None)]),
            (
                RuntimeError,
                r"^LLTMCell: expected h0 of shape \[4, 5\], got \[1, 5\]",
                [zeros(4, 7), (zeros(1, 5), zeros(1, 5))],
            ),
            (TypeError, "expected weights of dtype float64, got float32", [zeros(4, 7).double()]),
        ],
    )
    def test_bad_input(self, exception, message, arguments):
        with pytest.raises(exception, match=message):
            lltm_ext.LLTMCell(7, 5)(*arguments)

    def test_bad_sizes(self):
        with pytest.raises(ValueError, match=r"^LLTMCell: expected hidden_size to be positive, got 0"):
            lltm_ext.LLTMCell(7, 0)
        with pytest.raises(TypeError, match=r"^LLTMCell: expected input_size to be an int, got float"):
            lltm_ext.LLTMCell(7.0, 5)
