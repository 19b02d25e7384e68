"""Measurements: batchgen against its peers on real data, and what to run on a machine with a GPU."""

import os

from batchgen.environment import MATHS

# For all systems alike, before any of them loads its OpenMP. (MKL's mode is set in batchgen's own process only.)
os.environ.setdefault("OMP_WAIT_POLICY", MATHS["OMP_WAIT_POLICY"])
