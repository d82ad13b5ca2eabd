"""What stretching a model was found to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Claimed", "Findings", "Reading", "Study"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """All that was measured of one model.

    Args:
        loss: context length → bits a token, on the same tokens at every length.
        by_position: (position, bits a token) in the longest context, the same tokens at each.
        needles: context length → share found at each of ``Study.depths``.
        copied: context length → share of a repeated word's tokens that is copied.
        tokens_per_second: of one pass over the longest context.
        peak_memory_bytes: which that pass took beyond the process before it.
        steps: of fine-tuning that came before.
        seconds: which these took.
        windows: bits a token of each stretch of text that ``loss`` at the longest is the mean of.
    """

    loss: Mapping[int, float]
    by_position: tuple[tuple[float, float], ...]
    needles: Mapping[int, tuple[float, ...]]
    copied: Mapping[int, float]
    tokens_per_second: float
    peak_memory_bytes: int
    steps: int = 0
    seconds: float = 0.0
    windows: tuple[float, ...] = ()

    def found(self, length: int) -> float:
        """Share of the needles found in contexts of one length, at whatever depth."""
        shares = self.needles[length]
        return sum(shares) / len(shares)


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """What a method says of itself.

    Args:
        summary, expect, training, cost: see ``Extension``.
        transformers: the ``rope_type`` that transformers knows it by.
        decodes_as_whole: see ``ExtensionClaims``.
        cite: authors, year and title.
    """

    summary: str
    expect: str
    training: str
    cost: str
    transformers: str | None
    decodes_as_whole: bool
    cite: str


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What was found of one method.

    Args:
        key: as it was written; ``direct`` and ``window`` are the baselines.
        role: ``"method"`` or ``"baseline"``.
        claims: of its parts.
        advice: what to know before it is used like this.
        refusal: why there is nothing.
        writable: whether a checkpoint can hold it.
        served: the ``rope_type`` that transformers runs it as; empty: only posenc runs it.
        untuned: as it is; None where that is refused.
        tuned: after fine-tuning; None where there was none.
        failed: why not, where there should have been.
    """

    key: str
    role: str
    claims: tuple[Claimed, ...] = ()
    advice: tuple[str, ...] = ()
    refusal: str = ""
    writable: bool = False
    served: str = ""
    untuned: Reading | None = None
    tuned: Reading | None = None
    failed: str = ""

    def reading(self, tuned: bool) -> Reading | None:
        """After fine-tuning or before."""
        return self.tuned if tuned else self.untuned


@dataclass(frozen=True, kw_only=True)
class Study:
    """A checkpoint stretched by several methods, or measured as it is.

    Args:
        checkpoint: name of its folder.
        family: ``model_type``.
        parameters: of the model.
        length: it was trained at.
        factor: 1 where nothing was stretched.
        lengths: of the contexts that were measured.
        depths: of the needles, as shares of the context.
        unit: what a token is, ``"byte"`` or ``"token"``.
        needles: what they are, in a phrase.
        chance: how often a guess finds one.
        copy_chance: how often a guess copies a token.
        text: what was read, in a phrase.
        sha256: of it.
        targets: tokens that losses are means over.
        asked: needles for each depth and length.
        findings: the baselines first.
        chosen: the method that was written, if any, and why.
        reason: see there.
        finetune: steps, rate and positions of fine-tuning; empty for none.
        command, created, versions, device, threads, seed, seconds: how to get it again.
    """

    checkpoint: str
    family: str
    parameters: int
    length: int
    factor: float
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    unit: str
    needles: str
    chance: float
    copy_chance: float
    text: str
    sha256: str
    targets: int
    asked: int
    findings: tuple[Findings, ...]
    chosen: str | None = None
    reason: str = ""
    finetune: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    created: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    device: str = ""
    threads: int = 1
    seed: int = 0
    seconds: float = 0.0

    @property
    def goal(self) -> int:
        """The length that was asked for."""
        return self.lengths[-1]

    @property
    def tuned(self) -> bool:
        """Whether anything was fine-tuned."""
        return any(each.tuned is not None for each in self.findings)

    def of(self, key: str) -> Findings | None:
        """What was found of one method."""
        return next((each for each in self.findings if each.key == key), None)

    def ranked(self, *, tuned: bool = False) -> list[tuple[Findings, Reading]]:
        """All that was measured, the least loss at the goal first."""
        found = [(each, each.reading(tuned)) for each in self.findings]
        measured = [(each, reading) for each, reading in found if reading is not None]
        return sorted(measured, key=lambda pair: pair[1].loss[self.goal])

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)
