"""Telemetry logs of other people's training runs: CSV, JSON, what verl prints, TensorBoard's event files."""

from jaxaudit.logs.common_grid import together as together
from jaxaudit.logs.log import Log as Log
from jaxaudit.logs.reading import read as read
