"""Families of transformers models, one a file, named as their package in transformers."""
