"""`python -m jaxaudit`."""

from jaxaudit.cli import entry

entry()
