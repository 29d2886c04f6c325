"""The tests that every op must pass. An op inherits from a suite and declares what it is:

    class TestSigmoid(ElementwiseSuite):
        op = "sigmoid"
        function = staticmethod(lltm_ext.sigmoid)
        ...

`OpSuite` holds for any op, `SmoothSuite` adds what holds where the gradient is the derivative (not for a
straight-through one), `ElementwiseSuite` what holds for functions of one tensor, element by element, and
`ModuleSuite` what holds for nn.Modules.
"""

import contextlib
import copy
import functools
import gc
import io
import itertools
import pickle
import weakref

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from lltm_ext import _portable
from lltm_ext._install.selftest import BACKWARD, FORWARD
from lltm_ext._library import differentiable_tangents

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
added_units = pytest.mark.skipif(_portable.in_use, reason="the portable library has no resize_units")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA GPU")

# The same examples in each run. Several classes run an inherited test.
EXAMPLES = hypothesis.settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.differing_executors],
)


def pairs_of(*factors):
    """Of all combinations of the factors' values some, in which any two values of two factors meet."""
    every = [[*enumerate(values)] for values in itertools.product(*factors)]
    missing = {pair for values in every for pair in itertools.combinations(values, 2)}
    found = []
    while missing:
        best = max(every, key=lambda values: len(missing.intersection(itertools.combinations(values, 2))))
        missing.difference_update(itertools.combinations(best, 2))
        found.append(tuple(value for _, value in best))
    return found


def pairwise(**factors):
    """As pytest.mark.parametrize for each factor, by `pairs_of`. A factor is a list, or a dict by ids."""
    tables = [values if isinstance(values, dict) else dict(enumerate(values)) for values in factors.values()]

    def name(table, key):
        return key if isinstance(key, str) else str(table[key]).removeprefix("torch.")

    params = [
        pytest.param(
            *(table[key] for table, key in zip(tables, keys, strict=True)),
            id="-".join(name(table, key) for table, key in zip(tables, keys, strict=True)),
        )
        for keys in pairs_of(*tables)
    ]
    return pytest.mark.parametrize(",".join(factors), params)


DOUBLE = torch.float64
FLOATING = "float16, bfloat16, float32 or float64"  # as messages name the dtypes that every op takes
AUTOCAST_DTYPE = {"cpu": torch.bfloat16, "cuda": torch.float16}


def assert_near(actual, expected, bound, what="result"):
    """Relative L2 error of at most `bound`. NaN fails, even if both have it."""
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    error, norm = (actual - expected).norm().item(), expected.norm().item()
    assert error <= bound * norm, f"{what}: relative L2 error {error / norm if norm else error} above {bound}"


def assert_all_near(actual, expected, bound, what="result"):
    assert len(actual) == len(expected), f"{what}: {len(actual)} tensors, expected {len(expected)}"
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_near(a, e, bound, f"{what} {i}")


def bits_of(x):
    """The elements as integers, so that -0.0 is not 0.0, and a NaN is equal to one with the same payload."""
    x = x.detach().resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.is_complex() else x
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().view(integer)


def assert_same_bits(actual, expected):
    assert len(actual) == len(expected)
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert (a.shape, a.dtype, a.device) == (e.shape, e.dtype, e.device), f"tensor {i}"
        if not torch.equal(bits_of(a), bits_of(e)):
            differ = bits_of(a) != bits_of(e)
            first = tuple(differ.nonzero()[0].tolist())[: a.dim()]
            raise AssertionError(
                f"tensor {i}: {differ.sum()} of {differ.numel()} elements differ in their bits, the first "
                f"at {first}: {a[first].item()!r}, expected {e[first].item()!r}"
            )


class Make:
    """Tensors of normal values, the same on every device and (up to rounding) in every dtype."""

    def __init__(self, dtype=torch.float32, device="cpu", seed=0):
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape, scale=1.0):
        values = torch.randn(shape, generator=self.generator, dtype=DOUBLE) * scale
        return values.to(self.dtype).to(self.device)


class Call:
    """Arguments for a function, whose tensors can be read, replaced and passed as positional arguments."""

    def __init__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs

    @property
    def tensors(self):
        return [
            leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)
        ]

    def map(self, f):
        args, kwargs = pytree.tree_map_only(torch.Tensor, f, (self.args, self.kwargs))
        return Call(*args, **kwargs)

    def with_tensors(self, tensors):
        remaining = iter(tensors)
        return self.map(lambda _: next(remaining))

    def leaves(self):
        """New leaves with the same values and strides, which require gradients."""
        return self.map(lambda x: x.detach().requires_grad_())

    def run(self, function):
        """The outputs as a flat tuple of tensors."""
        return tuple(pytree.tree_leaves(function(*self.args, **self.kwargs)))

    def bind(self, function):
        """`function` of only the tensors, returning a tensor or a flat tuple of them."""

        def of_tensors(*tensors):
            outputs = self.with_tensors(tensors).run(function)
            return outputs[0] if len(outputs) == 1 else outputs

        return of_tensors


def assert_checkpointing_frees(function, call):
    """Its recomputation ends by an exception, which a node must survive without a tensor that holds it."""
    gc.freeze()  # so that the collection visits only what is made from here on
    call = call.leaves()
    outputs = torch.utils.checkpoint.checkpoint(call.bind(function), *call.tensors, use_reentrant=False)
    torch.autograd.backward(pytree.tree_leaves(outputs), cotangents(pytree.tree_leaves(outputs)))
    inputs = [weakref.ref(x) for x in call.tensors]  # a node that stays holds them
    del call, outputs
    gc.collect()
    gc.unfreeze()
    assert [x() for x in inputs] == [None] * len(inputs)


class Module(torch.nn.Module):
    """A function as a module, for torch.export."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def cotangents(outputs, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(y.shape, generator=generator, dtype=DOUBLE).to(y.dtype).to(y.device) for y in outputs]


def forward_and_gradients(function, call, grad_outputs=None, zeros_for_unused=False):
    """Outputs, and the gradients of the call's tensors for the given (or fixed random) output gradients."""
    call = call.leaves()
    outputs = call.run(function)
    if grad_outputs is None:
        grad_outputs = cotangents(outputs)
    grad_outputs = [g.to(y.dtype) for g, y in zip(grad_outputs, outputs, strict=True)]
    return outputs, torch.autograd.grad(
        outputs, call.tensors, grad_outputs, materialize_grads=zeros_for_unused
    )


