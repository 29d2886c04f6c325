"""Parameters that tests ask for by name: `device`, `dtype`, and what an op's suite offers (op_suite.py)."""

import collections
import contextlib
import logging
import os
import shlex

import pytest

# Threads that wait sleep. Spinning, as they do by default, they would take the cores of pytest-xdist's other
# workers. OpenMP reads it when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from lltm_ext import _portable

# torch's structured trace: pages of empty lines with every failure of a test that compiled something.
logging.getLogger("torch.__trace").addFilter(lambda record: False)
pytest.register_assert_rewrite("op_suite", "sequence_suite", "cell_examples")

# pytest-xdist's workers share the cores. Two threads each remain, so that parallel code runs as such.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
torch.set_num_threads(min(torch.get_num_threads(), max(2, (os.cpu_count() or 1) // WORKERS)))

if _portable.in_use:  # these files build native modules, or call an op that the portable library lacks
    collect_ignore = ["test_cpp.py", "test_jit.py", "test_resize_units.py"]

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@contextlib.contextmanager
def on_a_side_stream():
    """Behind 5 ms of other work there, so that work on another stream would come too early."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10_000_000)  # clocks
        yield


@contextlib.contextmanager
def deterministic():
    """New memory is filled with NaN then. Torch's ops that have no such form warn."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


PASSES = {"side-stream": on_a_side_stream, "deterministic": deterministic}


@pytest.fixture(autouse=True)
def conditions(request):
    with PASSES.get(request.config.getoption("--pass"), contextlib.nullcontext)():
        yield


def pytest_addoption(parser):
    parser.addoption("--examples", type=int, default=900, help="random calls of each function in tests/fuzz")
    parser.addoption("--soak-seconds", type=float, default=10, help="of calls from threads, in test_soak.py")
    parser.addoption("--pass", choices=list(PASSES), help="run every test under other conditions")


def pytest_generate_tests(metafunc):
    taken = {
        name for mark in metafunc.definition.iter_markers("parametrize") for name in mark.args[0].split(",")
    }
    wanted = set(metafunc.fixturenames) - taken
    if "device" in wanted:
        metafunc.parametrize("device", DEVICES)
    if {"case", "layout", "dtype"} <= wanted:
        from op_suite import pairs_of  # not before its asserts are registered, above

        some = pairs_of(metafunc.cls.samples, metafunc.cls.layouts, DTYPES)
        metafunc.parametrize("case,layout,dtype", some, ids=lambda x: str(x).removeprefix("torch."))
        wanted -= {"case", "layout", "dtype"}
    if "dtype" in wanted:
        metafunc.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
    # What an op's suite offers, as parameters: each is a dict of the class.
    for argument, table in (
        ("case", "samples"),
        ("empty", "empty_samples"),
        ("bad", "bad_calls"),
        ("module", "modules"),
    ):
        if argument in wanted:
            metafunc.parametrize(argument, list(getattr(metafunc.cls, table)))
    if "layout" in wanted:
        metafunc.parametrize("layout", list(metafunc.cls.layouts))


# Those that take minutes, the longest first.
LONG = [
    "test_packaging.py",
    "test_persistent_kernels.py",
    "test_jit.py",
    "test_cpp.py",
    "test_lltm_in_steps.py",
    "test_fuzz.py",
]


def pytest_collection_modifyitems(items):
    """Long files come first, so that workers which run files side by side end at about the same time.

    With --no-loadscope-reorder: pytest-xdist would else start with the files of most tests.
    """
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_terminal_summary(terminalreporter):
    """One line for all skips, which without a GPU are half of the tests."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = collections.Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    common = [f"{count:,} for {reason!r}" for reason, count in reasons.most_common(3)]
    others = f", the others for {len(reasons) - 3} other reasons (-rs lists them)" * (len(reasons) > 3)
    if reports:
        terminalreporter.write_line(f"{len(reports):,} skipped: {', '.join(common)}{others}")


@pytest.fixture
def fresh_dynamo():
    """torch.compile as in a new process: no graphs of other tests, and none from disk."""
    torch._dynamo.reset()
    with torch.compiler.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_tf32():
    """Float32's bounds are those of IEEE arithmetic; torch's default settings allow sequences TF32."""
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = True


@pytest.fixture
def nvcc(tmp_path):
    """The path of a compiler that only lists its architectures: 5.0, 7.5, 8.0, 9.0 and 12.0."""
    file = tmp_path / "nvcc"
    known = "".join(f"compute_{architecture}\\n" for architecture in (50, 75, 80, 90, 120))
    file.write_text(f'#!/bin/sh\n[ "$1" != --list-gpu-arch ] || printf "{known}"\n')
    file.chmod(0o755)
    return file


@pytest.fixture(scope="session")
def quick_cxx(tmp_path_factory):
    """The path of the C++ compiler without what makes it slow, for tests of a build and not of fast code.

    Its options come last, so they win over the -O3 of our builds. The heap is one that gcc does not collect
    garbage in: torch's headers need half of it.
    """
    file = tmp_path_factory.mktemp("quick") / "c++"
    compiler = shlex.quote(os.environ.get("CXX", "c++"))
    file.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0 --param=ggc-min-heapsize=2000000\n')
    file.chmod(0o755)
    return str(file)


@pytest.fixture(scope="session")
def profiler_sees_kernels():
    from op_suite import kernels_of  # not before its asserts are registered, above

    if not any(kernels_of([lambda: torch.ones(9, device="cuda") + 1])):
        pytest.skip("torch.profiler sees no kernels here")
