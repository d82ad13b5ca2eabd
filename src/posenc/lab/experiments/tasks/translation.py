"""Translate a parallel text of the user."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from posenc.errors import DataError
from posenc.lab.experiments.results import Metric
from posenc.lab.experiments.sequences import Split, drawn
from posenc.lab.experiments.tasks.common.pairs import Pair, PairTask
from posenc.lab.experiments.tasks.common.parallel import read_parallel
from posenc.lab.experiments.tasks.common.subwords import Subwords, bleu, chrf
from posenc.lab.experiments.tasks.common.task import Defaults, TaskEntry, TaskSettings, times
from posenc.lab.training.seeding import fingerprint

HELD_OUT = 0.05


def _make(settings: TaskSettings) -> PairTask:
    options = settings.options
    if settings.text is None:
        raise DataError(
            "text",
            expected="a parallel text",
            got="none",
            remedy="Give a file with a sentence, a tab and its translation in every line (--text "
            "FILE.tsv), or two files (--text SOURCE --option target=TARGET).",
        )
    target = Path(options["target"]) if options["target"] else None
    text = read_parallel(settings.text, target)
    learned = [line for pair in text.pairs if drawn(pair[0]) >= HELD_OUT for line in pair]
    subwords = Subwords.learn(learned, size=options["vocabulary"])
    sources = subwords.encode([source for source, _ in text.pairs])
    targets = subwords.encode([other for _, other in text.pairs])
    pairs = [
        Pair(name=pair[0], source=source, target=other, answers=[pair[1]])
        for pair, source, other in zip(text.pairs, sources, targets, strict=True)
        if source and other
    ]
    split = Split.of(pairs, settings.lengths, held_out=HELD_OUT)

    def score(written: Sequence[list[int]], pairs: Sequence[Pair]) -> Sequence[float]:
        lines = [subwords.decode(ids) for ids in written]
        references = [pair.answers[0] for pair in pairs]
        return bleu(lines, references)[0], chrf(lines, references)

    return PairTask(
        settings,
        title="Translate sentences, longer than any in training",
        corpus=split.corpus(
            name=f"{text.name}: {len(pairs):,} pairs in {subwords.size:,} subwords",
            sha256=fingerprint(text.sha256, subwords.to_json()),
            files=1 if target is None else 2,
            unit="sentences",
        ),
        split=split,
        source_vocabulary=subwords.size,
        target_vocabulary=subwords.size,
        shared=True,
        metrics=_metrics(),
        score=score,
        cross=options["cross"],
        dropout=options["dropout"],
    )


def _metrics() -> tuple[Metric, ...]:
    metric = partial(Metric, axis="length (subwords of the longer side)", lower_is_better=False)
    return (
        metric(
            key="bleu",
            short="BLEU",
            label="BLEU",
            unit="BLEU",
            description="sacrebleu's BLEU of greedy translations. Sentences at the training "
            "length are held out; longer ones were never trained on.",
            headline=True,
            learned=1.0,
        ),
        metric(
            key="chrf",
            label="chrF",
            unit="chrF",
            description="F-score of runs of characters (sacrebleu), which tells short sentences "
            "apart better.",
        ),
    )


ENTRY = TaskEntry(
    make=_make,
    summary="Translate sentences of a parallel text, longer than any in training",
    data="a text of your own: --text FILE.tsv (sentence, tab, translation), or --text SOURCE with "
    "the option target=TARGET; 5 % held out",
    metric="BLEU (sacrebleu, greedy decoding); chrF",
    expectation="Given enough text of whole sentences, who reads a bag of words is far behind: the "
    "controls nope and shaw@max_distance=0 (Shaw et al. 2018, table 3: 12.5 against 25.8 BLEU). "
    "Sinusoids and learned tables tie (Vaswani et al. 2017, table 3); relative positions are at or "
    "just above them (Shaw et al. 2018).",
    sample={"train_length": 8, "test_lengths": (12,), "options": {"vocabulary": 40}},
    defaults=Defaults(
        encodings=("sinusoidal", "learned", "rope", "t5", "alibi", "shaw"),
        references=("nope", "shaw@max_distance=0"),
        train_length=24,
        test_lengths=times(1, 1.5, 2),
        steps=1000,
        batch=64,
        learning_rate=5e-3,
    ),
    options={"target": "", "vocabulary": 1000, "cross": "nope", "dropout": 0.1},
    length_unit="subwords",
    reads_text=True,
)
