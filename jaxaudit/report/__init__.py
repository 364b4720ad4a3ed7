"""The report of a run: figures and one self-contained page, made from stored results alone."""

from jaxaudit.report.audited import build

__all__ = ["build"]
