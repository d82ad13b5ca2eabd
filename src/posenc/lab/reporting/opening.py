"""The opening of a report: the same words on its page, on a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A row of the table of verdicts.

    Args:
        name: of what is judged, as in the charts.
        words: a word a column; "" where there is none.
        why: the reason for the words.
        note: on what is judged.
        reference: set apart, for comparison.
    """

    name: str
    words: tuple[str, ...]
    why: str = ""
    note: str = ""
    reference: bool = False


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """The table of verdicts.

    Args:
        title: with the length that they are on.
        columns: what is judged.
        rows: the best first.
        guide: the two words that matter most, in a line.
        meanings: definitions of the words that occur.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[Verdict, ...]
    guide: str = ""
    meanings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A way to settle verdicts: ``text`` says which and how, ``command`` is the command line.

    The command is empty where there is none, or it is not known.
    """

    text: str
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The answer of a report.

    Args:
        headline: the finding in at most 90 characters.
        verdicts: a word or two a name.
        remedies: ways to settle what is open.
    """

    headline: str
    verdicts: Verdicts
    remedies: tuple[Remedy, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Headline, remedies, and verdicts by name and column; null where there is no word."""
        columns = self.verdicts.columns
        return {
            "headline": self.headline,
            "verdicts": {
                row.name: dict(zip(columns, (word or None for word in row.words), strict=True))
                for row in self.verdicts.rows
            },
            "remedies": [asdict(remedy) for remedy in self.remedies],
        }


def meanings(words: Iterable[str], meaning: Callable[[str], str]) -> dict[str, str]:
    """Definitions of words, each once and in their order; "" has none."""
    return {word: meaning(word) for word in dict.fromkeys(words) if word}
