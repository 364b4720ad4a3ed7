"""The error that is the user's to mend."""

import contextlib
from collections.abc import Iterator


class UserError(ValueError):
    """Something a user can mend; its message is one sentence that says what was given and what is allowed."""


@contextlib.contextmanager
def placed(place: str) -> Iterator[None]:
    """Turns a ValueError into a UserError that names the place; a UserError names it already."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{place}: {error}") from None
