"""Access to a layout's signal, the per-token numbers computed by ``observe``."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from posenc.errors import ArgumentError
from posenc.layout import Layout


def require_signal(layout: Layout, name: str, width: int) -> Float[Tensor, "b L S"]:
    """The layout's signal, ``[B|1, L, width]``.

    Raises:
        ArgumentError: when it is missing or has another width.
    """
    if layout.signal is None or layout.signal.shape[-1] != width:
        raise ArgumentError(
            "layout",
            expected=f"a signal of {width} numbers per token, computed by {name} from the tokens",
            got="none" if layout.signal is None else f"{layout.signal.shape[-1]}",
            remedy="Use Attention, or encoding.observe(x, layout) before attend.",
        )
    return layout.signal
