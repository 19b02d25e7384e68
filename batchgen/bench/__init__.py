"""Workloads, peers and ratios, measured in one run."""
