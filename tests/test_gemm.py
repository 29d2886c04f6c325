import concurrent.futures
import copy
import functools
import io
import pickle
import timeit

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from op_suite import (
    BACKWARD,
    DOUBLE,
    EXAMPLES,
    FLOATING,
    FORWARD,
    Call,
    Make,
    ModuleSuite,
    SmoothSuite,
    assert_accurate,
    assert_all_near,
    assert_near,
    assert_same_bits,
    cotangents,
    expected_by,
    forward_and_gradients,
    needs_cuda,
    pairwise,
    sum_of_squares,
    tensors_saved_by,
    transposed,
    unfit_for_bindings,
)

import lltm_ext
from lltm_ext import _C, _activations, _portable
from lltm_ext.gemm import _SAVE_INPUT, gemm_reference

ACTIVATIONS = (None, "relu", "sigmoid", "tanh", "elu", "gelu", "gelu_tanh", "silu")
activations = pytest.mark.parametrize("activation", ACTIVATIONS)


def operands(make, m, k, n, *batch):
    """Scaled so that elements of the product are of order 1."""
    return make(*batch, m, k, scale=max(k, 1) ** -0.5), make(*batch, k, n)


def sample(*sizes, **options):
    return lambda make: Call(*operands(make, *sizes), **options)


def with_bias(*sizes, **options):
    return lambda make: Call(*operands(make, *sizes), bias=make(sizes[2]), **options)


def in_layout(layout, a, b):
    """The operands, stored as their transposes where the layout has a T."""
    return [transposed(x) if stored == "T" else x for stored, x in zip(layout, (a, b), strict=True)]


# Shapes of a and b, one of which is broadcast over the other's batch.
BROADCASTS = {
    "b": ((3, 7, 5), (5, 9)),
    "a": ((7, 5), (3, 5, 9)),
    "b of one": ((3, 7, 5), (1, 5, 9)),
    "a of one": ((1, 7, 5), (3, 5, 9)),
    "one of one": ((7, 5), (1, 5, 9)),
}


def broadcast(name, **options):
    a, b = BROADCASTS[name]
    return lambda make: Call(make(*a, scale=a[-1] ** -0.5), make(*b), bias=make(b[-1]), **options)


SHAPES_OF_GRADIENTS = [(1, 1), (7, 5), (300, 64), (130, 1000), (2, 65, 33), (5000, 8), (3, 0, 4), (3, 4, 0)]
GRADCHECKED = {
    **{f"{name} of 2-D": with_bias(3, 4, 2, activation=name) for name in ACTIVATIONS},
    **{f"{name} of 3-D": with_bias(3, 4, 2, 2, activation=name) for name in ACTIVATIONS},
    **{f"broadcast {name}": broadcast(name, activation="gelu") for name in BROADCASTS},
}


def bad(a=None, b=None, bias=lambda x: None, **options):
    """Operands [4, 3] and [3, 5] and a bias [5], changed by functions."""

    def build(make):
        left, right = operands(make, 4, 3, 5)
        return Call(a(left) if a else left, b(right) if b else right, bias=bias(make(5)), **options)

    return build


def in_four_dims(x):
    return x[None, None]


TYPE_ERRORS = {
    "a to be a Tensor, got None": bad(a=lambda a: None),
    "b to be a Tensor, got None": bad(b=lambda b: None),
    "b to be a Tensor, got list": bad(b=lambda b: [[1.0]]),
    "bias to be a Tensor.*, got float": bad(bias=lambda bias: 1.0),
    f"a of dtype {FLOATING}, got int64": bad(torch.Tensor.long, torch.Tensor.long),
    "b of dtype float32, got float64": bad(b=torch.Tensor.double),
    "bias of dtype float32, got float16": bad(bias=torch.Tensor.half),
}
RUNTIME_ERRORS = {
    r"b of shape \[K, N\] or \[B, K, N\] with K = 3, got \[5, 3\]": bad(b=lambda b: b.T),
    r"a of shape .*, got \[3\]": bad(a=lambda a: a[0]),
    r"a of shape .*, got \[1, 1, 4, 3\]": bad(in_four_dims, in_four_dims),
    r"b of shape .*, got \[1, 1, 3, 5\]": bad(b=in_four_dims),
    r"b of shape \[B, K, N\] = \[2, 3, \*\], got \[3, 3, 5\]": bad(
        lambda a: torch.stack([a] * 2), lambda b: torch.stack([b] * 3)
    ),
    r"bias of shape \[N\] = \[5\], got \[4\]": bad(bias=lambda bias: bias[:4]),
    r"bias of shape \[N\] = \[5\], got \[1, 5\]": bad(bias=lambda bias: bias[None]),
    "a of layout torch.strided, got Sparse": bad(a=torch.Tensor.to_sparse),
}
VALUE_ERRORS = {
    f"activation None or one of {', '.join(map(repr, ACTIVATIONS[1:]))}, got 'swish'": bad(
        activation="swish"
    ),
    "precision .*, got 'low'": bad(precision="low"),
}


