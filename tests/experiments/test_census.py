"""The census of the package: counts that must stay low, and a picture that must agree with the imports."""

import sys

import pytest
from directories import EXPERIMENTS

CENSUS = EXPERIMENTS / "census"


@pytest.fixture
def census(monkeypatch):
    monkeypatch.syspath_prepend(str(CENSUS))
    import census

    yield census
    for name in ("census", "picture"):
        sys.modules.pop(name, None)


@pytest.mark.exhaustive
def test_cycles_and_repeated_names_stay_absent(census, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["census.py", "--lists"])
    census.main()
    printed = capsys.readouterr().out
    counts = {line[9:]: int(line[:7].replace(",", "")) for line in printed.partition("\n\n")[0].splitlines()}
    assert counts["cycles between packages"] == 0
    assert counts["class names that occur more than once"] == 0
    assert counts["modules at the top"] == 1, "__main__"
    assert counts["files"] > 100


def test_the_census_detects_cycles_and_short_docstrings(census):
    assert census.cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert census.cycles({"a": {"b"}, "b": set()}) == []
    tree = census.ast.parse('"""A module with a docstring of more than six words."""\ndef f():\n    """Too short."""')
    assert list(census.short_docstrings("m", tree)) == [(True, "m.f", "Too short.")]


def test_the_picture_agrees_with_the_imports(census):
    import picture

    assert (CENSUS / "packages.svg").read_text() == picture.picture_svg(), "run python picture.py packages.svg"
