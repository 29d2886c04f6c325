"""stochastic_round. It is random, so tests check that results are neighbours, and the mean of many."""

import copy
import functools
import itertools
import pickle

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from op_suite import (
    EXAMPLES,
    FLOATING,
    Call,
    Make,
    Module,
    assert_same_bits,
    forward_and_gradients,
    misaligned,
    needs_cuda,
    packed,
    stepped,
    tensors_saved_by,
    transposed,
)
from torch._subclasses.fake_tensor import FakeTensorMode

import lltm_ext
from lltm_ext import _C, _portable
from lltm_ext.stochastic_round import stochastic_round_reference

HALF_TYPES = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504.0, 65519.0, 65520.0, -1e5, 3.3e38, 3.4028235e38]
EXACT = [1.0, -1.5, 2.0**-14, 2.0**-24, -3 * 2.0**-24, 2.0**-133, 1024.0]


def generator(device, seed=0):
    return torch.Generator(device).manual_seed(seed)


to_bfloat16 = functools.partial(lltm_ext.stochastic_round, dtype=torch.bfloat16)


def rounded(x, half, seed=0):
    return lltm_ext.stochastic_round(x, half, generator=generator(x.device, seed))


def assert_neighbours(y, x):
    """Each y is the next value of its dtype below or above x."""
    down, up, probability = stochastic_round_reference(x, y.dtype)
    bits = [t.view(torch.int16) for t in (y, down, up)]
    one_of_two = ((bits[0] == bits[1]) & (probability < 1)) | ((bits[0] == bits[2]) & (probability > 0))
    assert (one_of_two | (bits[0] == bits[1]) & (bits[1] == bits[2]) | (x.isnan() & y.isnan())).all()


def assert_all_differ(results):
    for a, b in itertools.combinations(results, 2):
        assert not torch.equal(a, b)


def wide(n, device, exponents=(-45, 17)):
    """Values of both signs, with uniformly distributed exponents."""
    source = torch.Generator().manual_seed(0)
    exponent = torch.randint(*exponents, (n,), generator=source)
    sign = torch.randint(0, 2, (n,), generator=source) * 2 - 1
    return (sign * (1 + torch.rand(n, generator=source)) * 2.0**exponent).to(device)


@HALF_TYPES
class TestValues:
    def test_each_is_one_of_the_two_neighbours(self, half, device):
        x = torch.cat([wide(100_003, device), torch.tensor(SPECIAL + EXACT, device=device)])
        y = rounded(x, half)
        assert (y.shape, y.dtype, y.device) == (x.shape, half, x.device)
        assert_neighbours(y, x)
        tiny = wide(10_000, device, (-149, -100))  # subnormal in float16, some also in bfloat16
        assert_neighbours(rounded(tiny, half), tiny)

    def test_representable_values_do_not_change(self, half, device):
        x = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(half)
        y = rounded(x.float(), half)
        assert torch.equal(y.isnan(), x.isnan())
        assert torch.equal(y.view(torch.int16)[~x.isnan()], x.view(torch.int16)[~x.isnan()])

    def test_values_beyond_the_largest_are_rounded_to_nearest(self, half, device):
        x = torch.tensor(SPECIAL, device=device)
        x = x[~(x.abs() <= torch.finfo(half).max)]
        for seed in range(5):
            torch.testing.assert_close(rounded(x, half, seed), x.to(half), rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, 3.4e38, 7e4, 2.0**-15, 2.0**-140, 0.0])
    def test_an_unusual_value_changes_no_other_element(self, value, half, device):
        x = Make(device=device)(4096)
        expected = rounded(x, half)
        for place in (0, 3, 7, 1029, 4095):
            with_it = x.clone()
            with_it[place] = value
            others = torch.arange(len(x), device=device) != place
            assert_same_bits([rounded(with_it, half)[others]], [expected[others]])

    @pytest.mark.parametrize("value", [0.1, -0.3, 1 + 2**-20, 3.14159, -1000.7, 1.37 * 2**-15, 1.1 * 2**-22])
    def test_the_mean_is_unbiased(self, value, half, device):
        n = 1 << 20
        x = torch.full((n,), value, device=device)
        _, up, probability = stochastic_round_reference(x[:1], half)
        p = probability.item()
        ups = (rounded(x, half) == up).sum().item()
        # Five standard deviations, and 16 bits of resolution below float16's normal range.
        assert abs(ups - n * p) <= 5 * (n * p * (1 - p)) ** 0.5 + n * 2**-17, (ups / n, p)

    def test_the_mean_of_all_magnitudes_is_unbiased(self, half, device):
        x = wide(1 << 20, device, (-30, 10))
        _, up, probability = stochastic_round_reference(x, half)
        went_up = (rounded(x, half) == up) & (probability > 0)
        bias = went_up.double() - probability
        # All, and each position in a block of random bits.
        for part, p in ((bias, probability), *((bias[k::8], probability[k::8]) for k in range(8))):
            assert part.sum().abs() <= 5 * (p * (1 - p)).sum().sqrt() + len(part) * 2**-17

    def test_neighbouring_elements_are_independent(self, half, device):
        n = 1 << 20
        x = torch.full((n,), 1 + 2.0 ** -(9 if half == torch.bfloat16 else 12), device=device)
        up = 2 * (rounded(x, half) > 1).double() - 1
        p = stochastic_round_reference(x[:1], half)[2].item()
        mean, variance = 2 * p - 1, 4 * p * (1 - p)
        for lag in (1, 2, 7, 8, 16, 256, 2048):
            covariance = ((up[lag:] - mean) * (up[:-lag] - mean)).mean().item()
            assert abs(covariance) <= 5 * variance / (n - lag) ** 0.5, lag


