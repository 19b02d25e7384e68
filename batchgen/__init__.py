"""batchgen: offline batch inference for language models. Import the part you need; this file imports nothing heavy."""

__version__ = "0.1.0"
