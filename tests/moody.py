"""A system for test_bench.py that fails on demand; on its own, so that its process imports little."""

import sys


class Moody:
    def __init__(self, model, threads):
        if model == "absent":
            raise ValueError("no such\nmodel")

    def run(self, x):
        if x < 0:
            raise RuntimeError("negative")
        return x + 1

    def die(self):
        sys.exit(3)
