"""Imported by Python before anything else, where ``tests/watched`` stands on ``PYTHONPATH``."""

import os

if "ASYNCKFOLD_CHAOS" in os.environ:
    from tests.watched import gate

    gate.watch()
