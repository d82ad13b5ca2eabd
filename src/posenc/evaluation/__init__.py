"""Trained models stretched past their length, and what that does to them."""
