"""The opening of a report: its verdict, headline and words, on page, terminal and as JSON.

Words are decided by ``judge.py``; the sentences are in ``templates/sentences.jinja``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from posenc.lab.reporting.judge import BREAKS, HOLDS
from posenc.lab.reporting.numbers import sentence

LONGEST = 90
"""Characters of a headline, at most."""


def shortened(name: str, most: int) -> str:
    """A name of at most ``most`` characters, its end replaced by an ellipsis."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def at_times(length: int, trained: int, *, size: bool) -> str:
    """A length (``size``: of images) in times of the trained one: ``at 4 × the trained length``."""
    times = "" if length == trained else f"{length / trained:.3g} × "
    return f"at {times}the trained {'size' if size else 'length'}"


def fitting(texts: Iterable[str]) -> str:
    """The first that fits a line; the most detailed comes first."""
    return next(text for text in texts if len(text) <= LONGEST)


def of_one(label: str, verdict: str, at: str, changes: Sequence[tuple[str, ...]]) -> str:
    """The verdict on a model alone, with as many of its changes as fit.

    Args:
        label: of the model.
        verdict: in a word.
        at: the length of the verdict, in words.
        changes: metric, value at the trained length and value there, the deciding one first.
    """
    facts = {"label": label, "verdict": verdict, "at": at}
    return fitting(sentence("alone", changes=c, **facts) for c in (changes, changes[:1], ()))


TONES = {
    **dict.fromkeys(("holds", "learned", "fast", "same"), "good"),
    **dict.fromkeys(("degrades", "unsure", "tied", "slower"), "fair"),
    **dict.fromkeys(("breaks", "unlearned", "overfitted", "slow", "differs", "refuses"), "bad"),
    **dict.fromkeys(("untestable", "unfinished", "unknown"), "none"),
}
"""Word → colour on pages and terminals."""

UNSURE = "the 95 % interval reaches from the best of these words to the worst"


def length_words(than: str) -> dict[str, str]:
    """Definitions of the verdicts on length.

    Args:
        than: what values are held to, in words.
    """
    return {
        "holds": f"at most {HOLDS:.0%} worse than {than}",
        "degrades": f"{HOLDS:.0%} to {BREAKS:.0%} worse than {than}",
        "breaks": f"more than {BREAKS:.0%} worse than {than}",
        "unsure": UNSURE,
        "learned": "passed every gate at the only length that was tested",
        "overfitted": "does well on data it was trained on alone",
        "tied": "cannot be told from the control, at the training length or at the longest",
        "unfinished": "not trained to the end",
        "untestable": "could not be measured",
    }


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


def meanings(words: Iterable[str], definitions: Mapping[str, str]) -> dict[str, str]:
    """Definitions of words, each once and in their order; "" has none."""
    return {word: definitions[word] for word in dict.fromkeys(words) if word}


def defined(definitions: Mapping[str, str], *words: str) -> str:
    """Definitions of the words that matter most, in a line."""
    text = "; ".join(f"{word}: {definitions[word]}" for word in words)
    return f"{text[0].upper()}{text[1:]}."
