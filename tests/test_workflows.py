"""The workflows: what they run is also run by hand, and what they use is one commit of an action."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXTS = {path.stem: path.read_text() for path in sorted(ROOT.glob(".github/workflows/*.yml"))}
COMMANDS = [
    found for text in TEXTS.values() for found in re.findall(r"(?:run: |^ +)(make \S.*)", text, re.MULTILINE)
]

pytestmark = pytest.mark.skipif(not TEXTS, reason="of a checkout, not of the sdist")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_a_target_of_make(command):
    arguments = shlex.split(re.sub(r"\$\{\{.*?\}\}", "portable-torch2.11", command))
    # A `make` that runs this test passes its variables on.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run([*arguments, "--dry-run"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("workflow", TEXTS)
def test_actions_are_pinned_by_commit(workflow):
    for action in re.findall(r"uses: (\S+)", TEXTS[workflow]):
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", action)


@pytest.mark.parametrize("workflow", TEXTS)
def test_a_workflow_may_only_read_unless_a_job_says_more(workflow):
    assert re.search(r"^permissions:\n  contents: read\n\n", TEXTS[workflow], re.MULTILINE)
