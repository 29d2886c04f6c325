import torch
from op_suite import (
    DOUBLE,
    Call,
    ElementwiseSuite,
    FormsSuite,
    Make,
    ModuleSuite,
    RawBindingSuite,
    assert_same_bits,
    elementwise_bad_calls,
    forward_and_gradients,
    results,
)

import lltm_ext
from lltm_ext import _C
from lltm_ext.round import (
    binarize_reference,
    ceil_reference,
    floor_reference,
    round_reference,
    trunc_reference,
)


def modules_of(name, *options):
    """The module of that name, as ModuleSuite takes it."""
    Module = getattr(lltm_ext, name)
    return {name: (lambda device, dtype: Module(*options), lambda make: Call(make(63, 3, scale=3)))}


class StraightThroughSuite(ElementwiseSuite, FormsSuite):
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


class TestRound(StraightThroughSuite, ModuleSuite, RawBindingSuite):
    op = "round"
    function = staticmethod(lltm_ext.round)
    in_place = staticmethod(lltm_ext.round_)
    reference = staticmethod(round_reference)
    Function = lltm_ext.RoundFunction
    bad_calls = elementwise_bad_calls("round")
    modules = modules_of("Round")
    bindings = _C.round
    tensors_of_bindings = {"forward": ["input"], "backward": ["grad_output"], "binarize": ["input"]}

    def test_raw_bindings_compute_what_the_functions_do(self, dtype, device):
        x = Make(dtype, device)(63, 3, scale=3)
        found = [_C.round.forward(x), _C.round.backward(x), _C.round.binarize(x, threshold=0.25)]
        assert_same_bits(found, [torch.round(x), x, (x > 0.25).to(dtype)])

    def test_ties_go_to_even(self, dtype, device):
        x = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5], dtype=dtype, device=device)
        assert lltm_ext.round(x).tolist() == [-2, -2, 0, 0, 2, 2, 4]

    def test_large_values_are_integers_already(self, device):
        x = torch.tensor([2.0**23 + 1, 2.0**24, -(2.0**31), 1e30], device=device)
        assert_same_bits([lltm_ext.round(x)], [x])


class TestFloor(StraightThroughSuite, ModuleSuite):
    op = "floor"
    function = staticmethod(lltm_ext.floor)
    in_place = staticmethod(lltm_ext.floor_)
    reference = staticmethod(floor_reference)
    Function = lltm_ext.FloorFunction
    bad_calls = elementwise_bad_calls("floor")
    modules = modules_of("Floor")


class TestCeil(StraightThroughSuite, ModuleSuite):
    op = "ceil"
    function = staticmethod(lltm_ext.ceil)
    in_place = staticmethod(lltm_ext.ceil_)
    reference = staticmethod(ceil_reference)
    Function = lltm_ext.CeilFunction
    bad_calls = elementwise_bad_calls("ceil")
    modules = modules_of("Ceil")


class TestTrunc(StraightThroughSuite, ModuleSuite):
    op = "trunc"
    function = staticmethod(lltm_ext.trunc)
    in_place = staticmethod(lltm_ext.trunc_)
    reference = staticmethod(trunc_reference)
    Function = lltm_ext.TruncFunction
    bad_calls = elementwise_bad_calls("trunc")
    modules = modules_of("Trunc")


NO_FLOAT = "binarize.*value of type 'float' for argument 'threshold' but instead found type"
LOW_ABOVE_HIGH = "^binarize: expected low below high, got low = 1, high = 0"
NO_SUCH_GRAD = "^binarize: expected grad 'identity', 'clipped' or 'tanh', got 'straight'"
BINARIZE_BAD_CALLS = {
    **elementwise_bad_calls("binarize"),
    "no threshold": (lambda make: Call(make(3), None), RuntimeError, f"{NO_FLOAT} 'NoneType'"),
    "text as threshold": (lambda make: Call(make(3), "high"), RuntimeError, f"{NO_FLOAT} 'str'"),
    "low above high": (lambda make: Call(make(3), low=1.0, high=0.0), ValueError, LOW_ABOVE_HIGH),
    "another gradient": (lambda make: Call(make(3), grad="straight"), ValueError, NO_SUCH_GRAD),
}