class TestGemm(SmoothSuite):
    op = "gemm"
    function = staticmethod(lltm_ext.gemm)
    reference = staticmethod(gemm_reference)
    Function = lltm_ext.GemmFunction
    lowered_by_autocast = True
    samples = {
        "small": with_bias(2, 3, 4),
        "1": sample(1, 1, 1),
        "63": with_bias(63, 65, 67, activation="elu"),
        "500": with_bias(500, 63, 37, activation="elu"),
        "bias": with_bias(500, 63, 37),
        "long sum": sample(17, 1001, 5),
        "one row": sample(1, 63, 129),
        "one column": sample(130, 63, 1),
        "one product": sample(33, 1, 65),
        "whole tiles": sample(128, 64, 256),
        "batch": sample(7, 5, 9, 3),
        "batch of one": sample(7, 5, 9, 1),
        "batch with bias": with_bias(7, 5, 9, 3, activation="tanh"),
        **{f"bias and {name}": with_bias(63, 33, 65, activation=name) for name in ACTIVATIONS if name},
        "activation without bias": sample(63, 33, 65, activation="sigmoid"),
        **{f"broadcast {name}": broadcast(name, activation="silu") for name in BROADCASTS},
    }
    empty_samples = {
        "no rows": with_bias(0, 3, 5),
        "no columns": with_bias(4, 3, 0),
        "no products": sample(4, 0, 5),
        "no products but a bias": with_bias(4, 0, 5, activation="tanh"),
        "no matrices": with_bias(4, 3, 5, 0),
        "no matrices for one": lambda make: Call(make(0, 4, 3), make(3, 5), bias=make(5)),
        "nothing": sample(0, 0, 0),
    }
    bad_calls = expected_by(
        "gemm", {TypeError: TYPE_ERRORS, RuntimeError: RUNTIME_ERRORS, ValueError: VALUE_ERRORS}
    )

    def apply(self, a, b, *, bias=None, activation=None, precision="ieee"):
        return lltm_ext.GemmFunction.apply(a, b, bias, activation, precision)

    def dispatcher_calls(self, call):
        options = dict(call.kwargs)
        bias = options.pop("bias", None)
        yield torch.ops.lltm_ext.gemm.default, Call(*call.args, bias, **options)
        output = call.map(torch.Tensor.detach).run(gemm_reference)[0]
        # One whose backward needs its output, and one that needs its input. Other tests have all of them.
        for activation in ("elu", "gelu"):
            arguments = Call(output.cos(), output.sigmoid(), activation)
            yield torch.ops.lltm_ext.gemm_activation_backward.default, arguments
            yield torch.ops.lltm_ext.gemm_activation_bias_backward.default, arguments

    @pytest.mark.parametrize("sample", GRADCHECKED)
    def test_gradcheck_of_activations_and_broadcasts(self, sample, device):
        call = GRADCHECKED[sample](Make(DOUBLE, device)).leaves()
        assert torch.autograd.gradcheck(call.bind(self.function), call.tensors)
        assert torch.autograd.gradgradcheck(call.bind(self.function), call.tensors)

    @pairwise(shape=SHAPES_OF_GRADIENTS, activation=ACTIVATIONS[1:], dtype=list(FORWARD))
    def test_backward_of_activation_and_bias(self, shape, activation, dtype, device):
        backward = torch.ops.lltm_ext.gemm_activation_bias_backward
        grad_output, saved = Make(dtype, device)(*shape), Make(dtype, device, seed=1)(*shape).sigmoid()
        for grad, x in (
            (grad_output, saved),
            (transposed(grad_output), transposed(saved)),
            (grad_output[..., :1].expand(shape) if shape[-1] else grad_output, saved),
        ):
            exact = torch.ops.lltm_ext.gemm_activation_backward(grad.double(), x.double(), activation)
            found = backward(grad, x, activation)
            expected = [exact, exact.sum(tuple(range(len(shape) - 1)))]
            assert_all_near(found, expected, BACKWARD[dtype])
            assert [y.dtype for y in found] == [dtype, dtype]
            assert_same_bits(backward(grad, x, activation), found)

    @activations
    def test_the_gradient_of_the_bias(self, activation, device):
        """By itself, with a gradient at the second output, and under torch.func."""
        call = with_bias(6, 4, 5, 2, activation=activation)(Make(DOUBLE, device))
        a, b, bias = call.args[0], call.args[1], call.kwargs["bias"]

        def of(function):
            return lambda bias: function(a, b, bias=bias, activation=activation).square().sum()

        expected = torch.func.grad(of(self.reference))(bias)
        leaf = bias.clone().requires_grad_()
        assert_near(torch.autograd.grad(of(self.function)(leaf), leaf)[0], expected, BACKWARD[DOUBLE])
        assert_near(torch.func.grad(of(self.function))(bias), expected, BACKWARD[DOUBLE])
        each = torch.func.vmap(torch.func.grad(of(self.function)))(torch.stack([bias, -bias]))
        assert_near(each[0], expected, BACKWARD[DOUBLE])
        assert_near(each[1], torch.func.grad(of(self.reference))(-bias), BACKWARD[DOUBLE])

    @pytest.mark.parametrize("in_dims", [(0, 0), (1, 0), (0, None), (None, 2)], ids=str)
    def test_vmap_of_batches(self, in_dims, device):
        calls = [operands(Make(DOUBLE, device, seed), 4, 3, 5, 2) for seed in range(3)]
        given, singles = [], []
        for dim, values in zip(in_dims, zip(*calls, strict=True), strict=True):
            given.append(values[0] if dim is None else torch.stack(values, dim))
            singles.append(values[:1] * 3 if dim is None else values)
        expected = torch.stack([a @ b for a, b in zip(*singles, strict=True)])
        assert_near(torch.vmap(self.function, in_dims)(*given), expected, FORWARD[DOUBLE])

    @pytest.mark.parametrize("way", ["function", "apply"])
    def test_a_loss_of_the_output_and_of_its_gradients(self, way, device):
        """Where gradients reach the output and the value before the activation at once."""
        call = with_bias(3, 4, 2, activation="gelu")(Make(DOUBLE, device))

        def gradients(function):
            leaves = call.leaves()
            (output,) = leaves.run(function)
            first = torch.autograd.grad(output.square().sum(), leaves.tensors, create_graph=True)
            return torch.autograd.grad(output.exp().sum() + sum_of_squares(first), leaves.tensors)

        assert_all_near(gradients(getattr(self, way)), gradients(self.reference), 10 * BACKWARD[DOUBLE])

    def test_opcheck_of_out_and_of_the_forward_that_returns_the_pre_activation(self, device):
        a, b = operands(Make(DOUBLE, device), 4, 3, 5)
        for bias in (None, b[0]):
            torch.library.opcheck(torch.ops.lltm_ext.gemm_forward.default, (a, b, bias, "silu", "ieee"))
        out = a.new_zeros(4, 5)
        torch.library.opcheck(torch.ops.lltm_ext.gemm_out.default, (a, b, None, "silu", "ieee", out))

    def test_out_may_have_any_strides(self, dtype, device):
        a, b = operands(Make(dtype, device), 7, 5, 9, 2)
        expected = lltm_ext.gemm(a, b, activation="silu")
        whole = torch.full((4, 14, 9), torch.nan, dtype=dtype, device=device)
        unwritten = torch.full_like(expected, torch.nan)
        for out in (unwritten, transposed(unwritten), whole[::2, ::2]):
            address = out.data_ptr()
            assert lltm_ext.gemm(a, b, activation="silu", out=out) is out
            assert out.data_ptr() == address
            assert_same_bits([out], [expected])
        assert whole[1::2].isnan().all()
        assert whole[:, 1::2].isnan().all()

    def test_out_may_be_an_operand(self, device):
        for i in range(2):
            both = operands(Make(device=device), 6, 6, 6)
            expected = lltm_ext.gemm(*both)
            lltm_ext.gemm(*both, out=both[i])
            assert_same_bits([both[i]], [expected])

    @pytest.mark.parametrize("way", ["out=", "raw binding"])
    def test_autograd_learns_what_was_written(self, way, device):
        a, b = operands(Make(device=device), 4, 3, 4)
        x, c = torch.ones(4, 4, device=device, requires_grad=True), torch.ones(4, 4, device=device)
        product = x * c
        _C.gemm.gemm(c, a, b) if way == "raw binding" else lltm_ext.gemm(a, b, out=c)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()

    def test_out_and_a_gradient_are_refused(self, device):
        a, b = operands(Make(device=device), 4, 3, 4)
        with pytest.raises(RuntimeError, match=r"^gemm: with out= there is no gradient, but"):
            lltm_ext.gemm(a.requires_grad_(), b, out=torch.ones(4, 4, device=device))

    @pytest.mark.parametrize(
        "out, exception, message",
        [
            (torch.zeros(4, 6), RuntimeError, r"out of shape \[M, N\] = \[4, 5\], got \[4, 6\]"),
            (torch.zeros(4, 5).half(), TypeError, "out of dtype float32, got float16"),
            (1.0, TypeError, "out to be a Tensor, got float"),
        ],
        ids=["shape", "dtype", "number"],
    )
    def test_an_out_that_does_not_fit_is_refused(self, out, exception, message):
        with pytest.raises(exception, match=f"^gemm: expected {message}"):
            lltm_ext.gemm(*operands(Make(), 4, 3, 5), out=out)

    def test_an_inference_tensor_is_written_in_inference_mode_only(self, device):
        a, b = operands(Make(device=device), 4, 3, 5)
        with torch.inference_mode():
            out = lltm_ext.gemm(a, b)
            lltm_ext.gemm(a, b, out=out)
        with pytest.raises(RuntimeError, match=r"^gemm: expected out not to be an inference tensor"):
            lltm_ext.gemm(a, b, out=out)

    @pairwise(sizes=[(20, 9, 20), (20, 16, 24), (200, 16, 200)], activation=ACTIVATIONS, dtype=list(FORWARD))
    def test_nan_and_infinity_stay_in_their_row_and_column(self, sizes, activation, dtype, device):
        a, b = operands(Make(dtype, device), *sizes)
        b = b.abs() + 0.1
        good = lltm_ext.gemm(a, b, activation=activation)
        for value in (torch.nan, torch.inf):
            corrupted = a.clone()
            corrupted[7, 3] = value
            c = lltm_ext.gemm(corrupted, b, activation=activation)
            # In float64: torch's gelu of infinity is NaN in float32.
            expected = gemm_reference(corrupted.double(), b.double(), activation=activation).to(dtype)
            torch.testing.assert_close(c[7], expected[7], equal_nan=True)
            others = torch.arange(len(a), device=device) != 7
            assert_same_bits([c[others]], [good[others]])

    @activations
    @pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
    def test_large_products_of_half_types_on_the_cpu(self, half, activation):
        """By oneDNN, where the CPU has instructions for them. NaN and infinity as in small products."""
        sizes, make = (130, 96, 100), Make(half)
        for call in (
            with_bias(*sizes, activation=activation)(make),
            Call(make(2, 65, 96, scale=0.1), make(96, 100), activation=activation),
            Call(make(130, 96, scale=0.1), make(1, 96, 100), activation=activation),
            Call(transposed(make(130, 96, scale=0.1)), transposed(make(96, 120)), activation=activation),
        ):
            assert_accurate(lltm_ext.gemm, gemm_reference, call, half)
            with torch.no_grad():
                found, exact = call.run(lltm_ext.gemm), call.map(torch.Tensor.double).run(gemm_reference)
            assert_all_near(found, exact, FORWARD[half])
        a, b = operands(Make(half), *sizes)
        out = torch.empty(130, 100, dtype=half)
        a[7, 3], a[9, 3], b[3] = torch.nan, torch.inf, b[3].abs() + 0.1
        c = lltm_ext.gemm(a, b, activation=activation, out=out)
        expected = gemm_reference(a.double(), b.double(), activation=activation)
        assert torch.equal(c.isnan(), expected.isnan())
        torch.testing.assert_close(c[9], expected[9].to(half), equal_nan=True)

    @pytest.mark.skipif(_portable.in_use, reason="the portable library does not call oneDNN")
    def test_onednn_multiplies_half_types_for_which_the_cpu_has_instructions(self):
        onednn = torch.ops.mkldnn
        supported = (onednn._is_mkldnn_bf16_supported(), onednn._is_mkldnn_fp16_supported())
        for half, expected in zip((torch.bfloat16, torch.float16), supported, strict=True):
            a, b = operands(Make(half), 128, 128, 128)
            with torch.profiler.profile() as profiler:
                for rows in (a, a[:8]):
                    lltm_ext.gemm(rows, b)
                    lltm_ext.gemm(rows, b, activation="tanh")
            names = [event.name for event in profiler.events()]
            assert names.count("aten::mm") == names.count("mkldnn::_linear_pointwise") == int(expected)

    @pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("activation", [None, "silu"])
    def test_a_bias_with_strides_in_products_large_enough_for_onednn(self, half, activation):
        a, b = operands(Make(half), 128, 128, 128)
        bias = Make(half)(128, 2)[:, 0]
        assert_gemm_is_accurate(a, b, bias, activation)

    @pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("activation", [None, "silu"])
    def test_a_product_of_half_types_takes_no_reference_implementation(self, half, activation):
        """oneDNN has one for weights stored as [K, N], which takes 250 ms here on CPUs with AMX."""
        for layout in ("NN", "NT", "TN", "TT"):
            a, b = operands(Make(half), 256, 256, 256)
            a, b = a.mT if layout[0] == "T" else a, b.mT if layout[1] == "T" else b
            product = functools.partial(lltm_ext.gemm, a, b, activation=activation)
            seconds = min(timeit.repeat(product, number=1))
            assert seconds < 0.1, layout

    def test_out_may_be_a_lazily_negated_view(self, device):
        a, b = operands(Make(device=device), 4, 3, 5)
        out = torch.zeros(4, 5, dtype=torch.complex64, device=device).conj().imag
        assert lltm_ext.gemm(a, b, out=out) is out
        assert_near(out.resolve_neg(), a.double() @ b.double(), FORWARD[torch.float32])

    @pytest.mark.parametrize("create_graph", [False, True])
    def test_a_dead_relu_unit_passes_no_gradient_not_even_an_infinite_one(self, create_graph, device):
        a = torch.tensor([[-1.0], [1.0]], device=device, requires_grad=True)
        y = lltm_ext.gemm(a, torch.ones(1, 1, device=device), activation="relu")
        (found,) = torch.autograd.grad(y, a, torch.full_like(y, torch.inf), create_graph=create_graph)
        assert found.flatten().tolist() == [0, torch.inf]

    def test_float32_is_not_computed_in_tf32(self, device):
        """Products of 1 + 2^-12 with itself: ten bits of mantissa would lose the 2^-12."""
        a = torch.full((64, 64), 1 + 2.0**-12, device=device)
        expected = (a.double() @ a.double()).float()
        assert_near(lltm_ext.gemm(a, a), expected, 1e-6)

    def test_half_types_accumulate_in_float32(self, device):
        """A float16 accumulator would stop at 2048 or overflow at 65504, a bfloat16 one would stop at 256."""
        for dtype in (torch.float16, torch.bfloat16):
            ones = torch.ones(4, 4096, dtype=dtype, device=device)
            assert (lltm_ext.gemm(ones, ones.T) == 4096).all()
            large = torch.full((4, 4096), 64.0, dtype=dtype, device=device)
            signs = torch.ones(4096, 4, dtype=dtype, device=device)
            signs[2048:] = -1
            assert (lltm_ext.gemm(large, signs) == 0).all()

    @EXAMPLES
    @hypothesis.given(data=st.data())
    def test_any_shape_and_strides(self, data, device):
        size = st.integers(0, 40)
        m, k, n = data.draw(size, label="m"), data.draw(size, label="k"), data.draw(size, label="n")
        batch, batch_b = (data.draw(st.sampled_from([(), (1,), (3,)]), label="batch") for _ in range(2))
        dtype = data.draw(st.sampled_from(list(FORWARD)), label="dtype")
        activation = data.draw(st.sampled_from(ACTIVATIONS), label="activation")
        make = Make(dtype, device)

        def strided(*shape, **options):
            """A slice of a larger tensor: any order of dimensions, any starts and steps."""
            order = data.draw(st.permutations(range(len(shape))), label="order")
            cuts = [(data.draw(st.integers(0, 2)), data.draw(st.integers(1, 2))) for _ in shape]
            whole = [cuts[i][0] + shape[i] * cuts[i][1] for i in order]
            x = make(*whole, **options).permute(*(order.index(i) for i in range(len(shape))))
            x = x[tuple(slice(start, None, step) for start, step in cuts)]
            assert x.shape == shape
            return x

        a, b = strided(*batch, m, k, scale=max(k, 1) ** -0.5), strided(*batch_b, k, n)
        bias = strided(n) if data.draw(st.booleans(), label="bias") else None
        call = Call(a, b, bias=bias, activation=activation)
        outputs, gradients = forward_and_gradients(self.function, call)
        exact, exact_gradients = forward_and_gradients(
            self.reference, call.map(torch.Tensor.double), cotangents(outputs)
        )
        # Relative to the terms, because a sum whose terms cancel may have a large relative error.
        terms = (a.double().abs() @ b.double().abs()).norm() + (0 if bias is None else exact[0].norm())
        assert (outputs[0].double() - exact[0]).norm() <= FORWARD[dtype] * terms
        for found, expected in zip(gradients, exact_gradients, strict=True):
            assert (found.double() - expected).norm() <= BACKWARD[dtype] * (expected.norm() + terms)

    def test_a_batch_above_65535(self, device):
        call = with_bias(2, 1, 3, 65_537)(Make(device=device))
        assert_accurate(self.function, self.reference, call, torch.float32)

    def test_more_rows_and_columns_than_a_grid_has_blocks(self, device):
        for m, n in ((4_200_000, 1), (1, 4_200_000)):
            a, b = operands(Make(device=device), m, 1, n)
            assert_near(lltm_ext.gemm(a, b), a.double() * b.double(), FORWARD[torch.float32])

    def test_a_matrix_times_itself(self, device):
        """The gradients of a tensor passed twice add up."""
        x = Make(DOUBLE, device)(5, 5).requires_grad_()
        lltm_ext.gemm(x, x).sum().backward()
        ones = torch.ones_like(x)
        assert_near(x.grad, ones @ x.T + x.T @ ones, BACKWARD[DOUBLE])

    def test_only_what_backward_needs_is_saved(self, device):
        a, b = operands(Make(DOUBLE, device), 4, 3, 5)
        (saved,) = tensors_saved_by(lambda: lltm_ext.gemm(a.requires_grad_(), b))
        assert saved.data_ptr() == b.data_ptr()

    @needs_cuda
    def test_a_transposed_operand_is_not_copied(self, dtype):
        a, b = Make(dtype, "cuda")(2048, 1024), Make(dtype, "cuda")(2048, 64)
        lltm_ext.gemm(a.T, b)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        c = lltm_ext.gemm(a.T, b)
        extra = torch.cuda.max_memory_allocated() - before
        assert c.numel() * c.element_size() <= extra < a.numel() * a.element_size()


