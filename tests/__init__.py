"""Tests of both scripts: `python3 -m unittest` from the top folder."""

import os
import sys

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# loadgen.py as a process of its own, but compiled once for all of them
LOADGEN = [sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv.pop(1)); import loadgen; "
           "sys.exit(loadgen.main())", TOP]
