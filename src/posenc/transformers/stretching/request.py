"""The arguments of ``stretch``, and the encoding that they make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posenc.encoding import Encoding
from posenc.errors import ArgumentError
from posenc.extension import NotApplicable, extend
from posenc.transformers.stretching.frequencies import Of


@dataclass(frozen=True)
class Request:
    """Arguments of ``stretch``."""

    method: str
    factor: float | None
    length: int | None
    of: Of
    windows: bool
    options: dict[str, Any]

    @property
    def longest(self) -> int | None:
        """The new length, if it is known."""
        if self.factor is None or self.length is None:
            return None
        return round(self.factor * self.length)

    def extend(self, encoding: Encoding, length: int | None = None, **defaults: int) -> Encoding:
        """The encoding as the method stretches it.

        Args:
            length: of training, if none was given.
            defaults: of options.

        Raises:
            ArgumentError: as ``posenc.extension.extend``.
        """
        length = length if self.length is None else self.length
        options = {**defaults, **self.options}
        try:
            return extend(encoding, self.method, factor=self.factor, length=length, **options)
        except NotApplicable as error:
            if self.of == "theta" or "already" not in error.got:
                raise
            raise ArgumentError(
                "model",
                expected=error.expected,
                got=error.got,
                remedy="of='theta' begins from the frequencies before that extension.",
            ) from error

    def saved(self) -> dict[str, Any]:
        """The arguments for the config."""
        extra: dict[str, Any] = {"windows": True} if self.windows else {}
        extra |= {} if self.of == "frequencies" else {"of": self.of}
        context = {"method": self.method, "factor": self.factor, "length": self.length}
        return {**context, "options": self.options | extra}
