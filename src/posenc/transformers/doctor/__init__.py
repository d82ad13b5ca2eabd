"""Diagnosis of the positions of a model of transformers, by running it without weights."""
