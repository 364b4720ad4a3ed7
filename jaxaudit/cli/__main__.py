"""`python -m jaxaudit.cli`."""

from jaxaudit.cli.main import entry

entry()