# [M, K] @ [K, N] for every kernel of any device: short sums, few results, few rows, few tiles with split-K,
# one round of tiles, many rounds, a long K, and operands that TMA cannot load.
SHAPES = {
    "one element": (1, 3, 1),
    "one element, long K": (1, 9001, 1),
    "vector": (773, 10_482, 1),
    "short sums": (2000, 8, 1000),
    "short sums, odd": (701, 3, 1501),
    "outer product": (781, 1, 7486),
    "short sums, many results": (3000, 16, 5000),
    "short sums, many odd rows": (4001, 13, 3003),
    "short sums, one vector of K": (16_200, 8, 72),
    "short sums, one vector of K, few rows": (64, 8, 14_496),
    "short sums, half a vector of K": (3000, 4, 4000),
    "few results": (19, 77, 14),
    "few results, long K": (10, 10_397, 31),
    "few columns": (5000, 600, 20),
    "2 rows, odd": (2, 2713, 13_087),
    "1 row": (1, 1000, 520),
    "8 rows": (8, 512, 11_008),
    "13 rows": (13, 4096, 264),
    "16 rows, many weights": (16, 2000, 2600),
    "32 rows": (32, 776, 1032),
    "64 rows": (64, 2048, 4096),
    "64 rows, many tiles": (64, 136, 20_000),
    "split-K": (136, 4096, 264),
    "split-K, odd": (137, 6281, 137),
    "split-K, rounds that divide K unevenly": (601, 4001, 1301),
    "split-K, few columns": (1088, 8496, 112),
    "split-K, few columns, odd": (701, 5001, 71),
    "few tiles, short K": (232, 128, 80),
    "few tiles, short K, odd": (351, 121, 105),
    "split-K, narrow tiles": (128, 2048, 64),
    "long K": (256, 20_000, 264),
    "long K, one tile": (100, 30_000, 72),
    "small tiles": (500, 520, 496),
    "narrow tiles": (1000, 1024, 1016),
    "tiles of 128": (1000, 72, 1500),
    "one round": (2048, 264, 2048),
    "several rounds": (3000, 136, 5000),
    "odd": (601, 999, 605),
    "odd, one round": (2047, 67, 2047),
    "odd rows": (1000, 264, 605),
    "one column": (4096, 520, 1),
    "8 columns": (11_000, 1112, 8),
    "29 columns": (3001, 1209, 29),
    "50 columns": (9001, 500, 50),
    "less than half a round of large tiles": (3000, 5001, 288),
    "most of a round, odd": (200, 5001, 5001),
    "a round and a half": (900, 2048, 4400),
    "more than two rounds": (2048, 2048, 5000),
    "a round and a half, odd": (901, 5001, 1101),
    "few columns of large tiles": (2048, 3552, 288),
    "few rows of large tiles": (384, 7048, 4400),
    "several rounds, odd": (1501, 5001, 901),
    "a square": (1536, 1536, 1536),
    "several rounds of large tiles": (3000, 2048, 1600),
    "rows of whole 8 bytes": (112, 2100, 2276),
    "rows of whole 4 bytes": (2598, 2002, 22),
}


