"""Pages that are computed from benchmarks/results."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_readme_has_the_table_of_layers_that_the_results_give():
    spec = importlib.util.spec_from_file_location("readme", ROOT / "benchmarks" / "readme.py")
    readme = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(readme)
    page = (ROOT / "README.md").read_text()
    assert readme.with_layers(page) == page, "run `python benchmarks/harness.py plot`"
