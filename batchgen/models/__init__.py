"""The native decoder and how weights get into it. Knows no engine."""
