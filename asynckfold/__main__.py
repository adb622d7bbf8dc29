"""``python -m asynckfold``."""

import sys

from asynckfold.cli import program

sys.exit(program())