layouts = pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])


def stored(layout, make, *sizes):
    """Operands in that layout, and a bias."""
    a, b = operands(make, *sizes)
    bias = make(sizes[2])
    return *in_layout(layout, a, b), bias


def assert_gemm_is_accurate(a, b, bias=None, activation=None):
    """And gives the same bits twice."""
    found, again = (lltm_ext.gemm(a, b, bias=bias, activation=activation) for _ in range(2))
    exact_bias = None if bias is None else bias.double()
    assert_near(found, gemm_reference(a.double(), b.double(), exact_bias, activation), FORWARD[a.dtype])
    assert_same_bits([again], [found])


def of_sizes(text):
    """Sizes as text: m x k x n, or k x n."""
    sizes = {name: tuple(map(int, name.split("x"))) for name in text.split()}
    return pytest.mark.parametrize("sizes", sizes.values(), ids=sizes)


@needs_cuda
@layouts
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, DOUBLE])
@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
def test_every_kernel_in_every_layout(sizes, dtype, layout):
    assert_gemm_is_accurate(*stored(layout, Make(dtype, "cuda"), *sizes), "gelu")


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, DOUBLE])
@of_sizes(
    "8x264x520 50x264x520 136x2048x136 136x16384x136 600x4000x600 264x136x520 232x128x80 301x2000x20 "
    "2000x9x1001 705x6000x9 3x5x7 301x999x205 4x5001x3"
)
def test_every_kernel_supports_batches(sizes, dtype):
    a, b = operands(Make(dtype, "cuda"), *sizes, 3)
    for left, right in ((a, b), (a[:1], b), (a, b[0]), (a[0], b)):
        before = [x.clone() for x in (left, right)]
        assert_gemm_is_accurate(left, right)
        assert_same_bits([left, right], before)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@layouts
@of_sizes("32x32x32 24x40x8 40x96x24 8x200x48 20x24x36 23x90x31 45x17x33 300x40x77")
def test_batches_of_small_matrices(sizes, layout, dtype):
    a, b, bias = stored(layout, Make(dtype, "cuda"), *sizes, 1000)
    for activation in (None, "gelu"):
        assert_gemm_is_accurate(a, b, bias, activation)


@needs_cuda
@layouts
def test_float64_with_batches_strides_and_infinity(layout):
    a, b, _ = stored(layout, Make(DOUBLE, "cuda"), 2047, 34, 1023, 2)
    wide_a, wide_b = (x.repeat_interleave(2, -1)[..., ::2] for x in (a, b))  # no stride is 1
    exact = a @ b
    for left, right in ((a, b), (wide_a, b), (a, wide_b), (a[:, 1:], b), (a, b[:, :, 1:])):
        rows, columns = left.shape[1], right.shape[2]
        assert_near(lltm_ext.gemm(left, right), exact[:, -rows:, -columns:], FORWARD[DOUBLE])
    corrupted = a.clone()
    corrupted[1, 2046, 33] = torch.inf
    found, good = lltm_ext.gemm(corrupted, b), lltm_ext.gemm(a, b)
    assert_same_bits([found[0], found[1, :-1]], [good[0], good[1, :-1]])
    assert found[1, -1].isinf().all()


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, DOUBLE])
@pytest.mark.parametrize("activation", ["gelu", "silu"])
@of_sizes(
    "8x264x520 232x128x80 136x2048x136 264x136x520 136x20000x264 3000x2048x1600 601x72x605 705x6000x20 "
    "9001x64x20 40x200x700 9x5x7 5x20001x9"
)
def test_every_kernel_saves_what_backward_needs(sizes, activation, dtype):
    call = with_bias(*sizes, activation=activation)(Make(dtype, "cuda"))
    assert_accurate(lltm_ext.gemm, gemm_reference, call, dtype)


