"""Imported by a process, it makes no reports: they take seconds, of importing too, and are tested elsewhere."""

import sys
from types import ModuleType

stand_in = ModuleType("jaxaudit.report")
stand_in.__dict__["build"] = lambda folder: folder
sys.modules[stand_in.__name__] = stand_in
