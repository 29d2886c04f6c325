import functools

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
    assert_same_bits,
    cotangents,
    forward_and_gradients,
    kernels_of,
    needs_cuda,
)

import lltm_ext
from lltm_ext.lltm import _CellFunction, lltm_cell_reference


def cell_arguments(make, batch, input_size, hidden_size, bias=True):
    weights = make(3 * hidden_size, hidden_size + input_size, scale=(hidden_size + input_size) ** -0.5)
    return [
        make(batch, input_size),
        weights,
        make(3 * hidden_size) if bias else None,
        make(batch, hidden_size, scale=0.5),
        make(batch, hidden_size),
    ]


def sample(*sizes, **options):
    return lambda make: Call(*cell_arguments(make, *sizes, **options))


def changed(**changes):
    """A sample of which some arguments are given by functions of the good one."""
    names = ("input", "weights", "bias", "old_h", "old_cell")

    def build(make):
        arguments = dict(zip(names, cell_arguments(make, 4, 3, 5), strict=True))
        arguments.update({name: change(arguments[name]) for name, change in changes.items()})
        return Call(*arguments.values())

    return build


def refused(exception, expectation, **changes):
    return changed(**changes), exception, f"^lltm_cell: expected {expectation}"


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
        "as much as takes one launch": sample(64, 128, 128),
        "more rows than that": sample(65, 7, 30),
        "more columns than that": sample(3, 260, 253),
        "no bias": sample(4, 3, 5, bias=False),
        "bias of one row": bias_of_one_row,
        "cell state in float32": cell_in_float32,
    }
    empty_samples = {"no rows": sample(0, 3, 5), "no features": sample(4, 0, 5)}
    bad_calls = {
        **{
            f"{name} None": refused(TypeError, f"{name} to be a Tensor, got None", **{name: lambda x: None})
            for name in ("input", "weights", "old_h", "old_cell")
        },
        "bias a number": refused(TypeError, "bias to be a Tensor, got float", bias=lambda x: 0.5),
        "integers": refused(TypeError, f"input of dtype {FLOATING}, got int64", input=torch.Tensor.long),
        "weights in float64": refused(
            TypeError, "weights of dtype float32, got float64", weights=torch.Tensor.double
        ),
        "bias in float16": refused(TypeError, "bias of dtype float32, got float16", bias=torch.Tensor.half),
        "old_h in float64": refused(
            TypeError, "old_h of dtype float32, got float64", old_h=torch.Tensor.double
        ),
        "old_cell in float16": refused(
            TypeError, "old_cell of dtype float32, got float16", old_cell=torch.Tensor.half
        ),
        "input of one row": refused(
            RuntimeError, r"input of shape \[batch, input_size\], got \[3\]", input=lambda x: x[0]
        ),
        "old_h of another batch": refused(
            RuntimeError,
            r"old_h of shape \[batch, hidden_size\] = \[4, 5\], got \[3, 5\]",
            old_h=lambda x: x[:3],
        ),
        "old_cell of another size": refused(
            RuntimeError,
            r"old_cell of shape \[batch, hidden_size\] = \[4, 5\], got \[4, 4\]",
            old_cell=lambda x: x[:, :4],
        ),
        "weights of another size": refused(
            RuntimeError,
            r"weights of shape \[3\*hidden_size, .*\] = \[15, 8\], got \[15, 7\]",
            weights=lambda x: x[:, 1:],
        ),
        "bias of another size": refused(
            RuntimeError, r"bias of shape \[3\*hidden_size\] = \[15\], got \[5\]", bias=lambda x: x[:5]
        ),
        "sparse weights": refused(
            RuntimeError, "weights of layout torch.strided, got Sparse", weights=torch.Tensor.to_sparse
        ),
    }

    def apply(self, *args):
        """What lltm_cell and LLTMFunction take under torch.func's transforms."""
        return _CellFunction.apply(*args)[:2]

    def test_lltm_function_gives_what_the_function_gives(self, case, device):
        call = self.call(case, DOUBLE, device)
        ours, gradients = forward_and_gradients(lltm_ext.LLTMFunction.apply, call)
        outputs, expected = forward_and_gradients(self.function, call)
        assert_same_bits(ours + gradients, outputs + expected)
        stacked = call.map(lambda x: torch.stack([x, 2 * x]))
        mapped = torch.vmap(call.bind(lltm_ext.LLTMFunction.apply))(*stacked.tensors)
        assert_all_near([y[0] for y in mapped], outputs, FORWARD[DOUBLE])

    def test_the_cell_state_keeps_its_own_dtype(self, device):
        for dtype in (torch.float16, torch.bfloat16):
            call = cell_in_float32(Make(dtype, device))
            (new_h, new_cell), gradients = forward_and_gradients(self.function, call)
            assert (new_h.dtype, new_cell.dtype) == (dtype, torch.float32)
            assert [g.dtype for g in gradients] == [x.dtype for x in call.tensors]
            expected = call.map(torch.Tensor.double).run(self.reference)
            assert_all_near([new_cell], expected[1:], FORWARD[dtype])

    def test_autocast_leaves_the_cell_state_in_float32(self, device):
        with torch.autocast(device, torch.bfloat16):
            new_h, new_cell = lltm_ext.lltm_cell(*cell_arguments(Make(device=device), 4, 3, 5))
        assert (new_h.dtype, new_cell.dtype) == (torch.bfloat16, torch.float32)

    def test_autocast_takes_a_cell_of_the_other_half_type(self, device):
        cell, x = lltm_ext.LLTMCell(3, 5, device=device).half(), Make(torch.float16, device)(4, 3)
        with torch.autocast(device, torch.bfloat16):
            new_h, new_cell = cell(x)
        assert (new_h.dtype, new_cell.dtype) == (torch.bfloat16, torch.float32)

    def test_saturated_gates(self, dtype, device):
        """Far out, gates are 0 or 1 and the candidate -1 or the pre-activation; gradients stay finite."""
        gates = torch.tensor(
            [[1e3, 1e3, -1e3], [-1e3, -1e3, 1e3], [1e3, -1e3, 1e3]], dtype=dtype, device=device
        )
        zeros = torch.zeros(1, 1, dtype=dtype, device=device)
        for row, cell in zip(gates, (-1, 0, 1e3), strict=True):
            bias = row.clone().requires_grad_()
            weights = torch.zeros(3, 2, dtype=dtype, device=device)
            new_h, new_cell = lltm_ext.lltm_cell(zeros, weights, bias, zeros, zeros)
            assert new_cell.item() == cell
            assert abs(new_h.item()) <= 1
            (new_h + new_cell).sum().backward()
            assert bias.grad.isfinite().all()

    def test_infinities_and_nan_come_through_as_in_the_reference(self, dtype, device):
        """In every gate and in the cell; so many units that loops of vectors and their tails meet them."""
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
        outputs, gradients = forward_and_gradients(self.function, call)
        exact, exact_gradients = forward_and_gradients(self.reference, call.map(torch.Tensor.double))
        assert_all_near(outputs, exact, FORWARD[torch.float32])
        assert_all_near(gradients, exact_gradients, BACKWARD[torch.float32])


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, DOUBLE])
def test_a_step_of_few_units_is_one_kernel_each_way(dtype, profiler_sees_kernels):
    for sizes, is_small in (((64, 128, 128), True), ((65, 7, 30), False), ((3, 260, 253), False)):
        call = Call(*cell_arguments(Make(dtype, "cuda"), *sizes)).leaves()
        outputs = call.run(lltm_ext.lltm_cell)
        backward = functools.partial(
            torch.autograd.grad, outputs, call.tensors, cotangents(outputs), retain_graph=True
        )
        backward()  # all modules are loaded before the profiler looks
        found = kernels_of([functools.partial(call.run, lltm_ext.lltm_cell), backward])
        for direction, kernels in zip(("forward", "backward"), found, strict=True):
            is_one = len(kernels) == 1 and f"lltm_fused_cell_{direction}_kernel" in kernels[0]
            assert is_one == (is_small and dtype != DOUBLE), (sizes, direction, kernels)