@HALF_TYPES
class TestRandomness:
    def test_the_same_seed_gives_the_same_bits(self, half, device):
        x = Make(device=device)(10_001)
        assert_same_bits([rounded(x, half)], [rounded(x, half)])
        assert not torch.equal(rounded(x, half), rounded(x, half, 1))

    def test_the_global_generator_is_the_default(self, half, device):
        x = Make(device=device)(10_001)
        torch.manual_seed(5)
        first, second = lltm_ext.stochastic_round(x, half), lltm_ext.stochastic_round(x, half)
        torch.manual_seed(5)
        again = lltm_ext.stochastic_round(x, half)
        assert_same_bits([again], [first])
        assert not torch.equal(first, second)

    def test_one_generator_gives_new_bits_each_time(self, half, device):
        x, source = Make(device=device)(10_001), generator(device)
        assert_all_differ([lltm_ext.stochastic_round(x, half, generator=source) for _ in range(4)])

    def test_length_and_alignment_do_not_change_the_bits(self, half, device):
        x = Make(device=device)(1000)
        whole = rounded(x, half)
        for n in (1, 7, 8, 9, 100, 999):
            assert_same_bits([rounded(x[:n].clone(), half)], [whole[:n]])
        assert_same_bits([rounded(misaligned(x), half)], [whole])

    def test_the_number_of_threads_does_not_change_the_bits(self, half):
        x, threads = Make()(100_003), torch.get_num_threads()
        expected = rounded(x, half)
        try:
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                assert_same_bits([rounded(x, half)], [expected])
        finally:
            torch.set_num_threads(threads)

    @EXAMPLES
    @hypothesis.given(data=st.data())
    def test_any_shape_and_strides(self, data, half, device):
        shape = data.draw(st.lists(st.integers(0, 9), max_size=4), label="shape")
        order = data.draw(st.permutations(range(len(shape))), label="order")
        x = Make(device=device)(*shape).permute(order)
        y = rounded(x, half)
        assert (y.shape, y.stride()) == (x.shape, torch.empty_like(x).stride())
        # Random bits follow the order in memory.
        in_memory_order = packed(x.permute([order.index(i) for i in range(x.dim())]))
        assert_same_bits([y], [rounded(in_memory_order, half).permute(order)])
        gaps = stepped(x)
        assert_neighbours(rounded(gaps, half), packed(gaps))


@HALF_TYPES
class TestGradient:
    @pytest.mark.parametrize("way", ["function", "apply"])
    def test_it_is_the_incoming_one(self, way, half, device):
        function = lltm_ext.StochasticRoundFunction.apply if way == "apply" else lltm_ext.stochastic_round
        x = Make(device=device)(63, 3).requires_grad_()
        grad_output = Make(half, device, seed=1)(63, 3).requires_grad_()
        (gradient,) = torch.autograd.grad(function(x, half), x, grad_output, create_graph=True)
        assert_same_bits([gradient], [grad_output.float()])
        (second,) = torch.autograd.grad(gradient, grad_output, torch.full_like(x, 3))
        assert second.dtype == half and (second == 3).all()

    def test_nothing_is_saved(self, half, device):
        x = Make(device=device)(5).requires_grad_()
        assert not tensors_saved_by(lambda: lltm_ext.stochastic_round(x, half))

    def test_no_graph_is_recorded_without_need(self, half, device):
        x = Make(device=device)(5)
        assert not lltm_ext.stochastic_round(x, half).requires_grad
        with torch.no_grad():
            assert not lltm_ext.stochastic_round(x.requires_grad_(), half).requires_grad


