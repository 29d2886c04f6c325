"""The ops as the dispatcher sees them: registered by each module, complete, as they are declared."""

import importlib.util
import re
from pathlib import Path
from types import FunctionType

import forks
import pytest
import torch
from op_suite import BACKWARD, DOUBLE, Make, assert_near
from sequence_suite import Recorder

import lltm_ext
from lltm_ext import _C, _portable
from lltm_ext._activations import ACTIVATIONS
from lltm_ext._unary import UNARY_OPS

MODULES = sorted(stub.stem for stub in Path(_portable.PACKAGE, "_C").glob("*.pyi"))
OPS = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("lltm_ext::"))
# Functions that are no ops: spike consists of torch's.
OTHERS = {"recurrence", "from_torch", "to_torch", "slstm_from_xlstm", "spike"}
FUNCTIONS = [name for name in lltm_ext.__all__ if isinstance(getattr(lltm_ext, name), FunctionType)]
STUBS = Path(__file__).parent.parent / "tools/stubs.py"


# A file by itself, with neither our Python package nor the other modules.
LOAD = """
import os, sys, torch
module = os.path.basename(sys.argv[1]).partition(".")[0]
torch.ops.load_library(sys.argv[1])
assert "lltm_ext" not in sys.modules
x = torch.ones(2, 2, requires_grad=True)
arguments = {
    "fake_quantize": (x, x[0, 0], torch.tensor(0), -8, 7),
    "gemm": (x, x),
    "scan": (x, x),
    "stochastic_round": (x, torch.bfloat16),
}.get(module, (x,))
getattr(torch.ops.lltm_ext, module)(*arguments).sum().backward()
print(module, x.grad.isfinite().all().item())
"""


@pytest.mark.skipif(_portable.in_use, reason="the portable library is one for all ops")
def test_a_built_module_registers_its_ops_by_itself(tmp_path):
    # Not those that run on CUDA only, and those whose kernels custom_cell calls.
    alone = [module for module in MODULES if module not in ("custom_cell", "elementwise", "lltm", "lstm")]
    for module in alone:
        result = forks.run("-c", LOAD, getattr(_C, module).__file__, cwd=tmp_path)
        assert result.stdout == f"{module} True\n", result.stderr


@pytest.mark.skipif(_portable.in_use, reason="the portable library has its autograd in Python")
def test_without_the_package_a_second_derivative_is_an_error(tmp_path):
    code = f"""
import torch
torch.ops.load_library({_C.sigmoid.__file__!r})
torch.ops.load_library({_C.fake_quantize.__file__!r})
x = torch.ones(2, requires_grad=True)
zero_point = torch.tensor(0)
for y in (torch.ops.lltm_ext.sigmoid(x), torch.ops.lltm_ext.fake_quantize(x, x[:1], zero_point, -8, 7)):
    try:
        torch.autograd.grad(y.sum(), x, create_graph=True)
    except RuntimeError as error:
        print(error)
"""
    result = forks.run("-c", code, cwd=tmp_path)
    expected = (
        "{}: expected the Python package for a gradient that can be differentiated again (create_graph), "
        "got none. In Python: import lltm_ext"
    )
    ops = ("sigmoid_backward", "fake_quantize_backward")
    assert result.stdout.splitlines() == [expected.format(op) for op in ops], result.stderr


def test_every_public_function_has_its_op():
    assert {f"lltm_ext::{name}" for name in FUNCTIONS if name not in OTHERS} <= set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_ops_serve_every_backend_and_torch_compile(op):
    for key in ("CPU", "CUDA", "Meta"):
        assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(op, key)
    if _portable.in_use:  # the stable ABI has no tags
        return
    namespace, name = op.split("::")
    assert torch.Tag.pt2_compliant_tag in getattr(getattr(torch.ops, namespace), name).default.tags


@pytest.mark.skipif(_portable.in_use or not STUBS.is_file(), reason="of native modules and a checkout")
@pytest.mark.parametrize("module", MODULES)
def test_the_stub_has_the_signatures_of_the_module(module):
    spec = importlib.util.spec_from_file_location("stubs", STUBS)
    stubs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stubs)
    built = getattr(_C, module)
    assert stubs.same((STUBS.parent.parent / f"lltm_ext/_C/{module}.pyi").read_text(), stubs.text(built))


@pytest.mark.parametrize("name", UNARY_OPS)
def test_an_elementwise_op_is_one_op_forward_and_at_most_one_backward(name):
    x, grad_output = torch.randn(5, requires_grad=True), torch.ones(5)
    with Recorder() as recorder:
        torch.autograd.grad(getattr(lltm_ext, name)(x), x, grad_output)
    # To save a tensor is to detach it, which computes nothing.
    found = [op for op in recorder.names if op != "aten.detach"]
    op = UNARY_OPS[name]
    has_backward = op.gradient is not None and not op.saves_input  # binarize: the identity, unless asked
    assert found == [f"lltm_ext.{name}", f"lltm_ext.{name}_backward"][: 1 + has_backward]


@pytest.mark.parametrize("name", UNARY_OPS)
def test_an_inference_call_is_one_op(name):
    x = torch.randn(5, requires_grad=True)
    with torch.no_grad(), Recorder() as recorder:
        getattr(lltm_ext, name)(x)
    assert recorder.names == [f"lltm_ext.{name}"]