def module(**options):
    return lambda **where: lltm_ext.LLTMCell(7, 5, **options, **where)


class TestLLTMCell(ModuleSuite):
    modules = {
        "LLTMCell": (module(), lambda make: Call(make(4, 7), (make(4, 5), make(4, 5)))),
        "without bias": (module(bias=False), lambda make: Call(make(4, 7), (make(4, 5), make(4, 5)))),
        "without states": (module(), lambda make: Call(make(4, 7))),
        "unbatched": (module(), lambda make: Call(make(7), (make(5), make(5)))),
    }

    def test_it_is_called_like_nn_lstmcell(self, module, device):
        built, call = self.module_and_call(module, device=device)
        peer = torch.nn.LSTMCell(7, 5, bias=built.bias is not None, device=device)
        ours, theirs = built(*call.args), peer(*call.args)
        assert isinstance(ours, tuple)
        assert [y.shape for y in ours] == [y.shape for y in theirs]

    def test_it_equals_the_function(self, device):
        built, call = self.module_and_call("LLTMCell", DOUBLE, device)
        input, hx = call.args
        expected = lltm_cell_reference(input, built.weights, built.bias, *hx)
        assert_all_near(built(input, hx), expected, FORWARD[DOUBLE])
        zeros = input.new_zeros(4, 5)
        expected = lltm_cell_reference(input, built.weights, built.bias, zeros, zeros)
        assert_all_near(built(input), expected, FORWARD[DOUBLE])

    def test_an_unbatched_step_equals_a_batch_of_one(self, device):
        built, call = self.module_and_call("unbatched", DOUBLE, device)
        input, (h, c) = call.args
        expected = [y[0] for y in built(input[None], (h[None], c[None]))]
        assert_all_near(built(input, (h, c)), expected, FORWARD[DOUBLE])

    def test_it_has_the_parameters_of_the_tutorial(self):
        cell = lltm_ext.LLTMCell(7, 5)
        assert {k: tuple(v.shape) for k, v in cell.state_dict().items()} == {
            "weights": (15, 12),
            "bias": (15,),
        }
        assert list(lltm_ext.LLTMCell(7, 5, bias=False).state_dict()) == ["weights"]

    def test_parameters_are_drawn_within_one_over_the_root_of_the_size(self):
        torch.manual_seed(0)
        cell = lltm_ext.LLTMCell(70, 100)
        for parameter in cell.parameters():
            assert 0.08 < parameter.abs().max() <= 0.1
            assert abs(parameter.mean()) < 0.02
        before = cell.weights.detach().clone()
        cell.reset_parameters()
        assert not torch.equal(cell.weights, before)

    @pytest.mark.parametrize(
        "arguments, exception, pattern",
        [
            ((None,), TypeError, "^LLTMCell: expected input to be a Tensor, got NoneType"),
            ((torch.zeros(4, 6),), RuntimeError, r"^LLTMCell: expected input .*input_size = 7, got \[4, 6\]"),
            ((torch.zeros(2, 4, 7),), RuntimeError, r"^LLTMCell: expected input .*got \[2, 4, 7\]"),
            (
                (torch.zeros(4, 7), torch.zeros(4, 5)),
                TypeError,
                r"^LLTMCell: expected hx to be a pair .*got Tensor",
            ),
            ((torch.zeros(4, 7), (torch.zeros(4, 5), None)), TypeError, "^LLTMCell: expected c0 .*NoneType"),
            (
                (torch.zeros(4, 7), (torch.zeros(1, 5), torch.zeros(1, 5))),
                RuntimeError,
                r"^LLTMCell: expected h0 of shape \[4, 5\], got \[1, 5\]",
            ),
            (
                (torch.zeros(4, 7, dtype=torch.double),),
                TypeError,
                "expected weights of dtype float64, got float32",
            ),
        ],
    )
    def test_bad_input(self, arguments, exception, pattern):
        cell = lltm_ext.LLTMCell(7, 5)
        with pytest.raises(exception, match=pattern):
            cell(*arguments)

    def test_bad_sizes(self):
        with pytest.raises(ValueError, match=r"^LLTMCell: expected hidden_size to be positive, got 0"):
            lltm_ext.LLTMCell(7, 0)
        with pytest.raises(TypeError, match=r"^LLTMCell: expected input_size to be an int, got float"):
            lltm_ext.LLTMCell(7.0, 5)
