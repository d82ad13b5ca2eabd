"""What parts have read from the tokens, as it comes with a layout."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from posenc.errors import ArgumentError
from posenc.layout import Layout

__all__ = ["require_signal"]


def require_signal(layout: Layout, name: str, width: int) -> Float[Tensor, "b L S"]:
    """The layout's signal.

    Raises:
        ArgumentError: when it has none, or one of another width.
    """
    if layout.signal is None or layout.signal.shape[-1] != width:
        raise ArgumentError(
            "layout",
            expected=f"a signal of {width} numbers a token, which {name} reads from the tokens",
            got="none" if layout.signal is None else f"{layout.signal.shape[-1]}",
            remedy="Use Attention, or encoding.observe(x, layout) before attend.",
        )
    return layout.signal