@pytest.mark.parametrize("name", [name for name, op in UNARY_OPS.items() if op.gradient])
def test_the_declared_gradient_is_the_backward_op(name):
    make, op, backward = Make(DOUBLE), UNARY_OPS[name], getattr(torch.ops.lltm_ext, f"{name}_backward")
    grad_output, x = make(63), make(63)
    rules = [(op.reference(x),)]
    if op.saves_input:
        rules = [(x, 0.1, -1.0, 1.5, grad) for grad in ("identity", "clipped", "tanh")]
    for saved in rules:
        assert_near(op.gradient(grad_output, *saved), backward(grad_output, *saved), BACKWARD[DOUBLE])


def test_gemm_takes_the_activations_that_python_knows():
    a = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"^gemm: expected activation None") as raised:
        torch.ops.lltm_ext.gemm(a, a, activation="none of them")
    listed = re.findall(r"'(\w+)'", str(raised.value).partition(", got")[0])
    assert sorted(listed) == sorted(ACTIVATIONS)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_gradient_of_an_activation_is_gemms(name):
    activation = ACTIVATIONS[name]
    grad_output, x = Make(DOUBLE)(63), Make(DOUBLE, seed=1)(63, scale=2).requires_grad_()
    y = activation.reference(x)
    (expected,) = torch.autograd.grad(y, x, grad_output)
    saved = (x if activation.saves_input else y).detach()
    assert_near(activation.gradient(grad_output, saved), expected, BACKWARD[DOUBLE])
    found = torch.ops.lltm_ext.gemm_activation_backward(grad_output, saved, name)
    assert_near(found, expected, BACKWARD[DOUBLE])


def test_a_sequence_is_one_op_whatever_its_length():
    """The loop over the steps runs in C++, forward and backward."""
    counts = []
    for length in (2, 50):
        make = Make()
        arguments = [make(length, 4, 3), make(4, 5), make(4, 5), make(15, 3), make(15, 5), make(15)]
        arguments = [x.requires_grad_() for x in arguments]
        with Recorder() as recorder:
            input, h0, c0, *weights = arguments
            output, _ = lltm_ext.lltm(input, (h0, c0), *weights)
            torch.autograd.grad(output, arguments, torch.ones_like(output))
        assert recorder.ours == ["custom_cell_forward", "custom_cell_backward"]
        counts.append(len(recorder.names))
    assert counts[0] == counts[1]


def test_both_directions_of_a_layer_are_one_op():
    layer = lltm_ext.LLTM(3, 5, num_layers=2, bidirectional=True)
    with Recorder() as recorder:
        layer(Make()(6, 4, 3))[0].sum().backward()
    ways = ("forward", "forward", "backward", "backward")
    assert recorder.ours == [f"custom_cell_bidirectional_{way}" for way in ways]
    with torch.no_grad(), Recorder() as recorder:
        layer(Make()(6, 4, 3))
    assert recorder.ours == ["custom_cell_bidirectional"] * 2


def test_the_cell_runs_its_own_backward():
    make = Make()
    arguments = [x.requires_grad_() for x in (make(4, 3), make(15, 8), make(15), make(4, 5), make(4, 5))]
    with Recorder() as recorder:
        new_h, _ = lltm_ext.lltm_cell(*arguments)
        torch.autograd.grad(new_h, arguments, torch.ones_like(new_h))
    assert recorder.ours == ["lltm_cell_forward", "lltm_cell_backward"]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_operand_that_is_none_is_named(requires_grad):
    a = torch.ones(3, 3, requires_grad=requires_grad)
    for op, arguments, name in (
        (torch.ops.lltm_ext.gemm, (a, None), "gemm: expected b"),
        (torch.ops.lltm_ext.lltm_cell, (a, None, None, a, a), "lltm_cell: expected weights"),
        (torch.ops.lltm_ext.lltm, (a[None], a, a, None, a), "lltm: expected weight_ih"),
    ):
        with pytest.raises(TypeError, match=f"^{name} to be a Tensor, got None"):
            op(*arguments)


def test_the_backward_of_a_cell_names_what_does_not_fit():
    good = {
        "grad_h": None,
        "grad_cell": None,
        "new_cell": torch.ones(4, 5),
        "gates": torch.ones(3, 4, 5),
        "input": torch.ones(4, 3),
        "weights": torch.ones(15, 8),
        "old_h": torch.ones(4, 5),
        "input_needs_grad": True,
        "old_h_needs_grad": True,
        "old_cell_needs_grad": True,
    }
    for changed, message in (
        ({"grad_cell": torch.ones(4, 6)}, "grad_cell of shape .*, got \\[4, 6\\]"),
        ({"grad_cell": torch.ones(4, 5).half()}, "grad_cell of dtype float32, got float16"),
        ({"grad_h": torch.ones(5)}, "grad_h of shape .*, got \\[5\\]"),
        ({"input": torch.ones(4)}, "input of shape .*, got \\[4\\]"),
        ({"old_h": torch.ones(4, 6)}, "old_h of shape .*, got \\[4, 6\\]"),
        ({"new_cell": torch.ones(4)}, "new_cell of shape .*, got \\[4\\]"),
    ):
        with pytest.raises((RuntimeError, TypeError), match=f"^lltm_cell_backward: expected {message}"):
            torch.ops.lltm_ext.lltm_cell_backward(**good | changed)
