"""examples/lltm_in_steps: each folder builds, runs, agrees with step 1, and stays short.

Without a GPU the steps that are kernels only are compiled and imported.
"""

import os
import re
import sys
import sysconfig

import pytest
import tooling
import torch
from tooling import ROOT

from lltm_ext._install import toolchain

pytestmark = pytest.mark.compiles

STEPS = ROOT / "examples/lltm_in_steps"
LINES = {
    "1_python": 150,
    "2_cpp": 150,
    "3_cuda_kernel": 150,
    "4_autograd": 150,
    "5_wheel": 150,
    "6_sequence": 250,
    "7_persistent": 250,
}
NEED_NVCC = ("3_cuda_kernel", "6_sequence", "7_persistent")


@pytest.fixture(scope="module")
def cuda():
    """The toolkit of torch's CUDA version, or None and the reason."""
    if torch.version.cuda is None:
        return None, "needs a torch with CUDA"
    try:
        return toolchain.find_cuda(torch.version.cuda).home, None
    except toolchain.ToolchainError as error:
        return None, str(error)


@pytest.fixture(scope="module")
def variables(cuda, quick_cxx, tmp_path_factory):
    """What the builds read. torch does not look for PyPI's toolkit, which lacks libcudart.so."""
    folder = tmp_path_factory.mktemp("steps")
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    found = {"CXX": quick_cxx, "PATH": path, "TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    home, _ = cuda
    if home is not None:
        major = torch.version.cuda.partition(".")[0]
        runtime, *_ = sorted(home.glob(f"lib*/libcudart.so.{major}*"))
        (folder / "libcudart.so").symlink_to(runtime)
        found |= {"CUDA_HOME": str(home), "LIBRARY_PATH": str(folder)}
    return found


@pytest.mark.parametrize("step", LINES)
def test_a_step_builds_and_agrees_with_the_first(step, cuda, variables, tmp_path):
    home, reason = cuda
    if home is None and step in NEED_NVCC:
        pytest.skip(reason)
    done = tooling.run(sys.executable, STEPS / step / "run.py", cwd=tmp_path, **variables)
    works = r"agrees with step 1; a step takes [\d.]+ us forward"
    only_built = "compiled and imported; needs a GPU to run"
    assert re.search(rf"^{step}.*: ({works}|{only_built})", done.stdout, re.MULTILINE), done.stdout
    if torch.cuda.is_available():
        assert only_built not in done.stdout


def test_the_folders_are_short_and_listed():
    folders = {path.name: path for path in STEPS.iterdir() if path.is_dir() and path.name[0].isdigit()}
    assert sorted(folders) == list(LINES)
    for step, folder in folders.items():
        files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        lines = sum(len(path.read_text().splitlines()) for path in files)
        assert lines <= LINES[step]
        assert f"| `{step}` | {lines} |" in (STEPS / "README.md").read_text()
        assert f"| [{step}](" in (ROOT / "docs/lltm_in_steps.md").read_text()


# ---- the messages of torch that the steps quote ------------------------------------------------------------


def assert_quoted(error, file):
    """Comments may break the message over lines, and leave its end out."""
    text = " ".join(re.sub(r"^(//)? *", "", line) for line in (STEPS / file).read_text().splitlines())
    message = str(error).split(" (or directly")[0].split(". This could")[0]
    assert f"{type(error).__name__}: {message}" in text


class LLTMFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, bias, h, c):
        return h.clone()


FORWARD = {"x": (4, 2), "weights": (15, 7), "bias": (15,), "h": (4, 5), "c": (4, 5)}


@pytest.mark.parametrize("returned", [(*FORWARD, "gates"), ("h", "x", "weights", "bias", "c")], ids=str)
def test_a_backward_with_other_gradients_than_inputs_fails_as_quoted(returned, monkeypatch):
    sizes = FORWARD | {"gates": (4, 15)}
    gradients = tuple(torch.ones(sizes[name]) for name in returned)
    monkeypatch.setattr(LLTMFunction, "backward", staticmethod(lambda ctx, grad: gradients))
    inputs = [torch.ones(size, requires_grad=True) for size in FORWARD.values()]
    with pytest.raises(RuntimeError) as raised:
        LLTMFunction.apply(*inputs).sum().backward()
    assert_quoted(raised.value, "2_cpp/lltm.cpp")


def test_a_state_with_a_graph_fails_as_quoted():
    h = torch.ones(2, requires_grad=True).sigmoid()
    h.sum().backward()
    with pytest.raises(RuntimeError) as raised:
        h.sum().backward()
    assert_quoted(raised.value, "1_python/lltm.py")


# In a process of its own: torch.export looks at all ops, and finds this one without its library.
WITHOUT_IMPLEMENTATION = """
import torch

library = torch.library.Library("lltm_4", "DEF")
library.define("pointwise(Tensor gates, Tensor c) -> (Tensor, Tensor)")
try:
    torch.ops.lltm_4.pointwise(torch.ones(1), torch.ones(1))
except NotImplementedError as error:
    print(error)
"""


def test_an_op_without_an_implementation_fails_as_quoted(tmp_path):
    done = tooling.run(sys.executable, "-c", WITHOUT_IMPLEMENTATION, cwd=tmp_path)
    assert_quoted(NotImplementedError(done.stdout.strip()), "4_autograd/lltm.cpp")
