"""Ops made at run time: their text, compilation and cache, which need no GPU, and results on a GPU."""

import inspect
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forks
import pytest
import torch
from op_suite import (
    BACKWARD,
    DOUBLE,
    FLOATING,
    FORWARD,
    SPECIAL,
    Call,
    Make,
    Module,
    assert_agree,
    assert_all_near,
    assert_near,
    assert_same_bits,
    cotangents,
    expanded,
    forward_and_gradients,
    kernels_of,
    misaligned,
    needs_cuda,
    needs_two_gpus,
    negated_view,
    results,
    stepped,
    tensors_saved_by,
    transposed,
)
from torch._subclasses.fake_tensor import FakeTensorMode

import lltm_ext
from lltm_ext import _C, _portable
from lltm_ext._formula.text import LINE
from lltm_ext._install import build_record

BUILT_WITH_CUDA = torch.version.cuda is not None and build_record.read()["cuda"] is not None
needs_nvrtc = pytest.mark.skipif(not BUILT_WITH_CUDA, reason="needs a build with CUDA")
ELSEWHERE = Path(__file__).parent  # here a new process imports the installed package, not the sources


def softsign_reference(x, a=1.0):
    return x / (a + x.abs())


relu = lltm_ext.elementwise(
    "T relu(T x)",
    forward="return x <= 0 ? T(0) : x;",
    backward={"x": "return output <= 0 ? T(0) : grad;"},
)
softsign = lltm_ext.elementwise(
    "T softsign(T x, T a)",
    forward="return x / (a + fabs(x));",
    backward={"x": "T d = a + fabs(x); return grad * a / (d * d);"},
    scalars={"a": 1.0},
    cpu=softsign_reference,
)
# The gradient of x uses y, that of y uses the output.
blend = lltm_ext.elementwise(
    "T blend(T x, T y, T a, T b)",
    forward="return a * x * y + b * exp(y);",
    backward={"x": "return grad * a * y;", "y": "return grad * (output + a * x * (1 - y));"},
    scalars={"a": 2.0, "b": 0.5},
)


def blend_reference(x, y, a=2.0, b=0.5):
    return a * x * y + b * y.exp()


def op_of(body, **kwargs):
    return lltm_ext.elementwise("T f(T x)", body, **kwargs)


def compiled(op, dtype=torch.float32, architecture="sm_80", wanted=()):
    return _C.elementwise.compile(op.program, dtype, architecture, wanted)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("LLTM_EXT_CACHE", str(folder))
    return folder


def compilations(call):
    """How often the compiler runs in a call."""
    before = _C.elementwise.compilations()
    call()
    return _C.elementwise.compilations() - before


def compiled_anew(op):
    """The binary, for which the compiler runs once."""
    before = _C.elementwise.compilations()
    binary = compiled(op)
    assert _C.elementwise.compilations() == before + 1
    return binary


def run_python(*arguments, **options):
    """A new process, which imports the installed package and not the sources."""
    done = forks.run(*arguments, cwd=ELSEWHERE, **options)
    assert done.returncode == 0, done.stderr
    return done


# ---- The text of an op


@pytest.mark.parametrize(
    "signature",
    ["", "f(x)", "float f(T x)", "T f(float x)", "T f()", "T f(T)", "T f(T x) {", "T f(T x,)", "T 1f(T x)"],
)
def test_the_error_shows_a_signature_that_does_not_parse(signature):
    with pytest.raises(ValueError, match=f"like 'T f\\(T x, T a\\)', got {re.escape(repr(signature))}"):
        lltm_ext.elementwise(signature, "return x;")


@pytest.mark.parametrize(
    "signature, arguments, message",
    [
        ("T f(T x, T x)", {}, "expected parameters of different names"),
        *((f"T f(T {name})", {}, f"no parameter may be called {name}") for name in ("grad", "output", "in")),
        ("T f(T x)", {"scalars": {"a": 1}}, "the signature has no parameter 'a', which scalars names"),
        ("T f(T x)", {"backward": {"y": ""}}, "the signature has no tensor 'y', which backward names"),
        ("T f(T a)", {"scalars": {"a": 1}}, "expected 1 to 8 tensors, got 0"),
        (f"T f({', '.join(f'T x{i}' for i in range(9))})", {}, "expected 1 to 8 tensors, got 9"),
        (
            "T f(T x)",
            {"backward": {"x": "\x1f"}},
            r"expected backward of x to be C\+\+, .* control character",
        ),
    ],
)
def test_the_error_names_a_bad_name(signature, arguments, message):
    with pytest.raises(ValueError, match=f"^f: {message}"):
        lltm_ext.elementwise(signature, "return x;", **arguments)


