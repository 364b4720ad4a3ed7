"""Names that are registered twice."""

import pytest

from jaxaudit.runtime.registry import Registry


def entry(module):
    def function():
        pass

    function.__module__ = module
    return function


def test_a_notebooks_cell_may_register_its_entry_again():
    registry = Registry("thing")
    registry.register("mine", entry("__main__"))
    again = entry("__main__")
    registry.register("mine", again)
    assert registry._entries["mine"] is again


@pytest.mark.parametrize(
    ("first", "second"), [("__main__", "package"), ("package", "__main__"), ("package", "package")]
)
def test_a_name_of_another_module_is_refused(first, second):
    registry = Registry("thing")
    registry.register("taken", entry(first))
    with pytest.raises(ValueError, match="thing 'taken' is already registered"):
        registry.register("taken", entry(second))
