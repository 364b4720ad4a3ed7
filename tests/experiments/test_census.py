"""The census of the package: what may not come back, and that its picture is of the imports there are."""

import sys

import pytest
from places import EXPERIMENTS

CENSUS = EXPERIMENTS / "census"


@pytest.fixture
def census(monkeypatch):
    monkeypatch.syspath_prepend(str(CENSUS))
    import census

    yield census
    for name in ("census", "picture"):
        sys.modules.pop(name, None)


def test_counts_that_may_not_rise(census, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["census.py", "--lists"])
    census.main()
    text = capsys.readouterr().out
    found = {line[9:]: int(line[:7].replace(",", "")) for line in text.partition("\n\n")[0].splitlines()}
    assert found["cycles between packages"] == 0
    assert found["class names that occur more than once"] == 0
    assert found["modules at the top"] == 1, "__main__"
    assert found["files"] > 100


def test_a_cycle_and_a_short_docstring_would_be_seen(census):
    assert census.cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert census.cycles({"a": {"b"}, "b": set()}) == []
    tree = census.ast.parse('"""A module with a docstring of more than six words."""\ndef f():\n    """Too short."""')
    assert list(census.short_docstrings("m", tree)) == [(True, "m.f", "Too short.")]


def test_the_picture_is_that_of_the_imports(census):
    import picture

    assert (CENSUS / "packages.svg").read_text() == picture.drawn(), "python picture.py packages.svg"
