import pytest
import torch
from op_suite import (
    FLOATING,
    Call,
    ElementwiseSuite,
    FormsSuite,
    ModuleSuite,
    RawBackwardSuite,
    SmoothSuite,
    elementwise_bad_calls,
    results,
)

import lltm_ext
from lltm_ext import _C
from lltm_ext.sigmoid import sigmoid_reference

COMPLEX = FLOATING.replace(" or float64", ", float64, complex64 or complex128")


class TestSigmoid(ElementwiseSuite, FormsSuite, SmoothSuite, RawBackwardSuite, ModuleSuite):
    op = "sigmoid"
    function = staticmethod(lltm_ext.sigmoid)
    in_place = staticmethod(lltm_ext.sigmoid_)
    reference = staticmethod(sigmoid_reference)
    Function = lltm_ext.SigmoidFunction
    bindings = _C.sigmoid
    bad_calls = elementwise_bad_calls("sigmoid", COMPLEX)
    modules = {"Sigmoid": (lambda device, dtype: lltm_ext.Sigmoid(), lambda make: Call(make(63, 3)))}

    def dispatcher_calls(self, call):
        yield torch.ops.lltm_ext.sigmoid.default, call
        (x,) = call.tensors
        yield torch.ops.lltm_ext.sigmoid_backward.default, Call(x.detach().cos(), x.detach().sigmoid())

    def test_infinities_give_0_and_1_with_gradient_0(self, dtype, device):
        x = torch.tensor([-torch.inf, torch.inf], dtype=dtype, device=device, requires_grad=True)
        y = lltm_ext.sigmoid(x)
        y.sum().backward()
        assert y.tolist() == [0, 1]
        assert x.grad.tolist() == [0, 0]

    def test_small_results_keep_their_digits(self, device):
        """Far below zero the sigmoid is e^x, not the nearest multiple of epsilon."""
        x = torch.tensor([-20.0, -50.0, -80.0], device=device)
        torch.testing.assert_close(lltm_ext.sigmoid(x), x.double().exp().float(), rtol=1e-5, atol=0)

    @pytest.mark.parametrize("complex_dtype", [torch.complex64, torch.complex128])
    def test_complex_values_and_gradients_are_torchs(self, complex_dtype, device):
        real, imaginary, grad = (
            torch.randn(2, 500, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            for seed in range(3)
        )
        x = torch.complex(4 * real, 4 * imaginary).to(device, complex_dtype)
        grad_output = torch.complex(grad, real).to(device, complex_dtype)
        bound = 1e-5 if complex_dtype == torch.complex64 else 1e-13
        ours = results(lltm_ext.sigmoid, Call(x), [grad_output])
        exact = results(torch.sigmoid, Call(x.to(torch.complex128)), [grad_output])
        assert all((y - e).norm() <= bound * e.norm() for y, e in zip(ours, exact, strict=True))

    def test_complex_derivatives_agree_with_finite_differences(self, device):
        x = torch.randn(2, 3, dtype=torch.complex128, device=device, requires_grad=True)
        assert torch.autograd.gradcheck(lltm_ext.sigmoid, x)
        assert torch.autograd.gradgradcheck(lltm_ext.sigmoid, x)

    def test_far_complex_values_do_not_overflow(self, device):
        x = torch.tensor([800 + 1j, -800 + 1j], dtype=torch.complex128, device=device)
        assert lltm_ext.sigmoid(x).tolist() == [1, 0]
