"""The README: its example runs, its links lead somewhere, and it stays short."""

import contextlib
import io
import re

import pytest
from directories import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_finds_the_magnitude_that_theory_gives():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "README.md", "exec"), {})
    estimate = float(re.search(r"\d+(\.\d+)?", output.getvalue())[0])
    assert estimate == pytest.approx(100.0, rel=0.02)


def test_it_is_short():
    lines = README.splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "experiments/README.md"])
def test_links_lead_to_files(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", text, re.M)
    paths = [inline or reference for inline, reference in targets]
    assert paths
    for path in paths:
        if not path.startswith(("http", "#")):
            assert ((ROOT / page).parent / path.partition("#")[0]).exists(), path
