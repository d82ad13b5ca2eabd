"""Random sources and hashes that depend on their arguments alone."""

from __future__ import annotations

import hashlib

import torch


def generator(*numbers: int) -> torch.Generator:
    """One that differs with each of the numbers (torch itself reads only 32 bits of a seed)."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))


def fingerprint(*decisive: object) -> str:
    """A hash of whatever decides a step of training; each must have a stable ``repr``."""
    return hashlib.sha256(repr(decisive).encode()).hexdigest()
