"""Shapes written in signatures are checked here, in tests only."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
