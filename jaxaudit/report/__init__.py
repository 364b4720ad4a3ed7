"""Reports: a self-contained page and its figures, made from stored results only."""

from jaxaudit.report.audit_page import build

__all__ = ["build"]