# Every value of a half type as the activation's input: with few rows, one tile of rows, TMA stores, and rows
# that TMA cannot store. Errors are relative to the value, so that tails count.
@needs_cuda
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows, columns", [(8, 65_536), (50, 65_536), (200, 65_536), (200, 65_535)])
def test_activations_are_accurate_at_every_value(rows, columns, dtype, activation):
    x = torch.arange(columns, dtype=torch.int32, device="cuda").to(torch.int16).view(dtype)
    a, b = (torch.zeros(n, 64, dtype=dtype, device="cuda") for n in (rows, columns))
    found = lltm_ext.gemm(a, b.T, bias=x, activation=activation)
    assert_same_bits([found], [found[:1].expand(rows, columns)])
    if activation in _SAVE_INPUT:
        both = torch.ops.lltm_ext.gemm_forward(a, b.T, x, activation, "ieee")
        assert_same_bits(both[:1], [found])
        torch.testing.assert_close(both[1], x.expand(rows, columns), rtol=0, atol=0, equal_nan=True)
    found = found[0].double()
    assert torch.equal(found.isnan() | x.isneginf(), x.isnan() | x.isneginf())
    exact = _activations.ACTIVATIONS[activation].reference(x.double())
    error = (found - exact).abs()[x.isfinite()]
    rounding = 0.5 * torch.finfo(dtype).eps
    worst = (error / (1.25 * rounding * exact.abs()[x.isfinite()] + 2**-21)).max().item()
    assert worst <= 1, f"error {worst} times the bound"
    assert found[x.isposinf()].item() == (1 if activation in ("sigmoid", "tanh") else torch.inf)


# Kernels for few rows start before the previous kernel ends (programmatic dependent launch).
@needs_cuda
@pytest.mark.parametrize("rows", [8, 16, 32, 64])
def test_weights_may_be_written_by_the_previous_kernel(rows):
    make = Make(torch.bfloat16, "cuda")
    x, b = make(rows, 2048), make(64, 2048)
    lefts = [make(4096, 64) for _ in range(20)]
    weight = torch.empty(4096, 2048, dtype=x.dtype, device="cuda")
    torch.cuda._sleep(100_000_000)  # about 0.05 s: all launches are queued then, and run without gaps
    found = []
    for a in lefts:
        lltm_ext.gemm(a, b, out=weight)
        found.append(lltm_ext.gemm(x, weight.T))
    for a, c in zip(lefts, found, strict=True):
        lltm_ext.gemm(a, b, out=weight)
        torch.cuda.synchronize()
        assert_same_bits([c], [lltm_ext.gemm(x, weight.T)])


@needs_cuda
def test_it_may_be_the_first_cuda_call_of_a_thread():
    make = Make(torch.bfloat16, "cuda")
    a, b = make(64, 64), make(64, 64)
    expected = lltm_ext.gemm(a, b)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        found = thread.submit(lltm_ext.gemm, a, b).result()
    assert_same_bits([found], [expected])


# Narrow, small, medium and large tiles: whole and cut, with one step of K and many, in vectors and elements.
@needs_cuda
@layouts
@of_sizes(
    "512x512x512 500x200x511 512x72x520 1024x96x1024 1000x77x1030 2048x64x2048 2040x37x2004 2047x4x2051"
)
def test_float32_in_tiles_of_every_size(sizes, layout):
    a, b, bias = stored(layout, Make(torch.float32, "cuda"), *sizes)
    for _ in range(2):
        assert_gemm_is_accurate(a, b, bias, "relu")
        a, b = a[:, ::2], b[::2]  # again, with every other k


PRECISIONS = ("ieee", "bf16x6", "bf16x9", "tf32")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])


def error_of(product, a, b):
    """The RMS error of the elements, each relative to the norms of its row and column."""
    a, b = a.double(), b.double()
    lengths = a.norm(dim=1, keepdim=True) * b.norm(dim=0, keepdim=True)
    return ((product.double() - a @ b) / lengths).square().mean().sqrt().item()


@devices
@pytest.mark.parametrize("scaled", ["well", "rows and columns", "K"])
@layouts
@pytest.mark.parametrize("precision", PRECISIONS)
def test_precisions_are_as_accurate_as_documented(precision, layout, scaled, device):
    make = Make(torch.float32, device)
    m, k, n = (515, 2055, 390) if device == "cuda" else (65, 515, 98)  # the sizes are those of GPUs' kernels
    a, b = operands(make, m, k, n)
    if scaled == "rows and columns":  # over twenty orders of magnitude
        a, b = a * torch.exp2(make(m, 1, scale=10)), b * torch.exp2(make(n, scale=10))
    elif scaled == "K":  # few terms dominate each sum, and their rounding the error
        a = a * torch.exp2(make(k, scale=10))
    a, b = in_layout(layout, a, b)
    product = lltm_ext.gemm(a, b, precision=precision)
    torchs = error_of(torch.matmul(a, b), a, b)
    bound = {"ieee": 4 * torchs, "bf16x6": 2 * torchs, "bf16x9": 4 * torchs, "tf32": 1e-3}[precision]
    assert error_of(product, a, b) <= bound
    assert_same_bits([lltm_ext.gemm(a, b, precision=precision)], [product])


@devices
@layouts
def test_bf16x9_is_ieee(layout, device):
    a, b, bias = stored(layout, Make(torch.float32, device), 515, 255, 390)
    for options in ({}, {"bias": bias, "activation": "gelu"}):
        found, ieee = (lltm_ext.gemm(a, b, precision=name, **options) for name in ("bf16x9", "ieee"))
        assert_same_bits([found], [ieee])


@needs_cuda
@layouts
@of_sizes("1024x1024x1024 2048x32x2048 1x1x1000")
def test_tf32_rounds_to_nearest_as_cublas_does(sizes, layout):
    a, b, _ = stored(layout, Make(torch.float32, "cuda"), *sizes)
    exact = a.double() @ b.double()
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        torchs = torch.matmul(a, b)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    product = lltm_ext.gemm(a, b, precision="tf32")
    if sizes[0] > 1:  # of one product torch's is exact
        assert error_of(product, a, b) <= 1.1 * error_of(torchs, a, b)
    # Operands cut off would be 2^-11.5 too small on average, and each product twice as much.
    too_large = ((product.double() - exact) * exact.sign()).sum() / exact.abs().sum()
    assert abs(too_large) < 2e-5


