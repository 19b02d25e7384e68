"""Rows to token ids and back: template, tokenizer, token store. Knows no engine."""
