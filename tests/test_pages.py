"""README.md, docs/ and its notebooks: Python code runs and prints what its comments say."""

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDS_OTHER_LIBRARIES = {"docs/libraries.md"}  # The table of that page names them, with their versions.
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


def test_the_code_of_the_readme_runs_in_the_clone_as_the_readme_says():
    """`-I` keeps the source folder off the path; without an installed package there is nothing to run."""
    readme = (ROOT / "README.md").read_text()
    assert "`.venv/bin/python -I`" in readme
    python = [sys.executable, "-I", "-c"]
    installed = "import importlib.util, sys; sys.exit(importlib.util.find_spec('lltm_ext') is None)"
    if subprocess.run([*python, installed], cwd=ROOT).returncode:
        pytest.skip("lltm_ext is not installed")
    (block,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    found = subprocess.run([*python, block], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.splitlines() == said(block), found.stderr


@pytest.mark.parametrize("notebook", sorted(path.name for path in ROOT.glob("docs/*.ipynb")))
def test_the_code_of_a_notebook_runs(notebook, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads((ROOT / "docs" / notebook).read_text())["cells"]
    namespace = {"__name__": "a_notebook"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), notebook, "exec"), namespace)