def results(function, call, grad_outputs=None):
    """The outputs and then the gradients, in one list."""
    outputs, gradients = forward_and_gradients(function, call, grad_outputs)
    return [*outputs, *gradients]


def assert_agree(function, other, call, other_call=None, dtype=DOUBLE, what="", factor=1):
    """Outputs and gradients are those of the other function, or of another call, up to rounding."""
    outputs, gradients = forward_and_gradients(function, call)
    expected, expected_gradients = forward_and_gradients(other, other_call or call, cotangents(outputs))
    assert_all_near(outputs, expected, factor * FORWARD[dtype], f"{what} output")
    assert_all_near(gradients, expected_gradients, factor * BACKWARD[dtype], f"{what} gradient of argument")
    return outputs, gradients


def assert_accurate(function, reference, call, dtype, **how):
    """Outputs and gradients are those of the reference in float64."""
    return assert_agree(function, reference, call, call.map(torch.Tensor.double), dtype, **how)


def sum_of_squares(outputs):
    return sum((y * y).sum() for y in pytree.tree_leaves(outputs))


def stacked(rows):
    """Of rows of tensors, each column in one tensor."""
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def tensors_saved_by(function):
    """What autograd saves in a call."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        function()
    return saved


def unfit_for_bindings(x):
    """In place of a matrix x what CHECK_INPUT refuses: (value, exception, end of the message)."""
    yield transposed(x), RuntimeError, r"to be contiguous, got strides \[1, \d+\]"
    yield x.long(), TypeError, f"of dtype {FLOATING}, got int64"
    yield x.to_sparse(), RuntimeError, "of layout torch.strided, got Sparse"


# Other memory layouts of the same values. The gaps are NaN, so that a read of them shows.


def transposed(x):
    return x if x.dim() < 2 else x.mT.contiguous().mT


def stepped(x):
    if x.dim() == 0:
        return x
    gaps = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))
    gaps[..., ::2] = x
    return gaps[..., ::2]


def misaligned(x):
    storage = x.new_full((x.numel() + 1,), float("nan"))
    storage[1:] = x.flatten()
    return storage[1:].view(x.shape)


def expanded(x):
    return x if x.dim() == 0 else x[:1].expand_as(x)


def negated_view(x):
    """Lazily negated, as the imaginary part of a conjugate is: memory holds -x."""
    return torch._neg_view(-x)


def packed(x):
    """The values of `x` in a new contiguous tensor."""
    return x.detach().resolve_neg().clone(memory_format=torch.contiguous_format)


class OpSuite:
    op: str  # its name in torch.ops.lltm_ext, and at the start of its messages
    function = None  # the public function
    reference = None  # the same in pure PyTorch
    Function = None  # its torch.autograd.Function
    exports_as = None  # the op in exported programs, if it is another one
    samples = {}  # name -> (make -> Call)
    small = "small"  # the sample for tests that cost much an element
    resized = ("63", "500")  # two samples that differ in sizes only
    empty_samples = {}  # name -> (make -> Call)
    bad_calls = {}  # name -> (make -> Call, exception, pattern)
    saved = 0  # which tensor of the call the backward needs unchanged, or "output"
    lowered_by_autocast = False
    layouts = {f.__name__: f for f in (transposed, stepped, misaligned, expanded, negated_view)}

    def apply(self, *args, **kwargs):
        """The autograd Function, called like the public function."""
        return self.Function.apply(*args, **kwargs)

    def dispatcher_calls(self, call):
        """(dispatcher op, Call) for each op that this function and its backward go through."""
        yield getattr(torch.ops.lltm_ext, self.op).default, call

    def call(self, case, dtype=torch.float32, device="cpu", seed=0):
        return self.samples[case](Make(dtype, device, seed))

    @pytest.fixture
    def small_call(self, device):
        return self.call(self.small, DOUBLE, device)

    @pytest.fixture
    def call_of_63(self, device):
        return self.call("63", DOUBLE, device)

    # Values and gradients

    def test_values_match_the_reference_and_float64(self, case, dtype, device):
        call = self.call(case, dtype, device)
        outputs, like = call.run(self.function), call.run(self.reference)
        for y, r in zip(outputs, like, strict=True):
            assert (y.shape, y.dtype, y.device) == (r.shape, r.dtype, r.device)
        assert_all_near(outputs, like, FORWARD[dtype], "output")
        assert_all_near(outputs, call.map(torch.Tensor.double).run(self.reference), FORWARD[dtype], "output")

    def test_gradients_match_the_reference_in_float64(self, case, dtype, device):
        call = self.call(case, dtype, device)
        _, gradients = assert_accurate(self.function, self.reference, call, dtype)
        for g, x in zip(gradients, call.tensors, strict=True):
            assert (g.shape, g.dtype, g.device) == (x.shape, x.dtype, x.device)

    def test_the_function_class_equals_the_function(self, small_call):
        assert_agree(self.apply, self.function, small_call)

    def test_each_gradient_alone_equals_all_together(self, small_call):
        call = small_call
        outputs, together = forward_and_gradients(self.function, call)
        for i, expected in enumerate(together):
            tensors = [x.detach().requires_grad_(i == j) for j, x in enumerate(call.tensors)]
            outputs = call.with_tensors(tensors).run(self.function)
            used = [(y, g) for y, g in zip(outputs, cotangents(outputs), strict=True) if y.requires_grad]
            (single,) = torch.autograd.grad([y for y, _ in used], tensors[i], [g for _, g in used])
            assert_near(single, expected, BACKWARD[DOUBLE], f"gradient of argument {i}")

    def test_an_output_not_used_has_no_part_in_the_gradient(self, small_call):
        call = small_call.leaves()
        for i in range(len(call.run(self.function))):
            gradients, expected = (
                torch.autograd.grad(sum_of_squares(call.run(f)[i]), call.tensors, materialize_grads=True)
                for f in (self.function, self.reference)
            )
            assert_all_near(gradients, expected, BACKWARD[DOUBLE], f"from output {i}, gradient of argument")

    def test_backward_runs_twice_on_a_retained_graph(self, small_call):
        call = small_call.leaves()
        outputs = call.run(self.function)
        first, second = (
            torch.autograd.grad(outputs, call.tensors, cotangents(outputs), retain_graph=retain)
            for retain in (True, False)
        )
        assert_same_bits(second, first)

    def test_activation_checkpointing_changes_nothing(self, small_call):
        for function in (self.function, self.apply):
            checkpointed = functools.partial(torch.utils.checkpoint.checkpoint, function, use_reentrant=False)
            assert_same_bits(results(checkpointed, small_call), results(function, small_call))

    def test_activation_checkpointing_frees_what_it_recomputes(self, case, device):
        assert_checkpointing_frees(self.function, self.call(case, DOUBLE, device))

    def test_saved_tensors_may_be_kept_elsewhere(self, small_call, device):
        """As save_on_cpu does: the backward gets other tensors of the same values."""
        for function in (self.function, self.apply):
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x.cpu().clone(), lambda x: x.to(device)):
                found = results(function, small_call)
            assert_same_bits(found, results(function, small_call))

    def test_no_graph_is_recorded_without_need(self, small_call):
        call = small_call
        assert not any(y.requires_grad for y in call.run(self.function))
        with torch.no_grad():
            assert not any(y.requires_grad for y in call.leaves().run(self.function))
        with torch.inference_mode():
            outputs = call.map(torch.clone).run(self.function)
        assert_all_near(outputs, call.run(self.reference), FORWARD[DOUBLE])

    def test_the_same_call_twice_gives_the_same_bits(self, dtype, device):
        call = self.call("500", dtype, device)
        expected = results(self.function, call)
        for _ in range(3):
            assert_same_bits(results(self.function, call), expected)

    def test_arguments_are_left_as_they_came(self, small_call):
        before = small_call.map(torch.clone)
        forward_and_gradients(self.function, small_call)
        assert_same_bits(small_call.tensors, before.tensors)

    # Tracing

    @pytest.mark.parametrize("kind", ["plain", "with gradients", "transposed", "stepped"])
    def test_opcheck(self, kind, small_call):
        layout = self.layouts.get(kind, lambda x: x)
        for op, arguments in self.dispatcher_calls(small_call):
            arguments = arguments if kind == "plain" else arguments.map(layout).leaves()
            torch.library.opcheck(op, arguments.args, arguments.kwargs)

    def test_fake_tensors_have_the_layout_of_the_outputs(self, layout, dtype, device):
        call = self.call(self.small, dtype, device).map(self.layouts[layout])
        with FakeTensorMode() as mode:
            fakes = call.map(mode.from_tensor).run(self.function)
        described = [
            [(y.shape, y.stride(), y.dtype, y.device) for y in outputs]
            for outputs in (fakes, call.run(self.function))
        ]
        assert described[0] == described[1]

    def test_meta_tensors_give_meta_tensors(self):
        call = self.call(self.small)
        metas, outputs = call.map(lambda x: x.to("meta")).run(self.function), call.run(self.function)
        for meta, y in zip(metas, outputs, strict=True):
            assert (meta.shape, meta.dtype, meta.device.type) == (y.shape, y.dtype, "meta")

    def test_fake_tensors_raise_the_same_errors(self, bad):
        make_call, exception, pattern = self.bad_calls[bad]
        with FakeTensorMode() as mode:
            call = make_call(Make()).map(mode.from_tensor)
            with pytest.raises(exception, match=pattern):
                call.run(self.function)

    def test_compiles_into_one_graph(self, call_of_63, fresh_dynamo):
        compiled = torch.compile(self.function, fullgraph=True, dynamic=False, backend="aot_eager")
        assert_agree(compiled, self.function, call_of_63)

    def test_compiles_once_for_all_sizes(self, device, fresh_dynamo):
        from torch._dynamo.testing import CompileCounterWithBackend  # takes a second

        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(self.function, fullgraph=True, dynamic=True, backend=counter)
        frames = []
        for case in self.resized:
            assert_agree(compiled, self.function, self.call(case, DOUBLE, device))
            frames.append(counter.frame_count)
        assert 0 < frames[0] == frames[1]

    def test_compiles_with_inductor(self, call_of_63, fresh_dynamo):
        assert_agree(torch.compile(self.function, fullgraph=True), self.function, call_of_63.map(transposed))

    @pytest.mark.parametrize("strict", [False, True])
    def test_exports(self, strict, call_of_63, device):
        call = call_of_63
        exported = torch.export.export(Module(self.function), call.args, call.kwargs, strict=strict)
        targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
        assert any(target.startswith(f"lltm_ext.{self.exports_as or self.op}") for target in targets), targets
        other = self.call("63", DOUBLE, device, seed=7)
        assert_all_near(other.run(exported.module()), other.run(self.function), FORWARD[DOUBLE])

    def test_an_exported_program_is_saved_and_loaded(self):
        call = self.call("63", DOUBLE)
        file = io.BytesIO()
        torch.export.save(torch.export.export(Module(self.function), call.args, call.kwargs), file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        assert_all_near(call.run(loaded), call.run(self.function), FORWARD[DOUBLE])

    # torch.func

    @pytest.mark.parametrize("dim", [0, -1])
    def test_vmap_over_any_of_the_arguments(self, dim, device):
        calls = [self.call(self.small, DOUBLE, device, seed) for seed in range(3)]
        count = len(calls[0].tensors)
        choices = [{i} for i in range(count)] + ([set(range(count))] if count > 1 else [])
        for batched in choices:
            singles = [
                calls[0].with_tensors([(c if i in batched else calls[0]).tensors[i] for i in range(count)])
                for c in calls
            ]
            tensors = [
                torch.stack([s.tensors[i] for s in singles], dim) if i in batched else x
                for i, x in enumerate(calls[0].tensors)
            ]
            in_dims = tuple(dim if i in batched else None for i in range(count))
            outputs = pytree.tree_leaves(torch.vmap(calls[0].bind(self.function), in_dims)(*tensors))
            expected = stacked(s.run(self.function) for s in singles)
            assert_all_near(outputs, expected, FORWARD[DOUBLE], f"vmap over {in_dims}, output")

    def test_vmap_of_vmap(self, device):
        calls = [[self.call(self.small, DOUBLE, device, 3 * i + j) for j in range(3)] for i in range(2)]
        tensors = stacked(stacked(c.tensors for c in row) for row in calls)
        outputs = pytree.tree_leaves(torch.vmap(torch.vmap(calls[0][0].bind(self.function)))(*tensors))
        for i, row in enumerate(calls):
            for j, call in enumerate(row):
                assert_all_near([y[i, j] for y in outputs], call.run(self.reference), FORWARD[DOUBLE])

    def test_vmap_of_the_dispatcher_ops(self, device):
        of_seeds = [self.dispatcher_calls(self.call(self.small, DOUBLE, device, seed)) for seed in range(3)]
        for pairs in zip(*of_seeds, strict=True):
            op, calls = pairs[0][0], [call for _, call in pairs]
            outputs = torch.vmap(calls[0].bind(op))(*stacked(c.tensors for c in calls))
            expected = stacked(call.run(op) for call in calls)
            assert_all_near(pytree.tree_leaves(outputs), expected, FORWARD[DOUBLE], str(op))

    def test_vmap_of_grad_gives_each_samples_gradient(self, device):
        calls = [self.call(self.small, DOUBLE, device, seed) for seed in range(3)]
        argnums = tuple(range(len(calls[0].tensors)))

        def loss(function):
            return lambda *tensors: sum_of_squares(calls[0].bind(function)(*tensors))

        vectorized = torch.vmap(torch.func.grad(loss(self.function), argnums))
        gradients = vectorized(*stacked(c.tensors for c in calls))
        singles = [torch.func.grad(loss(self.reference), argnums)(*c.tensors) for c in calls]
        assert_all_near(gradients, stacked(singles), BACKWARD[DOUBLE])

    def test_jacobians_match_the_reference(self, small_call):
        call, argnums = small_call, tuple(range(len(small_call.tensors)))
        functions = [(torch.func.jacfwd, self.function), (torch.func.jacrev, self.function)]
        forward, reverse, expected = (
            pytree.tree_leaves(jacobian(call.bind(f), argnums)(*call.tensors))
            for jacobian, f in (*functions, (torch.func.jacrev, self.reference))
        )
        assert_all_near(reverse, expected, BACKWARD[DOUBLE], "jacobian")
        assert_all_near(forward, reverse, BACKWARD[DOUBLE], "jacobian by forward mode")

    def test_vjp_of_vjp_matches_the_reference(self, small_call):
        call = small_call

        def second(function):
            first = torch.func.grad(lambda *tensors: sum_of_squares(call.bind(function)(*tensors)))
            argnums = tuple(range(len(call.tensors)))
            return torch.func.grad(lambda *tensors: sum_of_squares(first(*tensors)), argnums)(*call.tensors)

        assert_all_near(second(self.function), second(self.reference), 10 * BACKWARD[DOUBLE])

    def test_gradients_of_a_batch_of_cotangents(self, small_call):
        call = small_call.leaves()
        outputs = call.run(self.function)
        batch = [torch.stack([g, 2 * g, g.cos()]) for g in cotangents(outputs)]
        together = torch.autograd.grad(outputs, call.tensors, batch, is_grads_batched=True, retain_graph=True)
        for i in range(3):
            single = torch.autograd.grad(outputs, call.tensors, [g[i] for g in batch], retain_graph=True)
            assert_all_near([g[i] for g in together], single, BACKWARD[DOUBLE], "gradient of argument")

    def test_transforms_of_the_dispatcher_op(self, small_call):
        op, call = next(iter(self.dispatcher_calls(small_call)))
        argnums, leaves = tuple(range(len(call.tensors))), call.leaves()

        def loss(*tensors):
            return sum_of_squares(call.bind(op)(*tensors))

        expected = torch.autograd.grad(loss(*leaves.tensors), leaves.tensors)
        assert_all_near(torch.func.grad(loss, argnums)(*call.tensors), expected, BACKWARD[DOUBLE])
        together = torch.vmap(torch.func.grad(loss, argnums))(*stacked([call.tensors] * 2))
        assert_all_near(together, stacked([expected] * 2), BACKWARD[DOUBLE])

    def test_transforms_compile(self, call_of_63, fresh_dynamo):
        call = call_of_63
        argnums, twice = tuple(range(len(call.tensors))), stacked([call.tensors] * 2)

        def gradients(*tensors):
            return torch.func.grad(lambda *t: sum_of_squares(call.bind(self.function)(*t)), argnums)(*tensors)

        for transformed in (torch.vmap(call.bind(self.function)), torch.vmap(gradients)):
            compiled = torch.compile(transformed, fullgraph=True, backend="aot_eager")
            found, expected = (pytree.tree_leaves(f(*twice)) for f in (compiled, transformed))
            assert_all_near(found, expected, BACKWARD[DOUBLE])

    # Forward-mode AD

    @pytest.mark.parametrize("grad_mode", [True, False])
    def test_tangents_match_the_reference(self, grad_mode, small_call):
        call = small_call.leaves()
        with torch.autograd.forward_ad.dual_level():
            duals = call.map(lambda x: torch.autograd.forward_ad.make_dual(x, x.detach().cos()))
            with torch.set_grad_enabled(grad_mode):
                outputs = duals.run(self.function)
            found, expected = (
                [torch.autograd.forward_ad.unpack_dual(y).tangent for y in ys]
                for ys in (outputs, duals.run(self.reference))
            )
        assert_all_near(found, expected, BACKWARD[DOUBLE], "tangent of output")

    def test_a_tangent_of_one_argument(self, small_call):
        call = small_call.leaves()

        def tangents(function, i):
            with torch.autograd.forward_ad.dual_level():
                tensors = list(call.tensors)
                tensors[i] = torch.autograd.forward_ad.make_dual(tensors[i], tensors[i].detach().cos())
                duals = map(torch.autograd.forward_ad.unpack_dual, call.with_tensors(tensors).run(function))
                return [torch.zeros_like(y) if t is None else t for y, t in duals]

        for i in range(len(call.tensors)):
            found, expected = tangents(self.function, i), tangents(self.reference, i)
            assert_all_near(found, expected, BACKWARD[DOUBLE], f"along argument {i}, tangent of output")

    def test_tangents_are_differentiable(self, small_call):
        call, argnums = small_call, tuple(range(len(small_call.tensors)))
        along = tuple(x.cos() for x in call.tensors)

        def by_jvp(*tensors):
            return sum_of_squares(torch.func.jvp(call.bind(self.function), tensors, along)[1])

        def by_vjps(*tensors):  # straight-through references ask for requires_grad, which jvp does not set
            return sum_of_squares(differentiable_tangents(call.bind(self.reference), tensors, along))

        found, expected = (torch.func.grad(f, argnums)(*call.tensors) for f in (by_jvp, by_vjps))
        assert_all_near(found, expected, 10 * BACKWARD[DOUBLE])

    @pytest.mark.skipif(_portable.in_use, reason="the portable library's op has tangents")
    @pytest.mark.parametrize("grad_mode", [True, False])
    def test_forward_mode_of_the_dispatcher_op_is_refused_and_not_dropped(self, grad_mode, small_call):
        op, call = next(iter(self.dispatcher_calls(small_call)))
        with torch.autograd.forward_ad.dual_level(), torch.set_grad_enabled(grad_mode):
            duals = call.map(lambda x: torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
            with pytest.raises((RuntimeError, NotImplementedError), match="jvp"):
                duals.run(op)

    # torch's defaults

    def test_the_default_device_and_dtype_change_nothing(self, device):
        call = self.call(self.small, torch.float32, device)
        grad_outputs = cotangents(call.run(self.function))
        expected = results(self.function, call, grad_outputs)
        with torch.device("meta"):
            assert_same_bits(results(self.function, call, grad_outputs), expected)
        torch.set_default_dtype(DOUBLE)
        try:
            assert_same_bits(results(self.function, call, grad_outputs), expected)
        finally:
            torch.set_default_dtype(torch.float32)

    # Autocast

    def test_autocast(self, device):
        call, low = self.call("63", torch.float32, device), AUTOCAST_DTYPE[device]
        with torch.autocast(device, low):
            outputs, gradients = forward_and_gradients(self.function, call)
        assert all(g.dtype == torch.float32 for g in gradients)
        if not self.lowered_by_autocast:
            assert outputs[0].dtype == torch.float32
            assert_same_bits([*outputs, *gradients], results(self.function, call))
            return
        assert outputs[0].dtype == low
        lowered = call.map(lambda x: x.to(low).double())
        exact, exact_gradients = forward_and_gradients(self.reference, lowered, cotangents(outputs))
        assert_all_near(outputs, exact, FORWARD[low])
        assert_all_near(gradients, exact_gradients, BACKWARD[low])

    def test_autocast_leaves_float64_and_disabled_regions_alone(self, device):
        for dtype, enabled in ((DOUBLE, True), (torch.float32, False)):
            call = self.call("63", dtype, device)
            with torch.autocast(device, AUTOCAST_DTYPE[device], enabled=enabled):
                outputs = call.run(self.function)
            assert_same_bits(outputs, call.run(self.function))

    def test_autocast_under_compile(self, device, fresh_dynamo):
        call, low = self.call("63", torch.float32, device), AUTOCAST_DTYPE[device]

        def within_autocast(*args, **kwargs):
            with torch.autocast(device, low):
                return self.function(*args, **kwargs)

        compiled = torch.compile(within_autocast, fullgraph=True, backend="aot_eager")
        outputs, _ = assert_agree(compiled, within_autocast, call, dtype=low)
        assert [y.dtype for y in outputs] == [y.dtype for y in call.run(within_autocast)]

    # Sizes, strides, bad input

    def test_empty_inputs(self, empty, dtype, device):
        call = self.empty_samples[empty](Make(dtype, device))
        outputs, gradients = forward_and_gradients(self.function, call)
        exact = call.map(torch.Tensor.double).leaves()
        expected = exact.run(self.reference)
        # After an empty loop nothing depends on the weights, so the reference may lack gradients: zeros.
        used = [(y, g) for y, g in zip(expected, cotangents(outputs), strict=True) if y.requires_grad]
        expected_gradients = torch.autograd.grad(
            [y for y, _ in used], exact.tensors, [g.double() for _, g in used], materialize_grads=True
        )
        assert [y.dtype for y in outputs] == [y.dtype for y in call.run(self.reference)]
        assert_all_near(outputs, expected, FORWARD[dtype], "output")
        assert_all_near(gradients, expected_gradients, BACKWARD[dtype], "gradient of argument")

    def test_strides_do_not_change_the_values(self, case, layout, device):
        call = self.call(case, DOUBLE, device).map(self.layouts[layout])
        assert_agree(self.function, self.function, call, call.map(packed))

    def test_strides_of_one_argument_alone(self, layout, small_call):
        tensors = small_call.tensors
        for i in range(len(tensors)):
            changed = [self.layouts[layout](x) if i == j else x for j, x in enumerate(tensors)]
            call = small_call.with_tensors(changed)
            assert_agree(self.function, self.function, call, call.map(packed), what=f"argument {i}:")

    def test_strides_of_incoming_gradients(self, layout, dtype, device):
        call = self.call(self.small, dtype, device)
        grad_outputs = [self.layouts[layout](g) for g in cotangents(call.run(self.function))]
        _, gradients = forward_and_gradients(self.function, call, grad_outputs)
        _, plain = forward_and_gradients(self.function, call, [packed(g) for g in grad_outputs])
        assert_all_near(gradients, plain, BACKWARD[dtype])

    def test_bad_input_is_named_and_the_next_call_is_right(self, bad, device):
        make_call, exception, pattern = self.bad_calls[bad]
        call = make_call(Make(device=device))
        with pytest.raises(exception, match=pattern):
            call.run(self.function)
        with pytest.raises(exception, match=pattern):
            call.map(lambda x: x.requires_grad_() if x.is_floating_point() else x).run(self.function)
        good = self.call("63", torch.float32, device)
        assert_all_near(good.run(self.function), good.run(self.reference), FORWARD[torch.float32])

    def test_an_edit_before_backward_is_noticed(self, small_call):
        call = small_call.leaves().map(lambda x: x * 1)
        outputs = call.run(self.function)
        edited = outputs[0] if self.saved == "output" else call.tensors[self.saved]
        loss = sum_of_squares([y.clone() for y in outputs])
        with torch.no_grad():
            edited.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    # On a GPU

    @needs_cuda
    def test_cpu_and_cuda_agree(self, case, dtype):
        call = self.call(case, dtype)
        outputs, gradients = forward_and_gradients(self.function, call)
        on_cuda, grad_outputs = call.map(torch.Tensor.cuda), [g.cuda() for g in cotangents(outputs)]
        cuda_outputs, cuda_gradients = forward_and_gradients(self.function, on_cuda, grad_outputs)
        assert_all_near(cuda_outputs, outputs, 2 * FORWARD[dtype], "output")
        assert_all_near(cuda_gradients, gradients, 2 * BACKWARD[dtype], "gradient")

    @needs_cuda
    def test_runs_on_the_current_stream(self):
        values = self.call("500", DOUBLE, "cuda")
        expected, expected_gradients = forward_and_gradients(self.function, values)
        late = values.map(torch.zeros_like)
        grad_outputs = cotangents(expected)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(200_000_000)  # about 0.1 s, in which another stream would read the zeros
            for x, value in zip(late.tensors, values.tensors, strict=True):
                x.copy_(value)
            outputs, gradients = forward_and_gradients(self.function, late, grad_outputs)
            assert not torch.cuda.current_stream().query(), "the call waited for the GPU"
        torch.cuda.synchronize()
        assert_same_bits([*outputs, *gradients], [*expected, *expected_gradients])

    @needs_cuda
    def test_a_captured_graph_replays_on_new_values(self):
        static = self.call("63", torch.float32, "cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                results = forward_and_gradients(self.function, static)
            grad_outputs = cotangents(results[0])
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs, gradients = forward_and_gradients(self.function, static, grad_outputs)
        for seed in (1, 2):
            new = self.call("63", torch.float32, "cuda", seed)
            for x, value in zip(static.tensors, new.tensors, strict=True):
                x.copy_(value)
            graph.replay()
            expected, expected_gradients = forward_and_gradients(self.function, new, grad_outputs)
            assert_all_near(outputs, expected, FORWARD[torch.float32])
            assert_all_near(gradients, expected_gradients, BACKWARD[torch.float32])

    @needs_two_gpus
    def test_runs_on_a_device_that_is_not_current(self, dtype):
        torch.cuda.set_device(0)
        call = self.call("63", dtype, "cuda:1")
        outputs, gradients = forward_and_gradients(self.function, call)
        assert torch.cuda.current_device() == 0
        assert all(x.device == torch.device("cuda:1") for x in outputs + gradients)
        at_home, grad_outputs = (
            call.map(lambda x: x.to("cuda:0")),
            [g.to("cuda:0") for g in cotangents(outputs)],
        )
        expected, expected_gradients = forward_and_gradients(self.function, at_home, grad_outputs)
        assert_all_near(outputs, expected, FORWARD[dtype])
        assert_all_near(gradients, expected_gradients, BACKWARD[dtype])


class SmoothSuite(OpSuite):
    """For an op whose gradient is its derivative: finite differences must agree, to the second order."""

    @pytest.mark.parametrize("way", ["function", "apply"])
    def test_gradcheck(self, way, small_call):
        call = small_call.leaves()
        function = call.bind(getattr(self, way))
        assert torch.autograd.gradcheck(function, call.tensors, nondet_tol=0)
        assert torch.autograd.gradgradcheck(function, call.tensors)

    @pytest.mark.parametrize("way", ["function", "apply"])
    def test_third_derivative(self, way, small_call):
        def third(function):
            leaves = small_call.leaves()
            gradients = leaves.run(function)
            for _ in range(3):
                how = {"create_graph": True, "materialize_grads": True}
                gradients = torch.autograd.grad(sum_of_squares(gradients), leaves.tensors, **how)
            return gradients

        assert_all_near(third(getattr(self, way)), third(self.reference), 100 * BACKWARD[DOUBLE])


SIZES = (0.0, 0.5, 1.5, 2.5, 1e-30, 88.8, 1e4, torch.inf)
SPECIAL = [*SIZES, *(-x for x in SIZES), torch.nan]


def expected_by(op, calls):
    """Bad calls, by their exception and by what the message says that the op expected."""
    return {
        expectation: (make_call, exception, f"^{op}: expected {expectation}")
        for exception, table in calls.items()
        for expectation, make_call in table.items()
    }


def elementwise_bad_calls(op, types=FLOATING):
    type_errors = {
        "input to be a Tensor, got NoneType": lambda make: Call(None),
        "input to be a Tensor, got list": lambda make: Call([1.0]),
        f"input of dtype {types}, got int64": lambda make: Call(make(3).long()),
        f"input of dtype {types}, got complex32": lambda make: Call(make(3).to(torch.complex32)),
    }
    sparse = {"input of layout torch.strided, got Sparse": lambda make: Call(make(3).to_sparse())}
    return expected_by(op, {TypeError: type_errors, RuntimeError: sparse})


class ElementwiseSuite(OpSuite):
    samples = {
        "small": lambda make: Call(make(2, 3)),
        "scalar": lambda make: Call(make()),
        "1": lambda make: Call(make(1)),
        "63": lambda make: Call(make(63, 3, scale=3)),
        "500": lambda make: Call(make(500, 37, scale=3)),
        "4-D": lambda make: Call(make(2, 3, 5, 7, scale=3)),
        "two threads": lambda make: Call(make(100_003, scale=3)),
    }
    empty_samples = {
        "no elements": lambda make: Call(make(0)),
        "no rows": lambda make: Call(make(0, 5)),
        "no columns": lambda make: Call(make(5, 0, 2)),
    }
    saved = "output"
    saved_tensors = 1  # how many the backward needs

    def test_special_values_are_those_of_the_reference(self, dtype, device):
        x = torch.tensor(SPECIAL, dtype=DOUBLE).to(dtype).to(device)
        functions = (self.function, self.reference)
        found, expected = ([f(x), *forward_and_gradients(f, Call(x))[1]] for f in functions)
        torch.testing.assert_close(found, expected, equal_nan=True)

    def test_a_nan_changes_no_neighbour(self, dtype, device):
        for i in range(20):
            x = Make(dtype, device)(40, scale=2)
            x[i] = torch.nan
            torch.testing.assert_close(self.function(x), self.reference(x), equal_nan=True)

    def test_every_length_and_offset(self, dtype, device):
        """Heads and tails of vectors: each piece has the same bits as in the whole."""
        x, grad_output = Make(dtype, device)(64, scale=3), Make(dtype, device, seed=1)(64)
        whole = results(self.function, Call(x), [grad_output])
        assert_near(whole[0], self.reference(x.double()), FORWARD[dtype])
        for start in range(9):
            for end in range(start + 1, start + 40, 3):
                piece = results(self.function, Call(x[start:end]), [grad_output[start:end]])
                assert_same_bits(piece, [y[start:end] for y in whole])

    @pytest.mark.parametrize("order", ["transposed", "channels_last", "permuted"])
    def test_memory_format_is_kept(self, order, device):
        x = Make(DOUBLE, device)(2, 3, 5, 7)
        x = {
            "transposed": transposed(x),
            "channels_last": x.contiguous(memory_format=torch.channels_last),
            "permuted": x.permute(3, 1, 0, 2),
        }[order]
        outputs, _ = assert_agree(self.function, self.reference, Call(x), Call(packed(x)))
        assert outputs[0].stride() == x.stride()

    @EXAMPLES
    @hypothesis.given(data=st.data())
    def test_any_shape_and_strides(self, data, device):
        shape = data.draw(st.lists(st.integers(0, 9), max_size=4), label="shape")
        order = data.draw(st.permutations(range(len(shape))), label="order")
        cuts = [(data.draw(st.integers(0, 2)), data.draw(st.integers(1, 3))) for _ in shape]
        dtype = data.draw(st.sampled_from(list(FORWARD)), label="dtype")
        whole = [start + n * step for n, (start, step) in zip(shape, cuts, strict=True)]
        x = Make(dtype, device)(*whole, scale=3)
        x = x[tuple(slice(start, None, step) for start, step in cuts)].permute(order)
        assert list(x.shape) == [shape[i] for i in order]
        found = results(self.function, Call(x))
        assert_same_bits(found, results(self.function, Call(packed(x))))
        assert_near(found[0], self.reference(x.double()), FORWARD[dtype])

    def test_backward_saves_the_least_that_serves(self, device):
        x = Make(DOUBLE, device)(5).requires_grad_()
        assert len(tensors_saved_by(lambda: self.function(x))) == self.saved_tensors


class FormsSuite:
    """For elementwise ops with an in-place form, `in_place`, and out=."""

    function = None
    in_place = None

    def test_in_place_gives_the_same_bits(self, case, layout, dtype, device):
        if layout == "expanded":
            pytest.skip("elements that share memory are refused, see below")
        call = self.call(case, dtype, device).map(self.layouts[layout])
        expected = call.run(self.function)
        (x,) = call.tensors
        where = (x.data_ptr(), x.stride())
        assert self.in_place(*call.args, **call.kwargs) is x
        assert (x.data_ptr(), x.stride()) == where
        assert_same_bits([x], expected)

    def test_in_place_changes_no_neighbours(self, device):
        """Heads and tails of vectors: the elements before and behind do not change."""
        for start in range(9):
            for end in range(start, start + 40, 3):
                x = Make(torch.float16, device)(64, scale=3)
                expected = x.clone()
                expected[start:end] = self.function(x[start:end])
                self.in_place(x[start:end])
                assert_same_bits([x], [expected])

    def test_in_place_has_the_same_gradient(self, case, dtype, device):
        call = self.call(case, dtype, device)
        of_a_copy = results(lambda x, *args, **kwargs: self.in_place(x * 1, *args, **kwargs), call)
        assert_same_bits(of_a_copy, results(self.function, call))

    def test_in_place_compiles(self, call_of_63, fresh_dynamo):
        compiled = torch.compile(lambda x: self.in_place(x * 1) * 1, fullgraph=True, backend="aot_eager")
        assert_same_bits(results(compiled, call_of_63), results(self.function, call_of_63))

    def test_in_place_takes_no_leaf_that_requires_a_gradient(self, call_of_63):
        call = call_of_63.leaves()
        before = call.tensors[0].detach().clone()
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            self.in_place(*call.args, **call.kwargs)
        assert_same_bits([call.tensors[0].detach()], [before])

    def test_in_place_is_noticed_by_a_backward_that_needs_what_was_there(self, call_of_63):
        call = call_of_63.leaves().map(lambda x: x * 1)
        (x,) = call.tensors
        needs_x = x * x
        self.in_place(*call.args, **call.kwargs)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            needs_x.sum().backward()

    def test_in_place_refuses_elements_that_share_memory(self, device):
        x = Make(device=device)(1, 3).expand(4, 3)
        with pytest.raises(RuntimeError, match=f"{self.op}: expected input with memory for each"):
            self.in_place(x)

    @pytest.mark.skipif(_portable.in_use, reason="the stable ABI does not tell an inference tensor")
    def test_an_inference_tensor_is_written_only_in_inference_mode(self, device):
        with torch.inference_mode():
            call = self.call("63", DOUBLE, device).map(torch.clone)
            (out,) = call.run(self.function)
            self.function(*call.args, **call.kwargs, out=out)
            self.in_place(*call.args, **call.kwargs)
        with pytest.raises(RuntimeError, match="expected input not to be an inference tensor"):
            self.in_place(*call.args, **call.kwargs)
        with pytest.raises(RuntimeError, match="expected out not to be an inference tensor"):
            self.function(*call.args, **call.kwargs, out=out)

    @pytest.mark.parametrize("layout", ["contiguous", "transposed", "stepped", "misaligned"])
    def test_out_is_written(self, layout, dtype, device):
        call = self.call("4-D", dtype, device)
        (expected,) = call.run(self.function)
        out = torch.full_like(expected, 7)
        out = out if layout == "contiguous" else self.layouts[layout](out)
        where = (out.data_ptr(), out.stride())
        assert self.function(*call.args, **call.kwargs, out=out) is out
        assert (out.data_ptr(), out.stride()) == where
        assert_same_bits([out], [expected])

    def test_out_is_resized_and_may_be_the_input(self, call_of_63):
        expected = call_of_63.run(self.function)
        for out in (call_of_63.tensors[0].new_empty(0), call_of_63.tensors[0]):
            self.function(*call_of_63.args, **call_of_63.kwargs, out=out)
            assert_same_bits([out], expected)

    def test_out_compiles(self, call_of_63, fresh_dynamo):
        def with_out(x):
            out = torch.empty_like(x)
            self.function(x, out=out)
            return out * 1

        compiled = torch.compile(with_out, fullgraph=True, backend="aot_eager")
        assert_same_bits(call_of_63.run(compiled), call_of_63.run(self.function))

    def test_out_is_refused_where_it_does_not_fit(self, device):
        x = Make(device=device)(6)
        for out, exception, message in (
            (x.double(), TypeError, f"^{self.op}: expected out of dtype float32, got float64"),
            ([1.0], TypeError, f"^{self.op}: expected out to be a Tensor, got list"),
            (x.to("meta"), RuntimeError, f"^{self.op}: expected out on {device}"),
        ):
            with pytest.raises(exception, match=message):
                self.function(x, out=out)
        with pytest.raises(RuntimeError, match=f"^{self.op}: expected out to share all"):
            self.function(x[:4], out=x[2:])
        for wanting in ((x.clone().requires_grad_(), x), (x, x.clone().requires_grad_())):
            with pytest.raises(RuntimeError, match=f"^{self.op}: with out= there is no gradient"):
                self.function(wanting[0], out=wanting[1])


class RawBindingSuite:
    """For ops with bindings of contiguous tensors, lltm_ext._C.<op>."""

    op: str
    function = None
    bindings = None
    tensors_of_bindings = {"forward": ["input"], "backward": ["grad_output", "output"]}

    def test_raw_bindings_refuse_what_check_input_names(self, device):
        good = Make(device=device)(3, 5)
        for value, exception, pattern in unfit_for_bindings(good):
            for binding, names in self.tensors_of_bindings.items():
                for name in names:
                    arguments = dict.fromkeys(names, good) | {name: value}
                    with pytest.raises(exception, match=f"^{self.op}.{binding}: expected {name} {pattern}"):
                        getattr(self.bindings, binding)(*arguments.values())
        assert_same_bits([self.bindings.forward(good)], [self.function(good)])

    def test_raw_bindings_refuse_what_is_no_tensor(self):
        for binding, names in self.tensors_of_bindings.items():
            good = [torch.zeros(3)] * (len(names) - 1)
            for arguments in ((), (*good, None), (*good, "tensor")):
                with pytest.raises(TypeError, match=rf"{binding}\(\): incompatible function arguments"):
                    getattr(self.bindings, binding)(*arguments)


class RawBackwardSuite(RawBindingSuite):
    """For ops whose binding `backward(grad_output, output)` needs the output."""

    def test_raw_bindings_compute_forward_and_backward(self, dtype, device):
        make = Make(dtype, device)
        x, grad_output = make(63, 5), make(63, 5)
        outputs, gradients = forward_and_gradients(self.function, Call(x), [grad_output])
        output = self.bindings.forward(x)
        assert_same_bits([output], outputs)
        assert_same_bits([self.bindings.backward(grad_output, output)], gradients)
        assert_same_bits([self.bindings.backward(output=output, grad_output=grad_output)], gradients)

    def test_raw_backward_refuses_tensors_that_do_not_belong_together(self, device):
        x = Make(device=device)(3, 5)
        for grad_output, exception, message in (
            (x[:, :4].contiguous(), RuntimeError, r"of shape .*\[3, 5\], got \[3, 4\]"),
            (x.double(), TypeError, "of dtype float32, got float64"),
        ):
            with pytest.raises(exception, match=rf"^{self.op}.*: expected grad_output {message}"):
                self.bindings.backward(grad_output, x)

    @pytest.mark.parametrize("requires_grad", [False, True])
    def test_the_backward_op_does_not_broadcast(self, requires_grad, device):
        output, grad_output = Make(device=device)(3).requires_grad_(requires_grad), Make(device=device)(1)
        with pytest.raises(RuntimeError, match=rf"^{self.op}_backward: expected grad_output of shape"):
            getattr(torch.ops.lltm_ext, f"{self.op}_backward")(grad_output, output)

    @needs_cuda
    def test_raw_backward_refuses_two_devices(self):
        x = Make()(3, 5)
        with pytest.raises(RuntimeError, match=f"^{self.op}.*: expected grad_output on cuda:0, got cpu"):
            self.bindings.backward(x, x.cuda())


class ModuleSuite:
    """nn.Modules. `modules`: name -> (function of device= and dtype= giving a module, make -> Call)."""

    modules = {}

    def module_and_call(self, module, dtype=torch.float32, device="cpu"):
        build, make_call = self.modules[module]
        torch.manual_seed(0)
        return build(device=device, dtype=dtype), make_call(Make(dtype, device))

    def test_modules_take_device_and_dtype(self, module, dtype, device):
        built, call = self.module_and_call(module, dtype, device)
        for x in [*built.parameters(), *call.run(built)]:
            assert (x.dtype, x.device.type) == (dtype, device)

    def test_modules_deepcopy_and_pickle(self, module, device):
        built, call = self.module_and_call(module, device=device)
        expected = call.run(built)
        for copied in (copy.deepcopy(built), pickle.loads(pickle.dumps(built))):
            assert_same_bits(call.run(copied), expected)
            for ours, theirs in zip(copied.parameters(), built.parameters(), strict=True):
                assert ours.data_ptr() != theirs.data_ptr()

    def test_modules_save_and_load(self, module, device):
        built, call = self.module_and_call(module, device=device)
        file = io.BytesIO()
        torch.save(built.state_dict(), file)
        file.seek(0)
        build, _ = self.modules[module]
        other = build(device=device, dtype=torch.float32)
        other.load_state_dict(torch.load(file, weights_only=True))
        assert_same_bits(call.run(other), call.run(built))

    def test_modules_move_to_another_dtype(self, module, device):
        built, call = self.module_and_call(module, device=device)
        outputs = call.map(torch.Tensor.double).run(copy.deepcopy(built).double())
        assert all(y.dtype == DOUBLE for y in outputs)
        assert_all_near(call.run(built), outputs, FORWARD[torch.float32])

    def test_modules_print_themselves(self, module):
        built, _ = self.module_and_call(module)
        assert repr(built).startswith(type(built).__name__ + "(")

    def test_modules_compile_and_export(self, module, device, fresh_dynamo):
        built, call = self.module_and_call(module, DOUBLE, device)
        assert_agree(torch.compile(built, fullgraph=True, backend="aot_eager"), built, call)
        exported = torch.export.export(built, call.args, call.kwargs).module()
        assert_all_near(call.run(exported), call.run(built), FORWARD[DOUBLE])

    def test_modules_gradients_reach_every_parameter(self, module, device):
        built, call = self.module_and_call(module, DOUBLE, device)
        leaves = call.leaves()
        loss = sum_of_squares(leaves.run(built))
        for gradient in torch.autograd.grad(loss, [*built.parameters(), *leaves.tensors]):
            assert gradient.isfinite().all()
            assert gradient.norm() > 0


@contextlib.contextmanager
def unfilled_memory():
    """New memory is not filled, even with deterministic algorithms."""
    settings = torch.utils.deterministic
    before, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = before


def kernels_of(functions):
    """The names of the kernels that each function has run, by torch's profiler."""
    torch.cuda.synchronize()
    activities = list(torch.profiler.supported_activities())
    with unfilled_memory(), torch.profiler.profile(activities=activities) as profiler:
        for f in functions:
            f()
            torch.cuda._sleep(1)  # a kernel to tell where one ends
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    found = [[]]
    for event in sorted(events, key=lambda e: e.time_range.start):
        if "spin_kernel" in event.name:
            found.append([])
        else:
            found[-1].append(event.name)
    assert found.pop() == []
    return found
