"""Many processes on one job: which of them this one is, who computes what, and how they are started."""