class TestTracing:
    def test_opcheck(self, device):
        x = Make(device=device)(5, 3)
        for input in (x, x.clone().requires_grad_(), transposed(x)):
            # The other checks compare values, and do not seed alike.
            checks = ("test_schema", "test_autograd_registration", "test_faketensor")
            op = torch.ops.lltm_ext.stochastic_round.default
            torch.library.opcheck(op, (input, torch.bfloat16), test_utils=checks)

    def test_it_is_tagged_as_random(self):
        tags = torch.ops.lltm_ext.stochastic_round.default.tags
        assert torch.Tag.nondeterministic_seeded in tags and torch.Tag.pt2_compliant_tag in tags

    def test_fake_tensors_have_the_layout_of_the_output(self, device):
        x = transposed(Make(device=device)(5, 3))
        with FakeTensorMode() as mode:
            fake = lltm_ext.stochastic_round(mode.from_tensor(x), torch.float16)
        assert (fake.shape, fake.stride(), fake.dtype) == (x.shape, x.stride(), torch.float16)

    def test_compiles_into_one_graph(self, device, fresh_dynamo):
        compiled = torch.compile(lambda x: to_bfloat16(x * 2) * 1, fullgraph=True, backend="aot_eager")
        x = Make(device=device)(63, 3)
        (y,), (gradient,) = forward_and_gradients(compiled, Call(x), [torch.ones(63, 3, device=device)])
        assert_neighbours(y, x * 2)
        assert (gradient == 2).all()

    def test_compiles_with_inductor(self, device, fresh_dynamo):
        """Without what torch would compile to C++, such as the gradient's dtype."""
        compiled, x = torch.compile(to_bfloat16, fullgraph=True), Make(device=device)(63, 3)
        assert_neighbours(compiled(x), x)
        assert not torch.equal(compiled(x), compiled(x))

    def test_exports(self, device):
        x = Make(device=device)(63, 3)
        program = torch.export.export(Module(to_bfloat16), (x,))
        assert_neighbours(program.module()(x), x)


class TestTransforms:
    def test_vmap_gives_each_slice_different_random_numbers(self, device):
        x = Make(device=device)(1000)
        for batched, dims in ((x.repeat(3, 1), 0), (x.repeat(3, 1).T.contiguous(), 1)):
            y = torch.vmap(to_bfloat16, dims, randomness="different")(batched)
            for i in range(3):
                assert_neighbours(y[i], x)
            assert not torch.equal(y[0], y[1])

    @pytest.mark.parametrize("randomness", ["error", "same"])
    def test_vmap_refuses_other_kinds_of_randomness(self, randomness, device):
        message = r"^stochastic_round: expected vmap with randomness='different', got"
        with pytest.raises(RuntimeError, match=message):
            torch.vmap(to_bfloat16, randomness=randomness)(Make(device=device)(3, 5))

    def test_vmap_of_the_dispatcher_op(self, device):
        x, op = Make(device=device)(3, 5), torch.ops.lltm_ext.stochastic_round
        assert_neighbours(torch.vmap(lambda x: op(x, torch.bfloat16), randomness="different")(x), x)

    def test_func_grad_is_straight_through(self, device):
        x = Make(device=device)(5)
        gradient = torch.func.grad(lambda x: to_bfloat16(x).float().sum() * 3)(x)
        assert gradient.tolist() == [3] * 5

    def test_tangents_are_straight_through(self, device):
        x = Make(device=device)(5)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, 3 * torch.ones_like(x))
            tangent = torch.autograd.forward_ad.unpack_dual(to_bfloat16(dual)).tangent
        assert tangent.dtype == torch.bfloat16 and tangent.tolist() == [3] * 5
        assert torch.func.jvp(to_bfloat16, (x,), (2 * torch.ones_like(x),))[1].tolist() == [2] * 5


