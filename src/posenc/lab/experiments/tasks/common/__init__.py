"""Shared parts of tasks: the interface, rewriting of symbols, grammars and data."""
