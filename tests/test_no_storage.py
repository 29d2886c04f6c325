"""Tensors without memory of their own: wrappers, fake tensors, tensors of torch.func, freed storage.

Raw bindings, which bypass the dispatcher, refuse them. The dispatcher's ops compute what torch's own would,
or raise an error that names the op.
"""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.masked import masked_tensor

import lltm_ext
from lltm_ext import _portable

ops = torch.ops.lltm_ext
native = pytest.mark.skipif(_portable.in_use, reason="the portable library's raw bindings are dispatcher ops")


class Wrapper(torch.Tensor):
    """A subclass without memory, as DTensor is."""

    @staticmethod
    def __new__(cls, *shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"asked for {function}")


class Allocating(torch.Tensor):
    """A subclass with memory, whose results have none."""

    @staticmethod
    def __new__(cls, *shape):
        return torch.Tensor._make_subclass(cls, torch.ones(shape))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return Wrapper(3, 4)


def fake(*shape):
    with FakeTensorMode():
        return torch.ones(shape)


def freed(*shape):
    x = torch.ones(shape)
    x.untyped_storage().resize_(0)
    return x


WITHOUT_MEMORY = {
    "efficientzerotensor": lambda *shape: torch._efficientzerotensor(shape),
    "wrapper": Wrapper,
    "subclass": Allocating,
    "masked": lambda *shape: masked_tensor(torch.ones(shape), torch.ones(shape, dtype=torch.bool)),
    "fake": fake,
    "functional": lambda *shape: torch._to_functional_tensor(torch.ones(shape)),
    "freed": freed,
    "sparse": lambda *shape: torch.ones(shape).to_sparse(),
    "nested": lambda *shape: torch.nested.nested_tensor([torch.ones(shape[1:])] * shape[0]),
}
ONES = torch.ones(3, 4)
GRID = (torch.ones(1), torch.zeros(1), -8, 7)
RAW = {
    "sigmoid.forward": lambda raw, x: raw.sigmoid.forward(x(3, 4)),
    "sigmoid.backward grad": lambda raw, x: raw.sigmoid.backward(x(3, 4), ONES),
    "sigmoid.backward output": lambda raw, x: raw.sigmoid.backward(ONES, x(3, 4)),
    "relu.forward": lambda raw, x: raw.relu.forward(x(3, 4)),
    "relu.backward": lambda raw, x: raw.relu.backward(x(3, 4), x(3, 4)),
    "relu.backward of two": lambda raw, x: raw.relu.backward(x(2, 2), x(3, 4)),
    "round.forward": lambda raw, x: raw.round.forward(x(3, 4)),
    "round.backward": lambda raw, x: raw.round.backward(x(3, 4)),
    "round.binarize": lambda raw, x: raw.round.binarize(x(3, 4), 0.5),
    "stochastic_round.forward": lambda raw, x: raw.stochastic_round.forward(x(3, 4), torch.float16),
    "stochastic_round.backward": lambda raw, x: raw.stochastic_round.backward(x(3, 4)),
    "gemm.forward a": lambda raw, x: raw.gemm.forward(x(3, 4), torch.ones(4, 3)),
    "gemm.forward b": lambda raw, x: raw.gemm.forward(torch.ones(4, 3), x(3, 4)),
    "gemm.gemm c": lambda raw, x: raw.gemm.gemm(x(3, 4), torch.ones(3, 3), ONES),
    "gemm.backward": lambda raw, x: raw.gemm.backward(x(3, 4), torch.ones(3, 5), torch.ones(5, 4)),
    "fake_quantize.forward": lambda raw, x: raw.fake_quantize.forward(x(3, 4), *GRID),
    "fake_quantize scale": lambda raw, x: raw.fake_quantize.forward(ONES, x(4, 1)[:, 0], *GRID[1:], axis=1),
    "fake_quantize.backward": lambda raw, x: raw.fake_quantize.backward(
        x(3, 4), ops.fake_quantize_with_mask(ONES, *GRID)[1]
    ),
    "lltm.forward input": lambda raw, x: raw.lltm.forward(x(3, 4), torch.ones(12, 8), None, ONES, ONES),
    "lltm.forward weights": lambda raw, x: raw.lltm.forward(ONES, x(12, 8), None, ONES, ONES),
    "lltm.forward old_cell": lambda raw, x: raw.lltm.forward(ONES, torch.ones(12, 8), None, ONES, x(3, 4)),
}


@native
@pytest.mark.parametrize("call", RAW)
@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_raw_bindings_refuse_them(kind, call):
    if call == "fake_quantize scale" and kind not in ("fake", "efficientzerotensor"):
        pytest.skip("it has no views")
    op = call.split()[0].split(".")[0]
    with pytest.raises((RuntimeError, TypeError), match=rf"^{op}[\w.]*: expected \w+ "):
        RAW[call](lltm_ext._C, WITHOUT_MEMORY[kind])


@native
@pytest.mark.parametrize("call", [name for name in RAW if name != "round.backward"])
def test_raw_bindings_allocate_no_fake_results(call):
    op = call.split(".")[0].split()[0]
    if op == "lltm" or call == "stochastic_round.backward":
        pytest.skip("it computes in torch's ops")
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(Exception, match=r"memory|plain|Fake"):
        RAW[call](lltm_ext._C, lambda *shape: ONES if shape == (3, 4) else ONES.new_ones(shape))


@native
@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_raw_bindings_refuse_tensors_of_transforms(transform):
    with pytest.raises(TypeError, match=r"sigmoid.forward: expected input to be a plain Tensor"):
        transform(lltm_ext._C.sigmoid.forward)(torch.ones(3))


@pytest.mark.parametrize("name", ["sigmoid", "relu", "round", "binarize"])
def test_a_zero_tensor_is_a_tensor_of_zeros(name):
    function = getattr(lltm_ext, name)
    assert torch.equal(function(torch._efficientzerotensor(3, 4)), function(torch.zeros(3, 4)))


@pytest.mark.parametrize("name", ["sigmoid", "sigmoid_", "relu", "round_", "binarize"])
def test_subclasses_see_the_ops(name):
    with pytest.raises(NotImplementedError, match=f"asked for lltm_ext.{name}.default"):
        getattr(lltm_ext, name)(Wrapper(3, 4))


@pytest.mark.parametrize("name", ["sigmoid", "sigmoid_", "relu", "round", "binarize"])
def test_freed_storage_is_an_error_that_names_the_op(name):
    with pytest.raises(RuntimeError, match=f"{name.rstrip('_')}: expected input with memory"):
        getattr(lltm_ext, name)(freed(3, 4))


def test_freed_storage_of_other_arguments():
    with pytest.raises(RuntimeError, match="sigmoid: expected out with memory"):
        lltm_ext.sigmoid(ONES, out=freed(3, 4))
    with pytest.raises(RuntimeError, match="gemm: expected b with memory"):
        lltm_ext.gemm(ONES, freed(4, 3))
    state = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="lltm: expected weight_hh with memory"):
        lltm_ext.lltm(torch.ones(4, 2, 3), (state, state), torch.ones(9, 3), freed(9, 3))
