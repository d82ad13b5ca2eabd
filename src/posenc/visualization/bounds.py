"""Ranges of possible values."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """Range of possible values."""

    low: float = -math.inf
    high: float = math.inf

    def clip(self, value: float) -> float:
        """The nearest possible value."""
        return min(max(value, self.low), self.high)
