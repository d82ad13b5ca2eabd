"""Scores of translations by sacrebleu."""

from __future__ import annotations

from collections.abc import Sequence


def bleu(written: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """BLEU from 0 to 100 as sacrebleu computes it (Post 2018), and what was computed."""
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU()
    score = metric.corpus_score(list(written), [list(references)]).score
    return float(score), str(metric.get_signature())


def chrf(written: Sequence[str], references: Sequence[str]) -> float:
    """chrF from 0 to 100 (Popović 2015), which unlike BLEU distinguishes short sentences."""
    from sacrebleu.metrics.chrf import CHRF

    return float(CHRF().corpus_score(list(written), [list(references)]).score)
