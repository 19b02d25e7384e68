"""What happened, in numbers: counters and the summary."""