def test_repr_name_signature_and_source_of_an_op():
    assert repr(softsign) == "<lltm_ext.elementwise T softsign(T x, T a=1), gradients: x>"
    assert repr(op_of("return x;")) == "<lltm_ext.elementwise T f(T x), gradients: none>"
    assert softsign.__name__ == "softsign"
    assert str(inspect.signature(blend)).startswith("(x, y, a=2.0, b=0.5)")
    assert "return x / (a + fabs(x));" in softsign.source
    assert "return grad * a / (d * d);" in softsign.source


def test_a_program_is_one_line_and_older_ones_with_lines_mean_the_same():
    """torch.compile writes it into a comment of its code. Exported files have the older form."""
    op = op_of("T y = x;\nreturn y;\r\n", backward={"x": "return\n  grad;"})
    assert len(op.program.splitlines()) == 1
    with_lines = op.program.replace(LINE, "\n")
    assert len(with_lines.splitlines()) == 4
    for wanted in ([], [0]):
        sources = [_C.elementwise.source(x, torch.float32, wanted) for x in (op.program, with_lines)]
        assert sources[0] == sources[1]


def test_a_pickled_op_computes_the_same():
    again = pickle.loads(pickle.dumps(softsign))
    x = Make()(5)
    assert_same_bits([again(x, a=3)], [softsign(x, a=3)])


def test_only_tensors_that_the_backward_names_are_saved():
    op = lltm_ext.elementwise(
        "T f(T x, T y)", "return x;", backward={"x": "return grad; // not y\n", "y": "/* x */ return output;"}
    )
    assert op.uses == {"x": (), "y": ("output",)}
    x = meta(5, requires_grad=True)
    assert [len(tensors_saved_by(lambda op=op: op(x))) for op in (relu, softsign)] == [1, 1]


