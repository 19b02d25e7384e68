"""Measurements: batchgen against its peers on real data, and what to run on a machine with a GPU."""
