"""The directories of the tests' files."""

from pathlib import Path

HELPERS = Path(__file__).resolve().parent
TESTS = HELPERS.parent
DATA = TESTS / "data"
ROOT = TESTS.parent
EXPERIMENTS = ROOT / "experiments"
