"""Runs the command line: `python -m jaxaudit`."""

from jaxaudit.cli.main import entry

entry()
