"""On PYTHONPATH: a process that has everything but asynckfold."""

import importlib.metadata
import sys

_version = importlib.metadata.version


def version(name):
    """Know nothing of one package."""
    if name == "asynckfold":
        raise importlib.metadata.PackageNotFoundError(name)
    return _version(name)


class Hidden:
    """Finds no module of it."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "asynckfold":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


importlib.metadata.version = version
sys.meta_path.insert(0, Hidden)
