"""Tests of both scripts: `python3 -m unittest` from the top folder."""
