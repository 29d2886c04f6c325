"""fake_quantize. Finite differences can't check a straight-through gradient, so torch's own op does."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from op_suite import (
    BACKWARD,
    DOUBLE,
    EXAMPLES,
    FORWARD,
    Call,
    ElementwiseSuite,
    Make,
    ModuleSuite,
    OpSuite,
    assert_agree,
    assert_all_near,
    assert_near,
    assert_same_bits,
    elementwise_bad_calls,
    expected_by,
    forward_and_gradients,
    needs_cuda,
    packed,
    pairwise,
    results,
    stacked,
    tensors_saved_by,
    transposed,
    unfit_for_bindings,
)
from torch.utils import _pytree as pytree

import lltm_ext
from lltm_ext import _C
from lltm_ext.fake_quantize import fake_quantize_reference

ops = torch.ops.lltm_ext
RANGE = (-8, 7)
# With a power of two the quotient is exact, so all dtypes round to the same integer.
SCALE, ZERO_POINT = 0.25, 1
OF_AXIS = r"of shape \[input.shape\[axis\]\]"  # in messages


def with_defaults(function):
    """`function` with a default for every parameter but the input."""

    def call(input, scale=SCALE, zero_point=ZERO_POINT, quant_min=RANGE[0], quant_max=RANGE[1], **options):
        return function(input, scale, zero_point, quant_min, quant_max, **options)

    return call


def parameters(make, scales, zero_points=None):
    """(scales, powers of two; as many zero points, or another number of them, integers)"""
    scale = 2.0 ** torch.randint(-2, 1, (scales,), generator=make.generator)
    zero_point = torch.randint(*RANGE, (zero_points or scales,), generator=make.generator)
    return [x.to(make.dtype).to(make.device) for x in (scale, zero_point)]


def in_range(x, scale, zero_point):
    """Where x is not clamped. The parameters broadcast."""
    shifted = torch.round(x / scale) + zero_point
    return (shifted >= RANGE[0]) & (shifted <= RANGE[1])


def mask_of(booleans):
    """Eight booleans in each byte, the first in its lowest bit."""
    flat = torch.nn.functional.pad(booleans.flatten().cpu(), (0, -booleans.numel() % 8)).view(-1, 8)
    return (flat * 2 ** torch.arange(8)).sum(1).to(torch.uint8)


BAD_PARAMETERS = {
    TypeError: {
        "scale to be a number or a Tensor, got NoneType": lambda make: Call(make(3), None),
        "zero_point to be a number or a Tensor, got str": lambda make: Call(make(3), 1.0, "0"),
        "scale of dtype float32, got float64": lambda make: Call(make(3), make(1).double()),
        "zero_point of dtype int32, int64 or floating, got int16": lambda make: Call(
            make(3), 1.0, make(1).to(torch.int16)
        ),
    },
    ValueError: {
        "scale above 0, got": lambda make: Call(make(3), 0.0),
        "zero_point from quant_min = -8 to quant_max = 7, got 8": lambda make: Call(make(3), 1.0, 8),
        "quant_min not above quant_max, got quant_min = 7, quant_max = -8": lambda make: Call(
            make(3), torch.tensor(1.0), torch.tensor(0), 7, -8
        ),
        "fewer than 2.22 integers from quant_min to quant_max, got .*2097152": lambda make: Call(
            make(3), 1.0, 0, -(2**21), 2**21
        ),
        "fewer than 2.22 integers from quant_min to quant_max, got .*9223372036854775807": lambda make: Call(
            make(3), 1.0, 0, -(2**63), 2**63 - 1
        ),
        "axis from -2 to 1 for input of 2 dimensions, got 2": lambda make: Call(make(3, 5), axis=2),
    },
    RuntimeError: {
        rf"scale {OF_AXIS} = \[5\], got \[3\]": lambda make: Call(make(3, 5), make(3), axis=1),
        rf"zero_point {OF_AXIS} = \[3\], got \[3, 1\]": lambda make: Call(make(3, 5), 1.0, make(3, 1)),
        "scale of one element for input without dimensions": lambda make: Call(make(), make(3)),
    },
}


class TestFakeQuantize(ElementwiseSuite):
    """Scale and zero point are numbers."""

    op = "fake_quantize"
    function = staticmethod(with_defaults(lltm_ext.fake_quantize))
    reference = staticmethod(with_defaults(fake_quantize_reference))
    bad_calls = elementwise_bad_calls("fake_quantize") | expected_by("fake_quantize", BAD_PARAMETERS)

    def apply(self, *args, **kwargs):
        return with_defaults(lltm_ext.FakeQuantizeFunction.apply)(*args, **kwargs)

    def dispatcher_calls(self, call):
        (x,) = call.args
        scale, zero_point = torch.tensor(SCALE).to(x), torch.tensor(float(ZERO_POINT)).to(x)
        yield ops.fake_quantize.default, Call(x, scale, zero_point, *RANGE)

    def test_opcheck_of_the_learnable_backward(self, device):
        x, scale, zero_point = learnable(Make(DOUBLE, device), 4, 3, axis=1).tensors
        for g in (x, transposed(x)):
            torch.library.opcheck(ops.fake_quantize_backward.default, (g, x, scale, zero_point, *RANGE, 1))

    def test_vmap_of_the_backward_ops(self, device):
        xs = [Make(DOUBLE, device, seed)(4, 3) for seed in range(3)]
        scale, zero_point = parameters(Make(DOUBLE, device), 3)
        for calls in (
            [Call(x, x + 1, scale, zero_point, *RANGE, 1) for x in xs],
            [Call(x, ops.fake_quantize_with_mask(x, scale, zero_point, *RANGE, 1)[1], [3, 1]) for x in xs],
        ):
            op = ops.fake_quantize_backward if len(calls[0].args) > 3 else ops.fake_quantize_mask_backward
            outputs = torch.vmap(calls[0].bind(op))(*stacked(c.tensors for c in calls))
            expected = stacked(c.run(op) for c in calls)
            assert_all_near(pytree.tree_leaves(outputs), expected, FORWARD[DOUBLE])

    @needs_cuda
    def test_compiles_with_inductor(self, fresh_dynamo):
        """On the CPU Inductor compiles the numbers to C++ for half a minute; TestLearnable has none."""
        super().test_compiles_with_inductor(self.call("63", DOUBLE, "cuda"), fresh_dynamo)

    # The function saves one bit for each element, so an edit of input or output changes no gradient.
    test_an_edit_before_backward_is_noticed = None

    def test_an_edit_before_backward_does_not_change_the_gradient(self, device):
        x = Make(device=device)(50).requires_grad_()
        inner = x * 1
        y = self.function(inner)
        loss = y.clone().sum()
        with torch.no_grad():
            inner.zero_()
            y.zero_()
        loss.backward()
        assert torch.equal(x.grad, in_range(x.detach(), SCALE, ZERO_POINT).float())

    @pytest.mark.parametrize("n", [1, 7, 8, 9, 255, 1000, 100_003])
    def test_one_bit_for_each_element_is_saved(self, n, dtype, device):
        x = Make(dtype, device)(n).requires_grad_()
        (mask,) = tensors_saved_by(lambda: self.function(x))
        assert torch.equal(mask.cpu(), mask_of(in_range(x.detach(), SCALE, ZERO_POINT)))

    @pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
    def test_opcheck_of_the_mask(self, format, device):
        x = Make(DOUBLE, device)(2, 3, 4, 5).contiguous(memory_format=format)
        scale, zero_point = torch.tensor(SCALE, device=device), torch.tensor(ZERO_POINT, device=device)
        for leaf in (x, x.clone().requires_grad_()):
            torch.library.opcheck(ops.fake_quantize_with_mask.default, (leaf, scale, zero_point, *RANGE))
        y, mask = ops.fake_quantize_with_mask(x.detach(), scale, zero_point, *RANGE)
        for g in (y, y.clone().requires_grad_()):
            torch.library.opcheck(ops.fake_quantize_mask_backward.default, (g, mask, y.stride()))

    def test_the_double_backward_applies_the_mask(self, device):
        x = Make(DOUBLE, device)(50).requires_grad_()
        grad_output = Make(DOUBLE, device, seed=1)(50).requires_grad_()
        (gradient,) = torch.autograd.grad(self.function(x), x, grad_output, create_graph=True)
        (second,) = torch.autograd.grad(gradient, grad_output, torch.full_like(x, 3), create_graph=True)
        assert torch.equal(second, 3 * in_range(x.detach(), SCALE, ZERO_POINT))

    def test_the_mask_backward_refuses_mismatched_arguments(self, device):
        g = Make(device=device)(9)
        for mask, exception, pattern in (
            (torch.zeros(1, dtype=torch.uint8, device=device), RuntimeError, r"shape .* = \[2\], got \[1\]"),
            (torch.zeros(2, device=device), TypeError, "dtype uint8, got float32"),
        ):
            with pytest.raises(exception, match=f"^fake_quantize_mask_backward: expected mask of {pattern}"):
                ops.fake_quantize_mask_backward(g, mask, [1])
        mask = torch.zeros(2, dtype=torch.uint8, device=device)
        for strides, what in (([1, 1], "a stride for each dimension"), ([2], "strides of a dense tensor")):
            with pytest.raises(RuntimeError, match=f"expected {what}"):
                ops.fake_quantize_mask_backward(g, mask, strides)


def learnable(make, *shape, axis=None, scale=3, **options):
    channels = 1 if axis is None else shape[axis]
    x = make(*shape, scale=scale)
    return Call(x, *parameters(make, channels), *RANGE, axis=axis, **options)


BAD_TENSORS = {
    RuntimeError: {
        rf"scale {OF_AXIS} = \[3\], got \[4\]": lambda make: Call(make(3, 5), make(4), make(1), *RANGE)
    },
    TypeError: {
        "scale of dtype float64, got float16": lambda make: Call(
            make(3).double(), make(1).half(), make(1), *RANGE
        )
    },
}


# Shapes for each way that the kernels traverse memory.
OF_AXIS_0 = ((3, 9001), (3, 1024), (4096, 27))
OF_AXIS_1 = ((64, 8, 49), (64, 8, 1024), (600, 33, 5), (1000, 3), (2048, 256), (300, 7, 3, 3))


class TestLearnable(OpSuite):
    """Scale and zero point are tensors that require gradients."""

    op = "fake_quantize"
    function = staticmethod(lltm_ext.fake_quantize)
    reference = staticmethod(fake_quantize_reference)
    Function = lltm_ext.FakeQuantizeFunction
    samples = {
        "small": lambda make: learnable(make, 4, 3, axis=1, grad_factor=0.5),
        "per tensor": lambda make: learnable(make, 5, 7),
        "63": lambda make: learnable(make, 63, 3),
        "500": lambda make: learnable(make, 500, 37),
        "rows": lambda make: learnable(make, 5, 1001, axis=0),
        "last axis": lambda make: learnable(make, 300, 5, axis=-1),
        "short rows": lambda make: learnable(make, 300, 5, 3, axis=1),
        "long rows": lambda make: learnable(make, 2, 3, 20_000, axis=1),
        "one zero point": lambda make: Call(make(4, 3), *parameters(make, 3, 1), *RANGE, axis=1),
        "one scale": lambda make: Call(make(4, 3), *parameters(make, 1, 3), *RANGE, axis=1),
    }
    empty_samples = {
        "no elements": lambda make: learnable(make, 0),
        "no rows": lambda make: learnable(make, 0, 5, axis=1),
        "no channels": lambda make: learnable(make, 5, 0, axis=1),
    }
    bad_calls = expected_by("fake_quantize", BAD_TENSORS)

    def apply(self, *args, axis=None, grad_factor=1.0):
        return self.Function.apply(*args, axis, grad_factor)

    @needs_cuda
    @pytest.mark.parametrize("name", ["scale", "zero_point"])
    def test_a_parameter_on_another_device_is_refused(self, name):
        given = {"scale": torch.ones(1), "zero_point": torch.ones(1)}
        given = {k: x if k == name else x.cuda() for k, x in given.items()}
        with pytest.raises(RuntimeError, match=f"^fake_quantize: expected {name} on cuda:0, got cpu"):
            lltm_ext.fake_quantize(torch.ones(3, device="cuda"), *given.values(), *RANGE)
        # A tensor without dimensions counts as a number.
        given[name] = given[name].squeeze()
        assert lltm_ext.fake_quantize(torch.ones(3, device="cuda"), *given.values(), *RANGE).is_cuda

    def test_only_required_gradients_are_computed(self, device):
        x, scale, zero_point = self.call("small", DOUBLE, device).tensors
        y = lltm_ext.fake_quantize(x, scale, zero_point.requires_grad_(), *RANGE, axis=1)
        y.sum().backward()
        assert zero_point.grad is not None and x.grad is None and scale.grad is None

    @pytest.mark.parametrize("type", [torch.int32, torch.int64])
    def test_an_integer_zero_point_has_no_gradient(self, type, device):
        x, scale, zero_point = self.call("small", DOUBLE, device).tensors
        leaves = [x.requires_grad_(), scale.requires_grad_()]
        for function in (self.function, lambda *a, axis: self.apply(*a, axis=axis)):
            outputs = [function(x, scale, zero_point.to(type), *RANGE, axis=1)]
            outputs.append(self.function(x, scale, zero_point, *RANGE, axis=1))
            assert_same_bits(*(torch.autograd.grad(y.sum(), leaves) for y in outputs))

    @pytest.mark.parametrize("case", ["500", "rows", "short rows", "long rows"])
    def test_the_number_of_threads_does_not_change_the_bits(self, case):
        call, threads = self.call(case), torch.get_num_threads()
        expected = results(self.function, call)
        try:
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                assert_same_bits(results(self.function, call), expected)
        finally:
            torch.set_num_threads(threads)

    @pairwise(
        shape_axis=[((70_001,), None), *((x, 0) for x in OF_AXIS_0), *((x, 1) for x in OF_AXIS_1)],
        order=["contiguous", "channels_last", "misaligned"],
        dtype=list(FORWARD),
    )
    def test_all_shapes_match_the_reference(self, shape_axis, order, dtype, device):
        shape, axis = shape_axis
        call = learnable(Make(dtype, device), *shape, axis=axis, grad_factor=0.125)
        x, *rest = call.tensors
        if order == "channels_last":
            x = x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 1 else x
        if order == "misaligned":
            x = self.layouts["misaligned"](x)
        ours, exact = call.with_tensors([x, *rest]), call.map(torch.Tensor.double)
        outputs, _ = assert_agree(self.function, self.reference, ours, exact, dtype)
        assert outputs[0].stride() == x.stride()


@pytest.mark.parametrize("options", [{}, {"axis": 1, "grad_factor": 0.125}], ids=["defaults", "options"])
@pytest.mark.parametrize("type", [torch.int64, DOUBLE], ids=["whole", "learnt"])
def test_second_derivatives_are_those_of_the_reference(type, options, device):
    make = Make(DOUBLE, device)
    x, scale = make(5, 3, scale=2), torch.full((3 if options else 1,), 0.3, dtype=DOUBLE, device=device)
    zero_point = torch.full_like(scale, 1, dtype=type)
    inputs = [each.requires_grad_() for each in (x, scale, zero_point) if each.is_floating_point()]
    grad_output = make(5, 3).requires_grad_()
    found = []
    for function in (lltm_ext.fake_quantize, fake_quantize_reference):
        y = function(x, scale, zero_point, *RANGE, **options)
        first = torch.autograd.grad(y, inputs, grad_output, create_graph=True)
        total = sum(gradient.square().sum() for gradient in first)
        found.append([*first, *torch.autograd.grad(total, [*inputs, grad_output], materialize_grads=True)])
    assert_all_near(*found, BACKWARD[DOUBLE])


def unsigned_zeros(tensors):
    """-0 as 0: the sum of the two is 0."""
    return [x + 0.0 for x in tensors]


class TestLikeTorch:
    """The same bits as torch's own, but for the sign of zero gradients.

    The gradient of a clamped element is 0 here. torch multiplies by 0, which gives -0 for a negative one.
    """

    def arguments(self, dtype, device, shape=(6, 5, 33), channels=None):
        make = Make(dtype, device)
        x = make(*shape, scale=2)
        scale = torch.rand(channels or 1, generator=make.generator) * 0.3 + 0.05
        zero_point = torch.randint(*RANGE, (channels or 1,), generator=make.generator, dtype=torch.int32)
        return x, scale.to(device), zero_point.to(device)

    def compare(self, x, scale, zero_point, axis=None, in_float32=None):
        """`in_float32`: whether torch computes in float32 what is given in float64."""

        def torchs(x):
            if axis is None:
                return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, *RANGE)
            return torch.fake_quantize_per_channel_affine(x, scale, zero_point, axis % x.dim(), *RANGE)

        def ours(x):
            return lltm_ext.fake_quantize(x, scale, zero_point, *RANGE, axis=axis)

        (output,), (gradient,) = forward_and_gradients(ours, Call(x))
        (expected,), (expected_gradient,) = forward_and_gradients(torchs, Call(packed(x)))
        if x.dtype == DOUBLE if in_float32 is None else in_float32:
            output, expected = output.float(), expected.float()
        assert_same_bits([output, gradient], [expected, *unsigned_zeros([expected_gradient])])

    @pytest.mark.parametrize("number", [True, False])
    def test_per_tensor(self, number, dtype, device):
        x, scale, zero_point = self.arguments(dtype, device)
        if number:
            scale, zero_point = scale.item(), zero_point.item()
        self.compare(x, scale, zero_point)

    @pytest.mark.parametrize("axis", [0, 1, 2])
    def test_per_channel(self, axis, dtype, device):
        x, scale, zero_point = self.arguments(dtype, device, channels=(6, 5, 33)[axis])
        self.compare(x, scale, zero_point, axis - 3)

    def test_special_values(self, dtype, device):
        x = torch.tensor([torch.nan, torch.inf, -torch.inf, 6e4, -6e4, -0.0, 0.125, 0.375], device=device)
        self.compare(x.to(dtype), 0.25, 1)
        y = lltm_ext.fake_quantize(x.to(dtype), 0.25, 0, *RANGE)
        assert not y[5].signbit(), "the zero of an integer has no sign"

    @pytest.mark.parametrize("zero_point", [-(2**21), 0, 2**21 - 1])
    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
    def test_the_widest_range_clamps_values_far_beyond_it(self, zero_point, dtype, device):
        # Rounding adds a constant, which is exact only up to 2^22. Larger values must not wrap around.
        sizes = [2.0**21, 2.0**22, 2.0**23, 2.0**24, 2.0**25]
        edges = [size + step / 4 for size in sizes for step in range(-8, 9)]
        x = [0.5, 1.5, 2.5, *edges, 2.0**31, 2.0**63, 1e38, torch.inf]
        x = torch.tensor([*x, *(-value for value in x)], device=device, dtype=dtype)
        lowest, highest = -(2**21), 2**21 - 1
        scale, offset = torch.ones(1, device=device), torch.tensor([zero_point], device=device)
        y, mask = _C.fake_quantize.forward(x, scale, offset, lowest, highest)
        steps = x.double().round()
        low, high = lowest - zero_point, highest - zero_point
        assert torch.equal(y.double(), steps.clamp(low, high))
        assert torch.equal(mask.cpu(), mask_of((steps >= low) & (steps <= high)))

    @EXAMPLES
    @hypothesis.given(data=st.data())
    def test_any_shape_axis_and_strides(self, data, device):
        shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4), label="shape")
        order = data.draw(st.permutations(range(len(shape))), label="order")
        step = data.draw(st.integers(1, 2), label="step")
        dtype = data.draw(st.sampled_from(list(FORWARD)), label="dtype")
        axis = data.draw(st.integers(0, len(shape) - 1), label="axis")
        x, scale, zero_point = self.arguments(dtype, device, [n * step for n in shape], shape[order[axis]])
        x = x[tuple(slice(None, None, step) for _ in shape)].permute(order)
        in_float32 = dtype == DOUBLE and (device == "cuda" or shape[order[axis]] == 1)
        self.compare(x, scale, zero_point, axis, in_float32)

    @pytest.mark.parametrize("axis", [None, 0, 1, 2])
    @pytest.mark.parametrize("fraction", [0.0, 0.25])
    def test_learnable_parameters(self, axis, fraction, device):
        shape = (6, 5, 33)
        channels = None if axis is None else shape[axis]
        x, scale, zero_point = self.arguments(torch.float32, device, shape, channels)
        # torch's backward for one tensor rounds a negative zero point to another integer than its forward.
        zero_point = zero_point.float().abs().clamp(max=RANGE[1]) + fraction

        def theirs(x, scale, zero_point):
            if axis is None:
                return torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero_point, *RANGE, 0.3)
            return torch._fake_quantize_learnable_per_channel_affine(x, scale, zero_point, axis, *RANGE, 0.3)

        def ours(x, scale, zero_point):
            return lltm_ext.fake_quantize(x, scale, zero_point, *RANGE, axis=axis, grad_factor=0.3)

        call = Call(x, scale, zero_point)
        outputs, gradients = forward_and_gradients(ours, call)
        expected, expected_gradients = forward_and_gradients(theirs, call)
        assert_same_bits([*outputs, gradients[0]], [*expected, *unsigned_zeros(expected_gradients[:1])])
        assert_all_near(gradients, expected_gradients, BACKWARD[torch.float32])


def module(*arguments, **options):
    """A FakeQuantize of the range, as ModuleSuite takes it."""
    return (
        lambda **where: lltm_ext.FakeQuantize(*RANGE, *arguments, **options, **where),
        lambda make: Call(make(63, 3, scale=3)),
    )


class TestModules(ModuleSuite):
    modules = {
        "per tensor": module(0.25, 1.0, learn_zero_point=True),
        "per channel": module(0.25, num_channels=3, axis=1, grad_factor=0.5),
    }

    @pytest.mark.parametrize(
        "arguments,options,expectation",
        [
            ((7, -8), {}, "quant_min not above quant_max, got quant_min = 7, quant_max = -8"),
            (RANGE, {"scale": -1.0}, r"scale above 0, got -1\.0"),
            (RANGE, {"num_channels": 0}, "num_channels to be positive, got 0"),
        ],
    )
    def test_bad_options_are_refused_by_the_constructor(self, arguments, options, expectation):
        with pytest.raises(ValueError, match=rf"^FakeQuantize: expected {expectation}"):
            lltm_ext.FakeQuantize(*arguments, **options)

    def test_parameters_that_are_not_learned_are_buffers(self):
        module = lltm_ext.FakeQuantize(0, 255, 0.1, 128, num_channels=5, learn_scale=False)
        assert not list(module.parameters())
        buffers = {name: tuple(x.shape) for name, x in module.named_buffers()}
        assert buffers == {"scale": (5,), "zero_point": (5,)}
        assert repr(module) == (
            "FakeQuantize(quant_min=0, quant_max=255, num_channels=5, axis=0, learn_scale=False, "
            "learn_zero_point=False)"
        )

    def test_training_finds_a_scale(self, device):
        x = Make(device=device)(4096)
        factor = 1 / (x.numel() * RANGE[1]) ** 0.5
        module = lltm_ext.FakeQuantize(*RANGE, 2.0, grad_factor=factor, device=device)
        optimizer = torch.optim.Adam(module.parameters(), 0.05)
        losses = []
        for _ in range(100):
            loss = (module(x) - x).square().mean()
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert losses[-1] < losses[0] / 10


class TestRawBindings:
    def test_raw_bindings_equal_the_function(self, dtype, device):
        x, scale, zero_point = learnable(Make(dtype, device), 63, 3, axis=1).tensors
        g = Make(dtype, device, seed=1)(63, 3)
        arguments = (scale, zero_point, *RANGE, 1)
        y, mask = _C.fake_quantize.forward(x, *arguments)
        assert_same_bits([y], [lltm_ext.fake_quantize(x, *arguments[:4], axis=1)])
        assert torch.equal(mask.cpu(), mask_of(in_range(x, scale, zero_point)))
        found = _C.fake_quantize.backward_learnable(g, x, *arguments, grad_factor=0.5)
        call = Call(x, scale, zero_point, *RANGE, axis=1, grad_factor=0.5)
        _, expected = forward_and_gradients(lltm_ext.fake_quantize, call, [g])
        assert_same_bits(found, expected)
        assert_same_bits([_C.fake_quantize.backward(g, mask)], expected[:1])

    def test_raw_bindings_refuse_bad_inputs(self, device):
        good, one = Make(device=device)(3, 5), torch.ones(1, device=device)
        for value, exception, pattern in unfit_for_bindings(good):
            for binding, name, arguments in (
                ("forward", "input", (value, one, one, *RANGE)),
                ("backward", "grad_output", (value, one)),
                ("backward_learnable", "input", (good, value, one, one, *RANGE)),
            ):
                with pytest.raises(exception, match=f"^fake_quantize.{binding}: expected {name} {pattern}"):
                    getattr(_C.fake_quantize, binding)(*arguments)
        with pytest.raises(TypeError, match="incompatible function arguments"):
            _C.fake_quantize.forward(None, one, one, *RANGE)


@pytest.mark.parametrize("shape,axis", [((0,), 0), ((3, 0), 1), ((0, 3), 0)])
def test_no_channels_have_empty_gradients(shape, axis, device):
    x = torch.ones(shape, device=device, requires_grad=True)
    scale = torch.ones(0, device=device, requires_grad=True)
    offset = torch.zeros(1, device=device, requires_grad=True)
    for zero_point, wanted in ((0, [x, scale]), (offset, [x, scale, offset])):
        y = lltm_ext.fake_quantize(x, scale, zero_point, -8, 7, axis=axis)
        gradients = torch.autograd.grad(y.sum(), wanted)
        assert [g.shape for g in gradients] == [w.shape for w in wanted]
        assert not any(g.any() for g in gradients)


@needs_cuda
@pytest.mark.parametrize("learn", [False, True])
def test_more_elements_than_an_int32_counts(learn):
    free, _ = torch.cuda.mem_get_info()
    if free < 30 * 2**30:
        pytest.skip(f"needs 30 GiB of free GPU memory, found {free / 2**30:.0f}")
    rows, columns = 2**20 + 3, 2**11
    x = torch.empty(rows, columns, dtype=torch.float16, device="cuda").normal_().requires_grad_()
    scale = torch.full((columns,), 0.25, device="cuda", requires_grad=learn)
    y = lltm_ext.fake_quantize(x, scale, 0, *RANGE, axis=1)
    grad_output = torch.ones_like(y)
    gradient, *scale_gradient = torch.autograd.grad(y, [x, scale] if learn else [x], grad_output)
    expected_scale_gradient = 0
    for start in range(0, rows, 2**17):
        piece = slice(start, start + 2**17)
        part = [x[piece].detach().requires_grad_(), scale.detach().requires_grad_(learn)]
        expected = lltm_ext.fake_quantize(*part, 0, *RANGE, axis=1)
        assert torch.equal(y[piece], expected)
        found = torch.autograd.grad(expected, part if learn else part[:1], grad_output[piece])
        assert torch.equal(gradient[piece], found[0])
        if learn:
            expected_scale_gradient = expected_scale_gradient + found[1].double()
    if learn:
        assert_near(scale_gradient[0], expected_scale_gradient, 1e-3)