def test_a_bad_program_is_refused():
    for tensors, scalars, program, message in (
        (1, [], "", "elementwise: expected a program .*, got [01] fields"),
        (1, [], "f", "elementwise: expected a program .*, got 1 fields"),
        (1, [], "f\x1fx\x1f\x1freturn x;\x1fx", "elementwise: expected a program .*, got 5 fields"),
        (1, [], "\x1fx\x1f\x1freturn x;", "elementwise: expected the op's name, got ''"),
        (1, [], "f\x1f1\x1f\x1freturn x;", "f: expected a parameter's name, got '1'"),
        (2, [1.0], softsign.program, "softsign: expected 1 tensors, got 2"),
        (1, [], softsign.program, "softsign: expected 1 scalars, got 0"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            torch.ops.lltm_ext.elementwise([meta(3)] * tensors, scalars, program)


@pytest.mark.skipif(_portable.in_use, reason="the portable library is one for all ops")
def test_the_native_module_runs_a_program_without_the_python_package():
    """As in a C++ program that loads an exported one."""
    code = """
import sys, torch
torch.ops.load_library(sys.argv[1])
x = torch.empty(3, 4, device="meta", requires_grad=True)
torch.ops.lltm_ext.elementwise([x, x[0]], [2.0, 0.5], sys.argv[2]).sum().backward()
assert "lltm_ext" not in sys.modules and x.grad.shape == x.shape
"""
    run_python("-c", code, _C.elementwise.__file__, blend.program)


# ---- Compilation, which needs no GPU


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_a_binary_has_four_kernels(architecture, dtype, cache):
    backwards = [(blend, "blend_backward", (0,)), (blend, "blend_backward", (0, 1))]
    for op, name, wanted in [(blend, "blend", ()), *backwards, (relu, "relu", ())]:
        binary = compiled(op, dtype, architecture, wanted)
        assert binary.startswith(b"\x7fELF")
        for form in ("flat", "scalar", "strided", "strided64"):
            assert f".text.lltm_ext_{name}_{form}\0".encode() in binary


@needs_nvrtc
def test_names_in_a_formula_do_not_collide_with_ours(cache):
    op = lltm_ext.elementwise(
        "T exp(T scalars, T v0, T f, T n0, T s0)",
        "T head = f, n = n0; return scalars * v0 + head + n * s0;",
        backward={"n0": "return grad * s0;"},
        scalars={"s0": 1},
    )
    compiled(op)
    compiled(op, wanted=(3,))


@needs_nvrtc
@pytest.mark.parametrize(
    "body, where, what",
    [
        ("return y;", "forward(1)", 'identifier "y" is undefined'),
        ("\n  T y = x;\n  return y + z;\n", "forward(3)", 'identifier "z" is undefined'),
        ("T y = x;\ny = 2;", "forward(3)", "missing return statement"),
        ("return;", "forward(1)", "should return a value"),
        ("return x", "forward(2)", 'expected a ";"'),
    ],
)
def test_a_compile_error_shows_the_line_of_the_forward(body, where, what, cache):
    with pytest.raises(RuntimeError) as error:
        compiled(op_of(body))
    message = str(error.value)
    assert message.startswith("f does not compile:\n")
    assert f"{where}: error: " in message
    assert what in message


@needs_nvrtc
def test_a_compile_error_shows_the_signature_and_the_line_of_the_backward(cache):
    backward = {"x": "return grad;", "y": "\nreturn g;"}
    op = lltm_ext.elementwise("T f(T x, T y)", "return x;", backward=backward)
    compiled(op)
    compiled(op, wanted=(0,))
    message = r"^f: backward of y does not compile:\nbackward of y\(2\): error: "
    with pytest.raises(RuntimeError, match=message):
        compiled(op, wanted=(1,))
    with pytest.raises(RuntimeError, match="signature\\(1\\): error"):
        compiled(lltm_ext.elementwise("T f(T int)", "return 1;"))


@pytest.mark.skipif(build_record.read()["cuda"] is not None, reason="for a build without CUDA")
def test_a_build_without_cuda_says_so():
    with pytest.raises(RuntimeError, match="built without CUDA"):
        compiled(relu)


# ---- The cache


@needs_nvrtc
def test_a_second_compilation_is_read_from_disk(cache):
    binary = compiled_anew(softsign)
    assert compilations(lambda: compiled(softsign)) == 0
    assert compiled(softsign) == binary
    assert len(list(cache.iterdir())) == 1
    assert cache.stat().st_mode & 0o777 == 0o700


@needs_nvrtc
def test_each_source_dtype_architecture_and_gradient_has_its_entry(cache):
    for _ in range(2):
        for op in (softsign, op_of("return x;"), op_of("return x ;")):
            compiled(op)
        for changed in ({"dtype": torch.float16}, {"architecture": "sm_90"}, {"wanted": (0,)}):
            compiled(softsign, **changed)
    assert len(list(cache.iterdir())) == 6


DAMAGE = {
    "empty": lambda text: b"",
    "cut": lambda text: text[:-1],
    "a byte changed": lambda text: text[:-100] + bytes([text[-100] ^ 1]) + text[-99:],
    "longer": lambda text: text + b"\0",
    "only the key": lambda text: text[:40],
}


@needs_nvrtc
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_entry_is_compiled_again(kind, cache):
    binary = compiled(relu)
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(DAMAGE[kind](whole))
    assert compiled_anew(relu) == binary
    assert entry.read_bytes() == whole
    assert compilations(lambda: compiled(relu)) == 0


@needs_nvrtc
def test_an_entry_under_another_key_is_not_used(cache):
    """A valid entry under the wrong name, as after a hash collision or a copied file."""
    compiled(softsign)
    (other,) = cache.iterdir()
    foreign = other.read_bytes()
    other.unlink()
    binary = compiled(relu)
    (entry,) = cache.iterdir()
    entry.write_bytes(foreign)
    assert compiled_anew(relu) == binary


@needs_nvrtc
def test_an_entry_that_is_a_link_or_folder_is_not_followed(cache, tmp_path):
    compiled(relu)
    (entry,) = cache.iterdir()
    elsewhere = tmp_path / "elsewhere"
    entry.rename(elsewhere)
    entry.symlink_to(elsewhere)
    compiled_anew(relu)
    assert not entry.is_symlink() and elsewhere.exists()
    entry.unlink()
    entry.mkdir()
    compiled_anew(relu)


COMPILE_TWICE = """
import warnings, torch, lltm_ext
from lltm_ext import _C
op = lltm_ext.elementwise('T f(T x)', 'return x;')
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    for _ in range(2): _C.elementwise.compile(op.program, torch.float32, 'sm_80')
assert _C.elementwise.compilations() == 2
print('\\n'.join(str(w.message) for w in caught))
"""


def assert_not_cached(reason, folder, before=""):
    """A new process that compiles twice compiles each time, and warns once with the reason."""
    done = run_python("-c", before + COMPILE_TWICE, env=os.environ | {"LLTM_EXT_CACHE": str(folder)})
    # The portable library warns in C++, which only newer versions of torch make Python's warnings.
    warned = done.stdout + (done.stderr if _portable.in_use else "")
    assert warned.count("lltm_ext: ") == 1, warned
    assert reason in warned
    assert not folder.is_dir() or list(folder.iterdir()) == []


@needs_nvrtc
def test_a_folder_that_others_could_write_is_not_used(tmp_path):
    for mode in (0o720, 0o702):
        folder = tmp_path / f"open{mode}"
        folder.mkdir()
        folder.chmod(mode)
        assert_not_cached(f"{folder} can be written by other users (chmod 700 fixes this)", folder)


@needs_nvrtc
def test_a_full_disk_leaves_no_entry(tmp_path):
    """As on one, a write stops in the middle: here at the largest size of a file."""
    folder = tmp_path / "cache"
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))"
    reason = f"cannot write a compiled op to the cache {folder}: File too large"
    assert_not_cached(reason, folder, before=full)


