"""Tests of the diagnosis of models."""
