"""A process that imports this module writes no reports. Reports take seconds, and are tested elsewhere."""

import sys
from types import ModuleType

stand_in = ModuleType("jaxaudit.report")
stand_in.__dict__["build"] = lambda folder: folder
sys.modules[stand_in.__name__] = stand_in
