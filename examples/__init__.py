"""Whole programs on posenc's public interface."""
