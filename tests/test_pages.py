"""README.md, docs/ and its notebooks: Python code runs and prints what its comments say; commands are run."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDS_OTHER_LIBRARIES = {"docs/libraries.md"}  # which the table of that page names, with their versions
PAGES = sorted(
    page
    for page in ["README.md", *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
    if page not in NEEDS_OTHER_LIBRARIES and "```python" in (ROOT / page).read_text()
)


def said(block):
    """What the comments behind a block's prints say, up to a semicolon."""
    return [text.split(";")[0].strip() for text in re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_prints_what_it_says(page):
    namespace = {"__name__": "a_page"}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    for block in blocks:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(block, page, "exec"), namespace)
        assert output.getvalue().splitlines() == said(block)


@pytest.mark.parametrize("notebook", sorted(path.name for path in ROOT.glob("docs/*.ipynb")))
def test_the_code_of_a_notebook_runs(notebook, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads((ROOT / "docs" / notebook).read_text())["cells"]
    namespace = {"__name__": "a_notebook"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), notebook, "exec"), namespace)


PACKAGING, WHEELS, CPP, CI = "test_packaging.py", "test_wheels.py", "test_cpp.py", ".ci/run"
ANY, GPU = "by hand: any packages will do", "by hand: needs a GPU"
TORCH = "\"$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')\""
TORCHRUN = "torchrun --nproc-per-node"
# What runs each command of the pages, a file of tests or CI; or why nothing does.
COMMANDS = {
    "git clone … && cd lltm_ext": "by hand: anywhere",
    "pip install .": PACKAGING,
    "pip install ./lltm_ext-0.3.0+cu130torch2.11-cp312-cp312-manylinux_2_28_x86_64.whl": WHEELS,
    'pip install torch ninja "setuptools>=77" "cuda-toolkit[nvcc,crt,nvvm,cccl]"': ANY,
    "pip install pytest pytest-xdist hypothesis expecttest numpy": ANY,
    'INDEX="file://$PWD/wheelhouse/index"': WHEELS,
    'pip install --no-deps --index-url "$INDEX" lltm_ext': WHEELS,
    'pip install --no-deps --index-url "$INDEX/cu130/torch2.11" lltm_ext': WHEELS,
    "LLTM_EXT_PORTABLE=1 pip wheel --no-deps .": PACKAGING,
    "export LLTM_EXT_JIT=1": "test_jit.py",
    'python -c "import lltm_ext"': "test_jit.py",
    "lltm-ext doctor": "test_doctor.py",
    "lltm-ext bench --out somewhere": "test_selftest.py",
    "make demo": "test_examples.py",
    "make test": "by hand: CI runs all tests",
    'make test PYTEST="tests/test_lltm.py -k vmap"': "by hand: CI runs all tests",
    "make test-all": CI,
    "make lint": CI,
    "make docs": CI,
    "make fuzz": "fuzz",  # fewer calls
    "make soak": "test_soak.py",  # for a shorter time
    "make test-asan": "by hand: a build of its own",
    "make test-stream": GPU,
    "make test-deterministic": GPU,
    "make test-sanitizer": GPU,
    "make bench": GPU,
    "make wheels": "by hand: half an hour for each wheel",
    "make wheels WHEELS=3.12-torch2.11": "by hand: half an hour",
    "make wheels WHEELS=portable-torch2.11": "by hand: half an hour",
    "python benchmarks/lltm.py --quick": "test_examples.py",
    "python benchmarks/harness.py plot": "test_results.py",
    "python examples/char_lm.py": CPP,
    "python examples/export.py": CPP,
    'build/examples/run_exported build/char_lm/char_lm.pt2 "The "': CPP,
    "build/examples/train": CPP,
    f"cmake -B build/cpp -DCMAKE_PREFIX_PATH={TORCH}": CPP,
    "cmake --build build/cpp -j 2": CPP,
    'cmake --install build/cpp --prefix "$PWD/build/install"': CPP,
    'cmake -S examples/cpp -B build/examples -DCMAKE_PREFIX_PATH="$PWD/build/install"': CPP,
    "cmake --build build/examples": CPP,
    f"{TORCHRUN} 2 examples/distributed.py": "test_distributed.py",
    f"{TORCHRUN} 2 examples/distributed.py --shard --bfloat16 --recompute": "test_distributed.py",
    f"{TORCHRUN} 4 examples/distributed.py --resume --steps 2000": "by hand: 2,000 steps",
}
PROGRAM = r"^    ((?:(?:pip|make|python|cmake|torchrun|git|export|lltm-ext) |build/|[A-Z_]+=).*?)(?:\s+#.*)?$"


def commands():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for block in re.findall(r"(?<=\n\n)(?:    .*\n)+", text):
            yield from re.findall(PROGRAM, block, re.MULTILINE)


def test_a_test_runs_each_command_or_a_reason_is_given():
    assert set(commands()) == set(COMMANDS)
    files = {where for where in COMMANDS.values() if where != CI and not where.startswith("by hand: ")}
    assert [name for name in files if not (ROOT / "tests" / name).exists()] == []
