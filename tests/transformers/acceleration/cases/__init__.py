"""Small models of every accelerated family, with odd configurations."""

from __future__ import annotations

from tests.transformers.acceleration.case import Case
from tests.transformers.acceleration.cases import images, sounds, texts

FAMILIES = {**texts.CASES, **images.CASES, **sounds.CASES}

CASES: dict[str, Case] = {
    f"{family}-{name}": case
    for family in sorted(FAMILIES)
    for name, case in FAMILIES[family].items()
}
"""Cases by the family's name and their own."""
