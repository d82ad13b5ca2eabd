"""What a comparison compares: encodings, and trained models looked at in another way."""

from __future__ import annotations

from dataclasses import dataclass

from posenc.errors import ArgumentError, UnknownNameError
from posenc.registry import ENCODINGS

__all__ = ["Variant", "require_encoding"]


@dataclass(frozen=True)
class Variant:
    """A trained model, and how it is looked at when it is measured.

    Args:
        encoding: what it was trained with: a name, or several joined by ``+``.
        window: attention sees this many tokens only (itself included) while it is measured;
            None: as trained.
    """

    encoding: str
    window: int | None = None

    @classmethod
    def parse(cls, name: str, *, window: int) -> Variant:
        """The variant called ``name``: ``rope``, ``t5+sinusoidal``, ``rope|window=64``.

        Args:
            name: as above; ``rope|window`` without a number takes ``window``.
            window: the default width.

        Raises:
            UnknownNameError: on an encoding that does not exist.
            ArgumentError: on anything after ``|`` but ``window`` or ``window=`` and a number.
        """
        encoding, bar, option = name.partition("|")
        require_encoding(encoding)
        if not bar:
            return cls(encoding)
        key, equals, value = option.partition("=")
        if key == "window" and not equals:
            return cls(encoding, window)
        if key == "window" and value.isdigit() and int(value) > 0:
            return cls(encoding, int(value))
        raise ArgumentError(
            "encoding",
            expected="nothing, |window or |window=NUMBER after its name",
            got=repr(name),
            remedy=f"Write {encoding}|window={window}, for example.",
        )

    @property
    def name(self) -> str:
        """The name that ``parse`` reads, in full."""
        return self.encoding if self.window is None else f"{self.encoding}|window={self.window}"


def require_encoding(name: str) -> None:
    """Refuse a name that is neither in the registry nor a sum of names that are.

    Raises:
        UnknownNameError: with the close matches.
        ArgumentError: on an encoding of images.
    """
    for part in name.split("+"):
        if part not in ENCODINGS:
            raise UnknownNameError.of("encoding", part, ENCODINGS)
        if not ENCODINGS[part].claims.serves(1):
            raise ArgumentError(
                "encoding",
                expected="one for text",
                got=f"{part}, whose positions have {ENCODINGS[part].claims.axes} axes",
                remedy="See posenc list for those that serve one axis.",
            )