class TestBinarize(StraightThroughSuite, ModuleSuite):
    op = "binarize"
    function = staticmethod(lltm_ext.binarize)
    in_place = staticmethod(lltm_ext.binarize_)
    reference = staticmethod(binarize_reference)
    Function = lltm_ext.BinarizeFunction
    bad_calls = BINARIZE_BAD_CALLS
    modules = modules_of("Binarize", 0.25, -1.0, 1.0)
    samples = {
        **StraightThroughSuite.samples,
        "low threshold": lambda make: Call(make(63), -1.25),
        "threshold by name": lambda make: Call(make(63), threshold=0.75),
        "other values": lambda make: Call(make(63), 0.0, low=-2.0, high=3.5),
    }

    def apply(self, input, threshold=0.5, low=0.0, high=1.0, grad="identity"):
        return lltm_ext.BinarizeFunction.apply(input, threshold, low, high, grad)

    def test_the_function_class_has_the_functions_defaults(self, device):
        for arguments in ((), (0.25,), (0.25, -1.0), (0.25, -1.0, 2.0, "clipped")):
            call = Call(Make(device=device)(63), *arguments)
            assert_same_bits(results(lltm_ext.BinarizeFunction.apply, call), results(lltm_ext.binarize, call))

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


class CurveSuite(ElementwiseSuite, FormsSuite, ModuleSuite):
    """binarize with the gradient of a curve, which is its derivative almost everywhere: so is its own."""

    op = "binarize"
    grad: str
    saved = 0
    bad_calls = BINARIZE_BAD_CALLS
    Function = lltm_ext.BinarizeFunction

    def function(self, input, threshold=0.1, low=-1.0, high=1.5, grad=None, **out):
        return lltm_ext.binarize(input, threshold, low, high, self.grad if grad is None else grad, **out)

    def in_place(self, input, threshold=0.1, low=-1.0, high=1.5):
        return lltm_ext.binarize_(input, threshold, low, high, self.grad)

    def reference(self, input, threshold=0.1, low=-1.0, high=1.5):
        return binarize_reference(input, threshold, low, high, self.grad)

    def apply(self, input, threshold=0.1, low=-1.0, high=1.5):
        return lltm_ext.BinarizeFunction.apply(input, threshold, low, high, self.grad)

    def dispatcher_calls(self, call):
        (x,) = call.tensors
        how = (0.1, -1.0, 1.5, self.grad)
        yield torch.ops.lltm_ext.binarize.default, Call(x, *how)
        yield torch.ops.lltm_ext.binarize_backward.default, Call(x.detach().cos(), x.detach(), *how)


class TestBinarizeClipped(CurveSuite):
    grad = "clipped"
    modules = modules_of("Binarize", 0.1, -1.0, 1.5, "clipped")

    def test_the_gradient_ends_where_the_values_are_reached(self, dtype, device):
        x = torch.tensor([-1.25, -1.0, 0.0, 1.0, 1.25, torch.nan], dtype=dtype, device=device)
        x.requires_grad_()
        for create_graph in (False, True):
            y = lltm_ext.binarize(x, 0.0, -1.0, 1.0, grad="clipped")
            (found,) = torch.autograd.grad(y, x, torch.full_like(y, torch.inf), create_graph=create_graph)
            assert found.tolist() == [0, torch.inf, torch.inf, torch.inf, 0, 0]


class TestBinarizeTanh(CurveSuite):
    grad = "tanh"
    modules = modules_of("Binarize", 0.1, -1.0, 1.5, "tanh")

    def test_the_slope_at_the_threshold_is_1(self, dtype, device):
        x = torch.tensor([0.25, torch.inf, -torch.inf], dtype=dtype, device=device, requires_grad=True)
        lltm_ext.binarize(x, 0.25, grad="tanh").sum().backward()
        assert x.grad.tolist() == [1, 0, 0]

    def test_the_gradient_is_differentiable(self, device):
        x = Make(DOUBLE, device)(5).requires_grad_()
        grad_output = Make(DOUBLE, device, seed=1)(5).requires_grad_()

        def gradient(g, x):
            return torch.ops.lltm_ext.binarize_backward(g, x, 0.1, -1.0, 1.5, "tanh")

        assert torch.autograd.gradcheck(gradient, (grad_output, x))
