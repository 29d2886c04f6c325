import pytest
import torch
from op_suite import (
    DOUBLE,
    Call,
    ElementwiseSuite,
    Make,
    ModuleSuite,
    assert_same_bits,
    elementwise_bad_calls,
    forward_and_gradients,
)

import lltm_ext
from lltm_ext import _C
from lltm_ext.round import binarize_reference, round_reference


class StraightThroughSuite(ElementwiseSuite):
    """The gradient is the identity, so finite differences cannot judge it: it is compared bit by bit."""

    saved_tensors = 0

    def test_the_gradient_is_the_incoming_one(self, dtype, device):
        make = Make(dtype, device)
        x, grad_output = make(63, 3, scale=3), make(63, 3)
        for function in (self.function, self.apply):
            _, gradients = forward_and_gradients(function, Call(x), [grad_output])
            assert_same_bits(gradients, [grad_output])

    def test_backward_copies_nothing(self, device):
        x = Make(device=device)(5).requires_grad_()
        grad_output = torch.ones(5, device=device)
        for function in (self.function, self.apply):
            (gradient,) = torch.autograd.grad(function(x), x, grad_output)
            assert gradient.data_ptr() == grad_output.data_ptr()

    def test_a_gradient_of_the_gradient_is_the_identity_too(self, device):
        x = Make(DOUBLE, device)(5).requires_grad_()
        grad_output = Make(DOUBLE, device, seed=1)(5).requires_grad_()
        for function in (self.function, self.apply):
            (gradient,) = torch.autograd.grad(function(x), x, grad_output, create_graph=True)
            (second,) = torch.autograd.grad(gradient, grad_output, torch.full_like(x, 3))
            assert second.tolist() == [3] * 5

    # Nothing is saved, so nothing can be spoilt.
    test_an_edit_before_backward_is_noticed = None

    def test_an_edit_before_backward_does_no_harm(self, device):
        x = Make(device=device)(5).requires_grad_()
        inner = x * 1
        y = self.function(inner)
        loss = y.clone().sum()
        with torch.no_grad():
            inner.zero_()
            y.zero_()
        loss.backward()
        assert x.grad.tolist() == [1] * 5


class TestRound(StraightThroughSuite, ModuleSuite):
    op = "round"
    function = staticmethod(lltm_ext.round)
    reference = staticmethod(round_reference)
    Function = lltm_ext.RoundFunction
    bad_calls = elementwise_bad_calls("round")
    modules = {"Round": (lambda device, dtype: lltm_ext.Round(), lambda make: Call(make(63, 3, scale=3)))}

    def test_ties_go_to_even(self, dtype, device):
        x = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5], dtype=dtype, device=device)
        assert lltm_ext.round(x).tolist() == [-2, -2, 0, 0, 2, 2, 4]

    def test_large_values_are_integers_already(self, device):
        x = torch.tensor([2.0**23 + 1, 2.0**24, -(2.0**31), 1e30], device=device)
        assert_same_bits([lltm_ext.round(x)], [x])


class TestBinarize(StraightThroughSuite):
    op = "binarize"
    function = staticmethod(lltm_ext.binarize)
    reference = staticmethod(binarize_reference)
    Function = lltm_ext.BinarizeFunction
    bad_calls = {
        **elementwise_bad_calls("binarize"),
        "no threshold": (
            lambda make: Call(make(3), None),
            RuntimeError,
            "binarize.*value of type 'float' for argument 'threshold' but instead found type 'NoneType'",
        ),
        "text as threshold": (
            lambda make: Call(make(3), "high"),
            RuntimeError,
            "binarize.*value of type 'float' for argument 'threshold' but instead found type 'str'",
        ),
    }
    samples = {
        **StraightThroughSuite.samples,
        "low threshold": lambda make: Call(make(63), -1.25),
        "threshold by name": lambda make: Call(make(63), threshold=0.75),
    }

    def apply(self, input, threshold=0.5):
        return lltm_ext.BinarizeFunction.apply(input, threshold)

    def test_the_threshold_itself_gives_0(self, dtype, device):
        x = torch.tensor([0.25, 0.5, 0.75], dtype=dtype, device=device)
        assert lltm_ext.binarize(x).tolist() == [0, 0, 1]
        assert lltm_ext.binarize(x, 0.25).tolist() == [0, 1, 1]
        assert lltm_ext.binarize(x, float("inf")).tolist() == [0, 0, 0]
        assert lltm_ext.binarize(x, float("-inf")).tolist() == [1, 1, 1]

    def test_nan_gives_0(self, dtype, device):
        x = torch.tensor([torch.nan, 1.0], dtype=dtype, device=device)
        assert lltm_ext.binarize(x).tolist() == [0, 1]
        assert lltm_ext.binarize(x, torch.nan).tolist() == [0, 0]


class TestRawBindings:
    def test_they_compute_what_the_functions_do(self, dtype, device):
        x = Make(dtype, device)(63, 3, scale=3)
        assert_same_bits([_C.round.forward(x)], [torch.round(x)])
        assert_same_bits([_C.round.backward(x)], [x])
        assert_same_bits([_C.round.binarize(x, threshold=0.25)], [(x > 0.25).to(dtype)])

    @pytest.mark.parametrize(
        "binding, argument", [("forward", "input"), ("backward", "grad_output"), ("binarize", "input")]
    )
    def test_they_refuse_what_check_input_names(self, binding, argument, device):
        function = getattr(_C.round, binding)
        good = Make(device=device)(3, 5)
        for value, exception, pattern in (
            (good.T, RuntimeError, r"to be contiguous, got strides \[1, 5\]"),
            (good.long(), TypeError, "of dtype float16, bfloat16, float32 or float64, got int64"),
            (good.to_sparse(), RuntimeError, "of layout torch.strided, got Sparse"),
        ):
            with pytest.raises(exception, match=f"^round.{binding}: expected {argument} {pattern}"):
                function(value)
        with pytest.raises(TypeError, match=rf"{binding}\(\): incompatible function arguments"):
            function(None)
        assert function(good).shape == good.shape
