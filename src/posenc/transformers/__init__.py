"""Models of transformers, stretched and accelerated in place, and their checkpoints."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posenc.transformers.stretching import restore, stretch

__all__ = ["restore", "stretch"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # which import transformers
        from posenc.transformers import stretching

        return getattr(stretching, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
