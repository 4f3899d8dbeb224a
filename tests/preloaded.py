"""Imported by the process that ranks of the tests are forked from (`ranks.py`): all that they will need."""

from tests.imports import import_all

import_all()
