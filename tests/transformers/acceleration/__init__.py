"""Tests of transformers models with posenc's attention under them."""