@needs_nvrtc
def test_a_folder_that_cannot_be_made_is_not_used(tmp_path):
    (tmp_path / "file").touch()
    assert_not_cached("Not a directory", tmp_path / "file" / "cache")


@needs_nvrtc
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder away")
def test_a_folder_of_another_user_is_not_used(tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    assert_not_cached("belongs to another user", folder)


@needs_nvrtc
def test_the_default_folder_follows_xdg(tmp_path, monkeypatch):
    monkeypatch.delenv("LLTM_EXT_CACHE", raising=False)
    for name, value, folder in (("HOME", "home", "home/.cache"), ("XDG_CACHE_HOME", "xdg", "xdg")):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv(name, str(tmp_path / value))
        compiled(relu)
        assert len(list((tmp_path / folder / "lltm_ext").iterdir())) == 1


@needs_nvrtc
def test_concurrent_processes_write_one_valid_entry(cache):
    code = """
import hashlib, torch, lltm_ext
from lltm_ext import _C
op = lltm_ext.elementwise("T f(T x)", "return exp(x);")
for _ in range(20):
    binary = _C.elementwise.compile(op.program, torch.float32, "sm_80")
print(hashlib.sha256(binary).hexdigest())
"""
    processes = forks.run("-c", code, cwd=ELSEWHERE, env=[os.environ] * 3)
    assert [process.returncode for process in processes] == [0] * 3, processes
    assert len({process.stdout for process in processes}) == 1
    assert len(list(cache.iterdir())) == 1  # and no temporary file
    assert compilations(lambda: compiled(op_of("return exp(x);"))) == 0


# ---- Calls that run no kernel


def meta(*shape, **kwargs):
    return torch.empty(*shape, device="meta", **kwargs)


def test_cpu_tensors_go_to_the_cpu_function():
    x = Make(DOUBLE)(3, 4).requires_grad_()
    assert_same_bits([softsign(x, a=2)], [softsign_reference(x, 2.0)])
    assert_same_bits([softsign(a=2, x=x)], [softsign_reference(x, 2.0)])
    assert softsign.gradcheck(x, a=2)
    assert softsign.gradcheck(a=0.5, device="cpu")
    with pytest.raises(RuntimeError, match=r"^relu: expected x on a CUDA device, got cpu \(cpu= of "):
        relu(x)
    with pytest.raises(RuntimeError, match=r"^relu: expected tensors on a CUDA device, got cpu"):
        torch.ops.lltm_ext.elementwise([x.detach()], [], relu.program)


@pytest.mark.parametrize(
    "arguments, keywords, message",
    [
        ((), {}, "the argument x is missing"),
        ((), {"a": 1}, "the argument x is missing"),
        ((None,), {}, "expected x to be a Tensor, got NoneType"),
        (([1.0],), {}, "expected x to be a Tensor, got list"),
        ((torch.zeros(1), 1, 2), {}, "expected at most 2 arguments, got 3"),
        ((torch.zeros(1), 1), {"a": 2}, "got a twice"),
        ((torch.zeros(1),), {"b": 2}, "has no parameter 'b'"),
    ],
)
def test_the_error_names_a_bad_argument(arguments, keywords, message):
    with pytest.raises(TypeError, match=f"^softsign: {message}"):
        softsign(*arguments, **keywords)


@pytest.mark.parametrize(
    "x, y, exception, message",
    [
        (meta(3).int(), meta(3), TypeError, f"expected x of dtype {FLOATING}, got int32"),
        (meta(3), meta(3).to(torch.complex64), TypeError, f"expected y of dtype {FLOATING}, got complex64"),
        (meta(3, 4), meta(3, 3), RuntimeError, r"expected shapes that can be broadcast to one, got \[3, 4\]"),
        (meta(3), torch.zeros(3), RuntimeError, "expected y on meta, got cpu"),
    ],
)
def test_the_error_names_a_bad_tensor(x, y, exception, message):
    for values in ((x, y), (x, y.requires_grad_() if y.is_floating_point() else y)):
        with pytest.raises(exception, match=f"^blend: {message}"):
            blend(*values)


def test_a_gradient_without_a_formula_is_refused_and_not_dropped():
    x, message = meta(3, requires_grad=True), r"^f: a gradient with respect to x is required, but its back"
    with pytest.raises(RuntimeError, match=message):
        op_of("return x;")(x)
    with pytest.raises(RuntimeError, match=message):
        torch.func.grad(lambda x: op_of("return x;")(x).sum())(x.detach())
    with torch.no_grad():
        assert not op_of("return x;")(x).requires_grad
    assert not op_of("return x;")(x.detach()).requires_grad
    op = lltm_ext.elementwise("T f(T x, T y)", "return x * y;", backward={"x": "return grad * y;"})
    assert op(x, x.detach()).requires_grad
    with pytest.raises(RuntimeError, match=r"^f: a gradient with respect to y is required"):
        op(x, x)


def test_a_second_derivative_is_refused_and_not_zero():
    message = "^softsign: its gradient cannot be differentiated again"
    x = meta(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(softsign(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=message):
        gradient.sum().backward()
    first = torch.func.grad(lambda x: softsign(x).sum())
    with pytest.raises(RuntimeError, match=message):
        torch.func.grad(lambda x: first(x).sum())(x.detach())


@pytest.mark.parametrize("grad_mode", [True, False])
def test_tangents_have_the_layout_of_the_output(grad_mode):
    x, y = meta(3, 1), meta(3, 4)
    with torch.autograd.forward_ad.dual_level(), torch.set_grad_enabled(grad_mode):
        dual = torch.autograd.forward_ad.make_dual(x, x)
        primal, tangent = torch.autograd.forward_ad.unpack_dual(blend(dual, y))
        with pytest.raises(RuntimeError, match=r"^f: a jvp with respect to x is required"):
            op_of("return x;")(dual)
    _, other = torch.func.jvp(blend, (x, y[0]), (x, y[0]))
    assert primal.shape == tangent.shape == other.shape == (3, 4)


PAIRS = {
    "same": lambda: (meta(3, 4), meta(3, 4)),
    "row": lambda: (meta(3, 4), meta(4)),
    "column first": lambda: (meta(3, 1), meta(3, 4)),
    "outer": lambda: (meta(3, 1), meta(1, 4)),
    "scalar": lambda: (meta(()), meta(2, 3, 4)),
    "transposed": lambda: (meta(4, 3).T, meta(4, 3).T),
    "channels_last": lambda: (meta(2, 3, 4, 5).to(memory_format=torch.channels_last), meta(5)),
    "bias first": lambda: (meta(5), meta(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    "stepped": lambda: (meta(3, 8)[:, ::2], meta(4)),
    "stepped and transposed": lambda: (meta(8, 3)[::2].T, meta(4)),
    "expanded": lambda: (meta(1, 4).expand(3, 4), meta(4, 3).T),
    "empty": lambda: (meta(0, 4), meta(4)),
    "promoted": lambda: (meta(3, 4, dtype=torch.float16), meta(4, dtype=torch.bfloat16)),
    "promoted to double": lambda: (meta(3, 4, dtype=torch.float64), meta(3, 4)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_shapes_dtypes_and_strides_equal_torchs_also_of_fake_tensors(pair):
    x, y = PAIRS[pair]()
    output, expected = blend(x, y), x * y
    assert (output.shape, output.dtype) == (expected.shape, expected.dtype)
    if pair != "expanded":
        assert output.stride() == expected.stride()
    with_graph, gradients = forward_and_gradients(blend, Call(x, y))
    with FakeTensorMode() as mode:
        fake = blend(mode.from_tensor(x), mode.from_tensor(y))
    for other in (with_graph[0], fake):
        assert (other.shape, other.stride(), other.dtype) == (output.shape, output.stride(), output.dtype)
    for g, t in zip(gradients, (x, y), strict=True):
        assert (g.shape, g.dtype) == (t.shape, t.dtype)


def test_symbolic_shapes_keep_strides(fresh_dynamo):
    from torch._dynamo.testing import CompileCounterWithBackend  # takes a second

    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda x, y: blend(x, y, a=3) * 2, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for rows, columns in ((5, 7), (6, 9), (20, 4)):
        for x in (meta(rows, columns), meta(columns, rows).T):
            output = function(x, meta(columns))
            assert (output.shape, output.stride()) == (x.shape, x.stride())
        frames.append(counter.frame_count)
    assert frames == [frames[0]] * 3  # one compilation for each order of strides serves all sizes


def test_compiles_with_gradients_and_changing_scalars(fresh_dynamo):
    function = torch.compile(lambda x, y, a: blend(x, y, a), fullgraph=True, backend="aot_eager")
    for a in (1.0, 2.0, 3.0):
        x, y = meta(3, 4, requires_grad=True), meta(4, requires_grad=True)
        function(x, y, a).sum().backward()
        assert x.grad.shape == x.shape and y.grad.shape == y.shape


def test_the_cpu_function_compiles(fresh_dynamo):
    x = Make()(3, 4)
    function = torch.compile(lambda x: softsign(x, a=2) * 2, fullgraph=True, backend="aot_eager")
    assert_near(function(x), softsign_reference(x, 2.0) * 2, FORWARD[torch.float32])


def test_an_exported_program_needs_no_op_object():
    exported = torch.export.export(Module(lambda x, y: blend(x, y)), (meta(3, 4), meta(4)))
    targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert targets == ["lltm_ext.elementwise.default"]
    assert exported.module()(meta(3, 4), meta(4)).shape == (3, 4)


@pytest.mark.parametrize("shapes, in_dims, expected", [
    (((5, 3, 4), (4,)), (0, None), (5, 3, 4)),
    (((3, 4), (4, 5)), (None, 1), (5, 3, 4)),
    (((5, 4), (3, 4, 5)), (0, 2), (5, 3, 4)),
    (((5,), (3, 4)), (0, None), (5, 3, 4)),
])  # fmt: skip
def test_vmap_broadcasts_below_the_mapped_dimension(shapes, in_dims, expected):
    tensors = [meta(shape) for shape in shapes]
    assert torch.vmap(blend, in_dims)(*tensors).shape == expected
    op = torch.ops.lltm_ext.elementwise
    mapped = torch.vmap(lambda x, y: op([x, y], [2.0, 0.5], blend.program), in_dims)
    assert mapped(*tensors).shape == expected
    gradients = torch.vmap(torch.func.grad(lambda x, y: blend(x, y).sum(), (0, 1)), in_dims)(*tensors)
    for gradient, x, d in zip(gradients, tensors, in_dims, strict=True):
        assert gradient.shape == ((5, *x.shape) if d is None else (5, *x.movedim(d, 0).shape[1:]))


def test_opcheck_on_meta_tensors():
    x, y = meta(3, 4, requires_grad=True), meta(4, requires_grad=True)
    checks = ("test_schema", "test_autograd_registration")
    op = torch.ops.lltm_ext.elementwise.default
    torch.library.opcheck(op, ([x, y], [2.0, 0.5], blend.program), test_utils=checks)
    backward = torch.ops.lltm_ext.elementwise_backward.default
    used = [x.detach(), y.detach(), meta(3, 4)]
    arguments = (meta(3, 4), used, [2.0, 0.5], blend.program, [0, 1])
    torch.library.opcheck(backward, arguments, test_utils=checks)


def test_the_example_runs():
    example = Path(__file__).parent.parent / "examples/runtime_relu.py"
    env = os.environ | {"TORCHDYNAMO_DISABLE": "0" if torch.cuda.is_available() else "1"}
    said = run_python(example, env=env).stdout
    assert said.count("True") == 4 and "False" not in said


# ---- On a GPU


def check_against_reference(op, reference, tensors, dtype, **scalars):
    call = Call(*tensors)
    # Positive, so that the sums over broadcast dimensions do not cancel.
    grad_outputs = [g.abs() for g in cotangents([op(*tensors, **scalars)])]
    outputs, gradients = forward_and_gradients(lambda *t: op(*t, **scalars), call, grad_outputs)
    expected, expected_gradients = forward_and_gradients(
        lambda *t: reference(*t, **scalars), call.map(torch.Tensor.double), grad_outputs
    )
    assert_all_near(outputs, expected, FORWARD[dtype])
    for g, t in zip(gradients, tensors, strict=True):
        assert (g.shape, g.dtype) == (t.shape, t.dtype)
    assert_all_near(gradients, expected_gradients, BACKWARD[dtype])
    return outputs, gradients


@needs_cuda
class TestOnCuda:
    @pytest.mark.parametrize("shape", [(), (1,), (63, 3), (500, 37), (2, 3, 5, 7), (100_003,)])
    def test_values_and_gradients_match_the_reference(self, shape, dtype):
        make = Make(dtype, "cuda")
        x, y = make(*shape, scale=2), make(*shape, scale=2)
        check_against_reference(softsign, softsign_reference, [x], dtype, a=2.0)
        check_against_reference(blend, blend_reference, [x, y], dtype, b=0.25)

    @pytest.mark.parametrize(
        "shapes", [((3, 4), (4,)), ((3, 1), (1, 4)), ((), (5, 6)), ((2, 1, 5), (7, 1)), ((0, 4), (4,))]
    )
    def test_broadcasting_matches_the_reference(self, shapes, dtype):
        make = Make(dtype, "cuda")
        tensors = [make(*shape, scale=2).abs() for shape in shapes]
        check_against_reference(blend, blend_reference, tensors, dtype)

    @pytest.mark.parametrize("layout", [transposed, stepped, misaligned, expanded, negated_view])
    def test_strides_match_the_reference(self, layout, dtype):
        make = Make(dtype, "cuda")
        x, y = make(6, 7), make(6, 7)
        check_against_reference(blend, blend_reference, [layout(x), layout(y)], dtype)
        check_against_reference(blend, blend_reference, [layout(x), y], dtype)
        check_against_reference(blend, blend_reference, [x, layout(y)], dtype)
        output = softsign(x)
        for grad_output in (layout(y), y):
            leaf = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(softsign(leaf), leaf, grad_output)
            (expected,) = torch.autograd.grad(softsign(leaf), leaf, grad_output.clone())
            assert_same_bits([gradient], [expected])
        assert_same_bits([softsign(layout(x)).contiguous()], [softsign(layout(x).contiguous())])
        assert output.is_contiguous()

    def test_every_length_and_offset(self, dtype):
        x = Make(dtype, "cuda")(64)
        whole = softsign(x)
        for start in range(9):
            for end in range(start, 64, 5):
                assert_same_bits([softsign(x[start:end])], [whole[start:end]])
        y = Make(dtype, "cuda", seed=1)(64)
        both = blend(x, y)
        for offset in range(1, 9):  # the two never have the same alignment
            left, right = x[offset:], y[:-offset]
            assert_same_bits([blend(left, right)], [blend(left.clone(), right.clone())])
        assert_same_bits([blend(x[3:], y[3:])], [both[3:]])

    def test_relu_has_the_bits_of_lltm_ext_relu(self, dtype):
        special = torch.tensor(SPECIAL, dtype=DOUBLE).to(dtype).cuda()
        for x in (special, Make(dtype, "cuda")(1001), Make(dtype, "cuda")(33, 65).T):
            assert_same_bits(results(relu, Call(x)), results(lltm_ext.relu, Call(x)))

    def test_dtypes_are_promoted(self):
        x, y = Make(torch.float16, "cuda")(3, 4), Make(torch.float32, "cuda")(4)
        outputs, gradients = forward_and_gradients(blend, Call(x, y))
        assert outputs[0].dtype == torch.float32
        assert [g.dtype for g in gradients] == [torch.float16, torch.float32]
        assert_near(outputs[0], blend_reference(x.double(), y.double()), FORWARD[torch.float32])

    def test_a_gradient_is_the_same_whichever_others_are_required(self):
        make = Make(DOUBLE, "cuda")
        x, y = make(5, 6), make(5, 6)
        _, together = forward_and_gradients(blend, Call(x, y))
        for i in range(2):
            for required in ((i,), (0, 1)):
                leaves = [t.detach().requires_grad_(j in required) for j, t in enumerate((x, y))]
                output = blend(*leaves)
                found = torch.autograd.grad(output, leaves[i], cotangents([output]))
                assert_same_bits(found, [together[i]])

    def test_all_gradients_are_one_launch(self, profiler_sees_kernels):
        make = Make(device="cuda")
        x, y, grad_output = make(50, 60).requires_grad_(), make(50, 60).requires_grad_(), make(50, 60)
        output = blend(x, y)

        def backward():
            torch.autograd.grad(output, (x, y), grad_output, retain_graph=True)

        backward()  # compiles
        (kernels,) = kernels_of([backward])
        assert [name for name in kernels if "lltm_ext" in name] == ["lltm_ext_blend_backward_flat"]

    def test_gradcheck_accepts_right_and_refuses_wrong_gradients(self):
        assert softsign.gradcheck()
        assert blend.gradcheck(a=0.5)
        x = Make(DOUBLE, "cuda")(2, 3)
        assert blend.gradcheck(x, x[0])
        wrong = op_of("return x * x;", backward={"x": "return grad * x;"})
        with pytest.raises(RuntimeError, match="Jacobian mismatch"):
            wrong.gradcheck()
        with pytest.raises(RuntimeError, match=r"^f: has no backward to check"):
            op_of("return x;").gradcheck()

    def test_eight_tensors_and_their_gradients(self):
        names = [f"x{i}" for i in range(8)]
        backward = {n: f"return grad * {' * '.join(m for m in names if m != n)};" for n in names}
        signature = f"T f({', '.join('T ' + n for n in names)})"
        op = lltm_ext.elementwise(signature, f"return {' * '.join(names)};", backward=backward)
        assert op.gradcheck()
        tensors = [Make(DOUBLE, "cuda", seed)(3, 1 + seed % 2 * 3) for seed in range(8)]
        assert op.gradcheck(*tensors)

    def test_a_formula_may_ignore_its_operand(self):
        constant = op_of("return T(3);", backward={"x": "return T(0);"})
        x = torch.ones(7, device="cuda", requires_grad=True)
        y = constant(x)
        y.sum().backward()
        assert y.tolist() == [3] * 7 and x.grad.tolist() == [0] * 7

    def test_a_compile_error_comes_at_the_first_call_and_the_next_op_is_right(self):
        x = torch.ones(3, device="cuda")
        with pytest.raises(RuntimeError, match=r'^f does not compile:\nforward\(1\): error: identifier "y"'):
            op_of("return y;")(x)
        assert relu(x).tolist() == [1, 1, 1]

    def test_runs_on_the_current_stream(self):
        value = Make(device="cuda")(1000)
        expected, late = softsign(value), torch.zeros_like(value)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(200_000_000)
            late.copy_(value)
            output = softsign(late)
            assert not torch.cuda.current_stream().query(), "the call waited for the GPU"
        torch.cuda.synchronize()
        assert_same_bits([output], [expected])

    @pytest.mark.parametrize("warm", [True, False])
    def test_graph_capture(self, warm):
        """Even of the first call, which compiles and loads."""
        op = op_of(f"return x * 3 + {int(warm)};", backward={"x": "return grad * 3;"})
        static = Make(device="cuda")(1000).requires_grad_()
        grad_output = torch.ones_like(static)
        if warm:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.autograd.grad(op(static), static, grad_output)
            torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = op(static)
            (gradient,) = torch.autograd.grad(output, static, grad_output)
        with torch.no_grad():
            static.copy_(Make(device="cuda", seed=1)(1000))
        graph.replay()
        assert_near(output, static * 3 + int(warm), FORWARD[torch.float32])
        assert gradient.unique().tolist() == [3]

    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_torch_compile_equals_eager(self, backend, fresh_dynamo):
        def function(x, y, a):
            return blend(x, y, a).cos() * softsign(x, a=a)

        compiled = torch.compile(function, fullgraph=True, backend=backend)
        for rows, a in ((5, 1.0), (6, 2.0), (7, 3.0)):
            make = Make(DOUBLE, "cuda")
            call = Call(make(rows, 4, scale=2), make(4, scale=2), a)
            assert_agree(compiled, function, call)

    @pytest.mark.parametrize("requires_grad", [False, True])
    def test_opcheck(self, requires_grad):
        op, make = torch.ops.lltm_ext.elementwise.default, Make(DOUBLE, "cuda")
        for tensors in ([make(3, 4), make(4)], [make(4, 3).T, make(4, 3).T]):
            tensors = [t.detach().requires_grad_(requires_grad) for t in tensors]
            torch.library.opcheck(op, (tensors, [2.0, 0.5], blend.program))

    def test_func_transforms_match_the_reference(self):
        make = Make(DOUBLE, "cuda")
        x, y = make(5, 3, 4, scale=2), make(4, scale=2)

        def loss(function):
            return lambda x, y: (function(x, y) ** 2).sum()

        for in_dims in ((0, None), (1, None)):
            ours, expected = (
                torch.vmap(torch.func.grad(loss(f), (0, 1)), in_dims)(x, y) for f in (blend, blend_reference)
            )
            assert_all_near(ours, expected, BACKWARD[DOUBLE])
        ours, expected = (torch.func.jacrev(f)(x[0], y) for f in (blend, blend_reference))
        assert_near(ours, expected, BACKWARD[DOUBLE])

    def test_a_cpu_tensor_among_cuda_tensors_is_refused(self):
        with pytest.raises(RuntimeError, match=r"^blend: expected y on cuda:0, got cpu"):
            blend(torch.ones(3, device="cuda"), torch.ones(3))

    def test_threads_make_the_first_call_at_once(self):
        op = op_of("return x * 5;")
        x = torch.ones(100, device="cuda")
        with ThreadPoolExecutor(8) as pool:
            outputs = list(pool.map(lambda _: op(x), range(16)))
        torch.cuda.synchronize()
        assert all(y.unique().tolist() == [5] for y in outputs)

    @needs_two_gpus
    def test_runs_on_a_device_that_is_not_current(self):
        torch.cuda.set_device(0)
        for device in ("cuda:1", "cuda:0"):
            x = Make(device=device)(63, 5)
            outputs, gradients = forward_and_gradients(softsign, Call(x))
            assert torch.cuda.current_device() == 0
            assert all(t.device == x.device for t in outputs + gradients)
            assert_near(outputs[0], softsign_reference(x.double()), FORWARD[torch.float32])


@needs_nvrtc
def test_ctrl_c_ends_the_wait_for_the_compiler(tmp_path):
    program = """
import signal
import torch
from lltm_ext import _C, elementwise

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with it ignored
doubled = "".join(f"#define M{i + 1} M{i} M{i}\\n" for i in range(22))
slow = elementwise("T f(T x)", "\\n#define M0 x = sin(x) * exp(x);\\n" + doubled + "M22\\nreturn x;")
print("compiles", flush=True)
try:
    _C.elementwise.compile(slow.program, torch.float32, "sm_90")
except KeyboardInterrupt:
    print("interrupted", flush=True)
    import os
    os._exit(0)
"""
    how = {"env": os.environ | {"LLTM_EXT_CACHE": str(tmp_path)}, "cwd": tmp_path, "text": True}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, **how)
    try:
        assert process.stdout.readline() == "compiles\n"
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20)[0] == "interrupted\n"
    finally:
        process.kill()
