"""Models of transformers: attention by posenc, stretched positions, moved caches, and diagnosis.

The package transformers is imported with the first name that is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posenc.transformers.acceleration import accelerate
    from posenc.transformers.caches import joined, moved
    from posenc.transformers.doctor.diagnosis import diagnose
    from posenc.transformers.served import check_served
    from posenc.transformers.stretching import restore, stretch

__all__ = ["accelerate", "check_served", "diagnose", "joined", "moved", "restore", "stretch"]

_MODULES = {
    "accelerate": "posenc.transformers.acceleration",
    "check_served": "posenc.transformers.served",
    "diagnose": "posenc.transformers.doctor.diagnosis",
    "joined": "posenc.transformers.caches",
    "moved": "posenc.transformers.caches",
    "restore": "posenc.transformers.stretching",
    "stretch": "posenc.transformers.stretching",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
