"""Small models of every accelerated family, one file a family, with odd configurations."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from tests.transformers.acceleration.case import Case

CASES: dict[str, Case] = {
    f"{module.name}-{name}": case
    for module in iter_modules(__path__)
    for name, case in import_module(f"{__name__}.{module.name}").CASES.items()
}
"""Cases by the family's name and their own."""