# Tiles of all sizes, with and without a split of K; rows of whole vectors and others; few rows, columns, k.
@devices
@layouts
@of_sizes(
    "736x5000x128 96x10112x2274 1192x6144x768 2024x3552x288 2100x300x2100 4097x64x1030 513x258x1031 "
    "40x2048x496 96x96x440 32x1000x408 27x603x2580 3096x80x136 1192x1264x32 1822x1949x26 300x1027x2 "
    "1x700x900 130x9x70"
)
def test_tf32_multiplies_small_integers_exactly(sizes, layout, device):
    m, k, n = sizes
    m, k = (m, k) if device == "cuda" else (-(-m // 4), k // 8)  # the sizes are those of a GPU's kernels
    a, b, bias = (torch.randint(-4, 5, shape, device=device).float() for shape in ((m, k), (k, n), (n,)))
    a, b = in_layout(layout, a, b)
    for _ in range(2):
        c = lltm_ext.gemm(a, b, bias=bias, activation="relu", precision="tf32")
        assert torch.equal(c.double(), (a.double() @ b.double() + bias.double()).relu())
        a, b = a[:, ::2], b[::2]  # again, with every other k


@needs_cuda
@layouts
@pytest.mark.parametrize("size", [100, 1000])
def test_tf32_propagates_nan_and_infinity(size, layout):
    a, b = torch.ones(2, size, size, device="cuda")
    a[1, 2], a[3, 4] = float("nan"), float("inf")
    b[5, 6] = float("-inf")
    # CUDA's own NaN has all bits set: rounding must not carry out of them.
    b.view(torch.int32)[7, 8] = 0x7FFFFFFF
    exact = a @ b
    a, b = in_layout(layout, a, b)
    assert_same_bits([lltm_ext.gemm(a, b, precision="tf32").isnan()], [exact.isnan()])
    torch.testing.assert_close(lltm_ext.gemm(a, b, precision="tf32"), exact, equal_nan=True)


@devices
@pytest.mark.parametrize("precision", PRECISIONS)
def test_sums_beyond_float32_are_infinite(precision, device):
    a, b = (torch.full(shape, 1.5e18, device=device) for shape in ((70, 256), (256, 130)))
    assert lltm_ext.gemm(a, b, precision=precision).isposinf().all()  # though no product of two elements is


@devices
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_largest_values_are_multiplied_like_others(precision, device):
    make = Make(torch.float32, device)
    a, b = operands(make, 70, 256, 130)
    a = 3.4e38 * (1 - 0.01 * a.abs() / a.abs().max())  # the largest would round to infinity in bfloat16
    b = 1e-30 * b
    assert error_of(lltm_ext.gemm(a, b, precision=precision), a, b) <= (1e-3 if precision == "tf32" else 1e-6)


@devices
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", BROADCASTS)
def test_precisions_support_batches_bias_and_activations(name, precision, device):
    call = broadcast(name, activation="silu")(Make(torch.float32, device))
    as_near_as = torch.float16 if precision == "tf32" else torch.float32
    assert_accurate(functools.partial(lltm_ext.gemm, precision=precision), gemm_reference, call, as_near_as)


needs_kernel_of = pytest.mark.skipif(_portable.in_use, reason="the portable library does not name kernels")


@needs_kernel_of
def test_kernel_of_names_what_computes_a_product(device="cpu"):
    a, b = operands(Make(device=device), 4, 3, 5)
    assert _C.gemm.kernel_of(a, b) == "cpu"
    assert _C.gemm.kernel_of(a, b, b[0], "gelu", "tf32") == "cpu"
    with pytest.raises(ValueError, match=r"^gemm: expected activation None or one of"):
        _C.gemm.kernel_of(a, b, activation="swish")
    with pytest.raises(RuntimeError, match=r"^gemm: expected b of shape"):
        _C.gemm.kernel_of(a, a)


@needs_cuda
@needs_kernel_of
@pytest.mark.parametrize("dtype", FORWARD)
def test_kernel_of_takes_empty_products(dtype):
    for sizes in ((4, 0, 5), (0, 3, 5), (4, 3, 0), (0, 0, 0), (4, 3, 5, 0)):
        assert _C.gemm.kernel_of(*operands(Make(dtype, "cuda"), *sizes)) != "cpu"


# Products for which the library is faster on every GPU.
LIBRARYS = {
    "ieee": (torch.float32, (3000, 5000, 2000)),
    "tf32": (torch.float32, (3000, 5000, 2000)),
    "float64": (DOUBLE, (700, 1000, 600)),
    "half": (torch.float16, (4096, 4096, 4096)),
    "bfloat16": (torch.bfloat16, (2048, 4096, 6144)),
}
librarys = pytest.mark.parametrize("name", LIBRARYS)


def librarys_operands(name, layout="NN", *batch):
    dtype, sizes = LIBRARYS[name]
    a, b = operands(Make(dtype, "cuda"), *sizes, *batch)
    precision = name if name == "tf32" else "ieee"
    a, b = in_layout(layout, a, b)
    if not _portable.in_use:
        assert _C.gemm.kernel_of(a, b, precision=precision) == "library"
    return a, b, functools.partial(lltm_ext.gemm, precision=precision)


def near_as(name):
    return 1e-3 if name == "tf32" else FORWARD[LIBRARYS[name][0]]


@needs_cuda
@layouts
@librarys
def test_the_library_multiplies_every_layout_with_bias_and_activation(name, layout):
    a, b, gemm = librarys_operands(name, layout)
    bias = Make(a.dtype, "cuda")(2 * b.shape[1])
    for added in (None, bias[::2], bias[: b.shape[1]]):
        for activation in (None, "relu", "gelu"):
            exact_bias = None if added is None else added.double()
            exact = gemm_reference(a.double(), b.double(), exact_bias, activation)
            found = gemm(a, b, bias=added, activation=activation)
            assert_near(found, exact, near_as(name))
            assert_same_bits([gemm(a, b, bias=added, activation=activation) for _ in range(3)], [found] * 3)
            out = torch.empty_like(found)
            assert_same_bits([gemm(a, b, bias=added, activation=activation, out=out)], [found])
    both = torch.ops.lltm_ext.gemm_forward(a, b, None, "silu", "tf32" if name == "tf32" else "ieee")
    assert_same_bits([both[0]], [gemm(a, b, activation="silu")])
    # Where an activation costs a pass, another kernel may be faster than the library.
    assert_near(both[1], gemm_reference(a.double(), b.double()), near_as(name))


@needs_cuda
@librarys
def test_the_library_multiplies_batches_and_any_strides(name):
    a, b, gemm = librarys_operands(name, "NN", 2)
    bias = b[0, 0].clone()
    wide_a, wide_b = (x.repeat_interleave(2, -1)[..., ::2] for x in (a, b))  # no stride is 1
    for left, right in (
        (a, b),
        (a[:1], b),
        (a, b[0]),
        (a[0], b),
        (a.expand(2, *a.shape[1:]), b),
        (wide_a, wide_b),
    ):
        exact = gemm_reference(left.double(), right.double(), bias.double(), "relu")
        assert_near(gemm(left, right, bias=bias, activation="relu"), exact, near_as(name))


@needs_cuda
@librarys
def test_the_library_computes_as_the_call_asks_whatever_torchs_switches_say(name):
    a, b, gemm = librarys_operands(name)
    backend = torch.backends.cuda.matmul
    switches = (
        "allow_tf32",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    )
    before = {switch: getattr(backend, switch) for switch in switches}
    found = []
    try:
        for allowed in (False, True):
            for switch in switches:
                setattr(backend, switch, allowed)
            found.append(gemm(a, b))
            assert all(getattr(backend, switch) == allowed for switch in switches)
    finally:
        for switch, value in before.items():
            setattr(backend, switch, value)
    assert_same_bits(found[:1], found[1:])
    if name == "tf32":
        assert error_of(found[0], a, b) > 10 * error_of(lltm_ext.gemm(a, b), a, b)


@needs_cuda
@librarys
def test_the_library_gives_the_same_bits_on_any_stream_and_in_graphs(name):
    a, b, gemm = librarys_operands(name)
    bias = b[0].clone()
    expected = gemm(a, b, bias=bias)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_stream = gemm(a, b, bias=bias)
        with torch.cuda.graph(graph, stream=stream):
            in_graph = gemm(a, b, bias=bias)
        graph.replay()
    torch.cuda.synchronize()
    assert_same_bits([on_stream, in_graph], [expected, expected])


@needs_cuda
@librarys
def test_the_library_keeps_nan_and_infinity(name):
    a, b, gemm = librarys_operands(name)
    b = b.abs() + 0.1
    a[7, 3], a[9, 3] = torch.nan, torch.inf
    for activation in ("relu", "gelu", "gelu_tanh", "silu"):
        c = gemm(a, b, activation=activation)
        assert c[7].isnan().all()
        assert c[9].isposinf().all()
        assert c[10].isfinite().all()


# A linear layer's operands, both K-major: kernels for up to 8, 16 and 32 rows, and tiles.
FEW_ROWS = (1, 7, 8, 9, 16, 17, 32, 33, 64)
halves = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def assert_every_sum_is_exact(m, k, n, layout, dtype, device):
    """Small integers, whose sums are exact, are compared element by element."""
    generator = torch.Generator(device).manual_seed(m)
    a, b, bias = (
        torch.randint(-2, 3, shape, generator=generator, device=device).to(dtype)
        for shape in ((m, k), (k, n), (n,))
    )
    exact = a.double() @ b.double()
    a, b = in_layout(layout, a, b)
    assert_same_bits([lltm_ext.gemm(a, b)], [exact.to(dtype)])
    found = lltm_ext.gemm(a, b, bias=bias, activation="relu")
    assert_same_bits([found], [(exact + bias.double()).relu().to(dtype)])


@devices
@halves
@of_sizes("8x17 40x1 520x2049 264x2500 136x4001 1000x523 4104x264 72x11008 24x14335")
@pytest.mark.parametrize("rows", FEW_ROWS)
def test_few_rows_compute_every_sum(rows, sizes, dtype, device):
    assert_every_sum_is_exact(rows, *sizes, "NT", dtype, device)


@devices
@halves
@layouts
@pytest.mark.parametrize("rows, k", [(65, 8), (100, 4104), (705, 6000), (1503, 3001), (9001, 600)], ids=str)
@pytest.mark.parametrize("columns", [1, 8, 9, 16, 17, 32])
def test_few_columns_compute_every_sum(columns, rows, k, layout, dtype, device):
    rows = rows // 8 if device == "cpu" else rows  # the sizes are those of a GPU's kernels
    assert_every_sum_is_exact(rows, k, columns, layout, dtype, device)


@devices
@halves
@activations
@pytest.mark.parametrize("rows", FEW_ROWS)
def test_few_rows_with_activations_save_what_backward_needs(rows, activation, dtype, device):
    make = Make(dtype, device)
    x, weight, bias = make(rows, 136, scale=136**-0.5), make(1123, 136), make(1123)
    call = Call(x, weight.T, bias=bias, activation=activation)
    assert_accurate(lltm_ext.gemm, gemm_reference, call, dtype)


@devices
@halves
@pytest.mark.parametrize("rows", FEW_ROWS)
def test_few_rows_support_batches_and_views(rows, dtype, device):
    make = Make(dtype, device)
    x, weight = make(3, rows, 1008, scale=1008**-0.5), make(3, 710, 1008)
    cases = [(x, weight), (x[:1], weight), (x, weight[0]), (x[0], weight)]
    cases += [(x[..., some], weight[..., some]) for some in (slice(1001), slice(1, None), slice(8, None))]
    for left, right in cases:
        assert_gemm_is_accurate(left, right.mT)


@devices
@halves
@pytest.mark.parametrize("rows", FEW_ROWS)
def test_with_few_rows_nan_stays_in_its_row_and_column(rows, dtype, device):
    make = Make(dtype, device)
    # oneDNN's kernels for AMX read past a row's end where K is no multiple of 32.
    k = 256 if device == "cpu" else 264
    x, weight = make(rows, k), make(1523, k)
    good = lltm_ext.gemm(x, weight.T)
    x[-1, 3] = weight[-1, k - 1] = torch.nan
    found = lltm_ext.gemm(x, weight.T)
    assert found[-1].isnan().all()
    assert found[:, -1].isnan().all()
    assert_same_bits([found[:-1, :-1]], [good[:-1, :-1]])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_other_dtypes_ignore_precision(precision):
    for dtype in (torch.float16, torch.bfloat16, DOUBLE):
        a, b = operands(Make(dtype), 17, 40, 9)
        assert_same_bits([lltm_ext.gemm(a, b, precision=precision)], [lltm_ext.gemm(a, b)])


class Scaled(lltm_ext.Linear):
    """A user's subclass."""

    def __init__(self, activation=None, scale=2):
        super().__init__(5, 3, activation=activation)
        self.scale = scale

    def forward(self, input):
        return super().forward(input) * self.scale


both_linears = pytest.mark.parametrize(
    "cls,sizes", [(lltm_ext.Linear, (5, 3)), (Scaled, ())], ids=["Linear", "a subclass"]
)


def saved_by_a_subclass_of_nn_linear(layer):
    """A pickle of the release in which each Linear was an nn.Linear: the class, no arguments, the state."""
    name = type(layer).__qualname__.encode()
    return b"\x80\x02clltm_ext.gemm\n" + name + b"\n)\x81" + pickle.dumps(layer.__dict__, 2)[2:-1] + b"b."


def linear(*rows, **options):
    """A layer and a call, as ModuleSuite takes them."""
    return lambda **where: lltm_ext.Linear(5, 3, **options, **where), lambda make: Call(make(*rows, 5))


class TestLinear(ModuleSuite):
    modules = {
        "Linear": linear(4),
        "with activation": linear(2, 4, activation="gelu"),
        "without bias": linear(bias=False, activation="relu"),
    }

    @pairwise(
        shape=[(5,), (4, 5), (2, 3, 4, 5), (0, 5), (2, 0, 5)],
        activation=ACTIVATIONS,
        bias={"no bias": False, "bias": True},
    )
    def test_it_equals_nn_linear_and_the_activation(self, activation, bias, shape, device):
        layer = lltm_ext.Linear(5, 3, bias, activation, device=device, dtype=DOUBLE)
        peer = torch.nn.Linear(5, 3, bias, device=device, dtype=DOUBLE)
        peer.load_state_dict(layer.state_dict())
        f = _activations.ACTIVATIONS[activation].reference if activation else lambda x: x
        x, found = Make(DOUBLE, device)(*shape).requires_grad_(), []
        for module, y in ((layer, layer(x)), (peer, f(peer(x)))):
            found.append([y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])])
        assert_all_near(*found, BACKWARD[DOUBLE])

    def test_its_parameters_are_initialised_as_nn_linear_initialises_them(self):
        torch.manual_seed(0)
        layer = lltm_ext.Linear(5, 3)
        torch.manual_seed(0)
        peer = torch.nn.Linear(5, 3)
        assert_same_bits([layer.weight, layer.bias], [peer.weight, peer.bias])

    def test_repr_and_errors(self):
        assert repr(lltm_ext.Linear(5, 3, False, "silu")) == (
            "Linear(in_features=5, out_features=3, bias=False, activation='silu')"
        )
        with pytest.raises(ValueError, match=r"^Linear: expected activation None or one of .*, got 'swish'"):
            lltm_ext.Linear(5, 3, activation="swish")
        for input in (torch.ones(4, 6), torch.ones(())):
            with pytest.raises(RuntimeError, match=r"^Linear: expected input of shape .* = 5, got \["):
                lltm_ext.Linear(5, 3)(input)

    @both_linears
    @activations
    def test_it_is_an_nn_linear_only_without_an_activation(self, cls, sizes, activation):
        layer = cls(*sizes, activation=activation)
        again = [type(cls(*sizes, activation=other))(*sizes, activation=activation) for other in ACTIVATIONS]
        for one in (layer, *again):
            assert isinstance(one, torch.nn.Linear) == (activation is None)
            assert isinstance(one, cls)
            assert isinstance(one, lltm_ext.Linear)
            assert type(one) is type(layer)
            for name in ("__module__", "__qualname__", "__name__", "__doc__"):
                assert getattr(type(one), name) == getattr(cls, name)

    @both_linears
    @activations
    def test_copies_are_of_the_same_class(self, cls, sizes, activation):
        layer, x, file = cls(*sizes, activation=activation), torch.randn(4, 5), io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        protocols = range(pickle.HIGHEST_PROTOCOL + 1)
        copies = [pickle.loads(pickle.dumps(layer, protocol)) for protocol in protocols]
        copies += [copy.copy(layer), copy.deepcopy(layer), torch.load(file, weights_only=False)]
        for copied in copies:
            assert type(copied) is type(layer)
            assert vars(copied).keys() == vars(layer).keys()
            assert_same_bits([copied(x)], [layer(x)])

    @activations
    def test_a_pickle_of_the_time_when_each_was_an_nn_linear_loads(self, activation):
        layer, x = lltm_ext.Linear(5, 3, activation=activation), torch.randn(4, 5)
        loaded = pickle.loads(saved_by_a_subclass_of_nn_linear(layer))
        assert type(loaded) is type(layer)
        assert_same_bits([loaded(x)], [layer(x)])

    @both_linears
    def test_its_activation_can_be_set_later(self, cls, sizes):
        layer, x = cls(*sizes), torch.randn(4, 5)
        parameters = dict(layer.named_parameters())
        for activation in ("relu", "gelu", None, None, "silu"):
            layer.activation = activation
            other = cls(*sizes, activation=activation)
            other.load_state_dict(layer.state_dict())
            assert type(layer) is type(other)
            assert_same_bits([layer(x)], [other(x)])
        assert all(parameter is parameters[name] for name, parameter in layer.named_parameters())

    @activations
    def test_a_parametrization_keeps_the_class(self, activation):
        layer, x = lltm_ext.Linear(5, 3, activation=activation), torch.randn(4, 5)
        cls = type(layer)
        torch.nn.utils.parametrizations.orthogonal(layer)
        for one in (layer, copy.deepcopy(layer)):
            assert isinstance(one, torch.nn.Linear) == (activation is None)
            assert_same_bits([one(x)], [layer(x)])
            message = r"^ParametrizedLinear: expected .*activation.* nn.Linear, got"
            with pytest.raises(RuntimeError, match=message):
                one.activation = "relu" if activation is None else None
            assert one.activation == activation
        torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
        assert type(layer) is cls

    @activations
    def test_a_tool_may_merge_an_adapter_into_each_nn_linear_of_a_model(self, activation):
        """As LoRA does: what is added to the output, x @ delta^T, becomes a part of the weight."""
        torch.manual_seed(0)
        layers = (lltm_ext.Linear(5, 6, activation=activation), lltm_ext.Linear(6, 5), Scaled("relu"))
        model, x = torch.nn.Sequential(*layers), torch.randn(4, 5)
        deltas = {m: torch.randn_like(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)}
        assert [*deltas] == [m for m in layers if m.activation is None]

        def adapter(module, inputs, output):
            return output + inputs[0] @ deltas[module].t()

        hooks = [module.register_forward_hook(adapter) for module in deltas]
        adapted = model(x)
        for (module, delta), hook in zip(deltas.items(), hooks, strict=True):
            hook.remove()
            module.weight.data += delta
        assert_near(model(x), adapted, FORWARD[torch.float32])


