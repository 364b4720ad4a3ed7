"""Logs of other trainers: CSV, JSON, what trainers print, TensorBoard's and MLflow's files."""

from jaxaudit.logs.log import Attempt as Attempt
from jaxaudit.logs.log import Log as Log
from jaxaudit.logs.log import LogRun as LogRun
from jaxaudit.logs.log import Series as Series
from jaxaudit.logs.reading import read as read
