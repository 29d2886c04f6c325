"""Pages that are computed from benchmarks/results."""

import pytest
from tooling import ROOT, load

pytestmark = pytest.mark.skipif(
    not (ROOT / "benchmarks" / "results").is_dir(), reason="the sdist has no results of benchmarks"
)


@pytest.mark.parametrize(
    "page", ["README.md", "docs/benchmarks.md", "docs/libraries.md", "docs/limits.md", "docs/peers.md"]
)
def test_a_page_has_the_table_that_the_results_give(page):
    assert load("benchmarks/pages.py").updated(page) == (ROOT / page).read_text(), (
        "run `python benchmarks/harness.py plot`"
    )