class TestRawBindings:
    def test_gemm_writes_into_c(self, dtype, device):
        for sizes in ((63, 65, 67), (7, 5, 9, 3), (4, 0, 5), (0, 3, 5)):
            a, b = operands(Make(dtype, device), *sizes)
            c = torch.full((*a.shape[:-1], b.shape[-1]), torch.nan, dtype=dtype, device=device)
            address = c.data_ptr()
            assert _C.gemm.gemm(c, a, b) is None
            assert c.data_ptr() == address
            assert_near(c, a.double() @ b.double(), FORWARD[dtype])

    @pytest.mark.skipif(_portable.in_use, reason="the portable library copies c")
    def test_c_may_not_alias_an_operand(self, device):
        a = Make(device=device)(3, 3)
        for operands in ((a, torch.ones_like(a)), (torch.ones_like(a), a)):
            with pytest.raises(RuntimeError, match=r"^gemm\.gemm: expected c to share no memory with a or b"):
                _C.gemm.gemm(a, *operands)

    def test_a_backward_of_matrices_and_a_batch_is_refused(self, device):
        make, message = Make(device=device), r"^gemm\.backward: expected a and b of as many dimensions, got"
        for a, b in ((make(3, 4), make(2, 4, 5)), (make(2, 3, 4), make(4, 5))):
            with pytest.raises(RuntimeError, match=message):
                _C.gemm.backward(make(2, 3, 5), a, b)

    @pytest.mark.skipif(_portable.in_use, reason="the dispatcher resolves such views for the library")
    def test_they_refuse_a_lazily_negated_view(self, device):
        a, message = Make(device=device)(3, 3), r"^gemm\.forward: expected a to be materialized, got a lazily"
        with pytest.raises(RuntimeError, match=message):
            _C.gemm.forward(torch._neg_view(a), a)

    def test_forward_and_backward(self, dtype, device):
        a, b = operands(Make(dtype, device), 63, 65, 67)
        grad = Make(dtype, device, seed=1)(63, 67)
        assert_near(_C.gemm.forward(a, b), a.double() @ b.double(), FORWARD[dtype])
        expected = [grad.double() @ b.double().T, a.double().T @ grad.double()]
        assert_all_near(_C.gemm.backward(grad, a, b), expected, BACKWARD[dtype])

    @pytest.mark.parametrize("name", ["a", "b", "c"])
    def test_they_refuse_what_check_input_names(self, name, device):
        a, b = operands(Make(device=device), 4, 3, 5)
        arguments = {"c": torch.zeros(4, 5, device=device), "a": a, "b": b}
        x = arguments[name]
        for value, exception, pattern in (
            *unfit_for_bindings(x),
            (x.double(), TypeError, "of dtype .*, got float"),
            (torch.cat([x, x], 1 if name == "a" else 0), RuntimeError, r"of shape .*, got \["),
        ):
            # b and c are compared with a, so the error for a bad a may name them.
            argument = r"\w" if name == "a" else name
            with pytest.raises(exception, match=f"^gemm.gemm: expected {argument} {pattern}"):
                _C.gemm.gemm(**{**arguments, name: value})
        with pytest.raises(TypeError, match=r"gemm\(\): incompatible function arguments"):
            _C.gemm.gemm(**{**arguments, name: None})
        _C.gemm.gemm(**arguments)
        assert_near(arguments["c"], a.double() @ b.double(), FORWARD[torch.float32])


@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_activation_that_is_no_string_is_named(requires_grad):
    a = torch.ones(2, 2, requires_grad=requires_grad)
    with pytest.raises(RuntimeError, match=r"for argument 'activation'"):
        lltm_ext.gemm(a, a, activation=[1.0])
