"""Pages that are computed from benchmarks/results."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(
    not (ROOT / "benchmarks" / "results").is_dir(), reason="the sdist has no results of benchmarks"
)


@pytest.mark.parametrize(
    "page", ["README.md", "docs/benchmarks.md", "docs/design/recurrence.md", "docs/libraries.md"]
)
def test_a_page_has_the_table_that_the_results_give(page):
    spec = importlib.util.spec_from_file_location("pages", ROOT / "benchmarks" / "pages.py")
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    assert pages.updated(page) == (ROOT / page).read_text(), "run `python benchmarks/harness.py plot`"
