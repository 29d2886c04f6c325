import torch
from op_suite import (
    Call,
    ElementwiseSuite,
    FormsSuite,
    ModuleSuite,
    RawBackwardSuite,
    SmoothSuite,
    elementwise_bad_calls,
)

import lltm_ext
from lltm_ext import _C
from lltm_ext.relu import relu_reference


class TestReLU(ElementwiseSuite, FormsSuite, SmoothSuite, RawBackwardSuite, ModuleSuite):
    op = "relu"
    function = staticmethod(lltm_ext.relu)
    in_place = staticmethod(lltm_ext.relu_)
    reference = staticmethod(relu_reference)
    Function = lltm_ext.ReLUFunction
    bindings = _C.relu
    bad_calls = elementwise_bad_calls("relu")
    modules = {"ReLU": (lambda device, dtype: lltm_ext.ReLU(), lambda make: Call(make(63, 3)))}

    def dispatcher_calls(self, call):
        yield torch.ops.lltm_ext.relu.default, call
        (x,) = call.tensors
        yield torch.ops.lltm_ext.relu_backward.default, Call(x.detach().cos(), x.detach().relu())

    def test_the_gradient_at_zero_is_zero(self, dtype, device):
        x = torch.tensor([0.0, -0.0, 1e-4, -1e-4], dtype=dtype, device=device, requires_grad=True)
        lltm_ext.relu(x).sum().backward()
        assert x.grad.tolist() == [0, 0, 1, 0]

    def test_no_gradient_passes_where_the_output_is_zero_even_nan(self, device):
        x = torch.tensor([-1.0, 0.0, 1.0], device=device, requires_grad=True)
        lltm_ext.relu(x).backward(torch.tensor([torch.nan, torch.inf, 2.0], device=device))
        assert x.grad.tolist() == [0, 0, 2]
