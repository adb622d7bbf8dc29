"""``python -m asynckfold``."""

import sys

from asynckfold.cli import main

sys.exit(main())