class TestErrors:
    @pytest.mark.parametrize(
        "input,dtype,exception,pattern",
        [
            (None, torch.bfloat16, TypeError, "input to be a Tensor, got NoneType"),
            (torch.zeros(3).double(), torch.bfloat16, TypeError, "input of dtype float32"),
            (torch.arange(3), torch.bfloat16, TypeError, "input of dtype float32, got int64"),
            (torch.zeros(3), torch.float32, TypeError, "dtype float16 or bfloat16, got float32"),
            (torch.eye(3).to_sparse(), torch.float16, RuntimeError, "input of layout torch.strided"),
        ],
    )
    def test_errors_name_the_bad_argument(self, input, dtype, exception, pattern):
        can_require_a_gradient = isinstance(input, torch.Tensor) and input.is_floating_point()
        for x in (input, input.clone().requires_grad_()) if can_require_a_gradient else (input,):
            with pytest.raises(exception, match=f"^stochastic_round: expected {pattern}"):
                lltm_ext.stochastic_round(x, dtype)

    @needs_cuda
    def test_a_generator_of_another_device_is_refused(self):
        x, message = torch.zeros(3, device="cuda"), "expected a generator on cuda:0, got one on cpu"
        with pytest.raises(RuntimeError, match=f"^stochastic_round: {message}"):
            lltm_ext.stochastic_round(x, torch.float16, generator=generator("cpu"))

    def test_raw_bindings(self, device):
        x = Make(device=device)(3, 5)
        y = _C.stochastic_round.forward(x, torch.float16, generator(device))
        assert_same_bits([y], [rounded(x, torch.float16)])
        assert_neighbours(_C.stochastic_round.forward(x, dtype=torch.bfloat16), x)
        assert_same_bits([_C.stochastic_round.backward(y)], [y.float()])
        forward, backward = _C.stochastic_round.forward, _C.stochastic_round.backward
        for call, exception, message in (
            (lambda: forward(x.T, torch.float16), RuntimeError, "forward: expected input to be contiguous"),
            (
                lambda: forward(x.double(), torch.float16),
                TypeError,
                "forward: expected input of dtype float32",
            ),
            (lambda: backward(x.long()), TypeError, f"backward: expected grad_output of dtype {FLOATING}"),
        ):
            with pytest.raises(exception, match=rf"^stochastic_round\.{message}"):
                call()

    def test_empty_inputs(self, device):
        for shape in ((0,), (3, 0)):
            assert lltm_ext.stochastic_round(torch.zeros(shape, device=device), torch.float16).shape == shape


def test_the_module_and_its_copies_equal_the_function(device):
    x, module = Make(device=device)(63), lltm_ext.StochasticRound(torch.bfloat16)
    assert repr(module) == "StochasticRound(dtype=torch.bfloat16)"
    results = []
    for function in (to_bfloat16, module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.manual_seed(0)
        results.append(function(x))
    assert_same_bits(results, results[:1] * len(results))


@needs_cuda
@HALF_TYPES
class TestOnCuda:
    def test_a_graph_draws_new_numbers_at_each_replay(self, half):
        x = Make(device="cuda")(10_001)
        lltm_ext.stochastic_round(x, half)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = lltm_ext.stochastic_round(x, half)
            z = lltm_ext.stochastic_round(x, half)
        results = []
        for _ in range(3):
            graph.replay()
            results += [y.clone(), z.clone()]
        for y in results:
            assert_neighbours(y, x)
        assert_all_differ(results)

    def test_a_graph_equals_eager_with_the_same_seed(self, half):
        x = Make(device="cuda")(10_001)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = lltm_ext.stochastic_round(x, half)
        # The start of a capture also writes the seed, on a stream that no replay waits for.
        torch.cuda.synchronize()
        torch.cuda.manual_seed(3)
        graph.replay()
        torch.cuda.manual_seed(3)
        assert_same_bits([y], [lltm_ext.stochastic_round(x, half)])

    @pytest.mark.skipif(_portable.in_use, reason="the portable library computes it by torch's ops")
    def test_more_elements_than_an_int32_counts(self, half):
        free, _ = torch.cuda.mem_get_info()
        if free < 20 * 2**30:
            pytest.skip(f"needs 20 GiB of free GPU memory, found {free / 2**30:.0f}")
        n = 2**31 + 2**20 + 17
        x = torch.empty(n, device="cuda").normal_()
        y = lltm_ext.stochastic_round(x, half)
        for start in (0, 2**31 - 500, n - 1000):
            piece = slice(start, start + 1000)
            assert_neighbours(y[piece], x[piece])
