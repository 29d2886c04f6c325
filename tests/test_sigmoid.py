import torch
from op_suite import Call, ElementwiseSuite, ModuleSuite, RawBindingSuite, SmoothSuite, elementwise_bad_calls

import lltm_ext
from lltm_ext import _C
from lltm_ext.sigmoid import sigmoid_reference


class TestSigmoid(ElementwiseSuite, SmoothSuite, RawBindingSuite, ModuleSuite):
    op = "sigmoid"
    function = staticmethod(lltm_ext.sigmoid)
    reference = staticmethod(sigmoid_reference)
    Function = lltm_ext.SigmoidFunction
    bindings = _C.sigmoid
    bad_calls = elementwise_bad_calls("sigmoid")
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
