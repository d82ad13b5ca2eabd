"""The encoding without extension."""

from __future__ import annotations

from posenc.encoding import Encoding
from posenc.extension.entry import Extension


def direct(encoding: Encoding) -> Encoding:
    """The unchanged encoding, the baseline of comparisons.

    Args:
        encoding: any.

    >>> import posenc
    >>> from posenc.extension import direct
    >>> rope = posenc.create("rope", head_dim=8)
    >>> direct(rope) is rope
    True
    """
    return encoding


ENTRY = Extension(
    function=direct,
    summary="Uses the encoding as it is.",
    on=("any",),
    short_unchanged=True,
    training="needed",
    expect="What the encoding itself does: RoPE degrades at once, ALiBi hardly.",
    transformers="default",
)
