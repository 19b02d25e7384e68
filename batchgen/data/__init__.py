"""Rows in and rows out: readers, part writer, commit log, merge. Knows no tokens."""
