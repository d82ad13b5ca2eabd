"""Checkpoint folders of transformers, read and written without transformers."""
