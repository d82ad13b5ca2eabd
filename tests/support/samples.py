"""A comparison and a study as they might come out, for tests of what is made from them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from posenc.lab.evaluation.results import Findings, Study, StudyReading
from posenc.lab.evaluation.suites.needles import ByteNeedles, letters
from posenc.lab.evaluation.suites.next_token import NextTokenSuite
from posenc.lab.experiments import results
from posenc.lab.experiments.corpus import Pieces
from posenc.lab.reporting.judge import Metric
from posenc.models import Decoder, DecoderConfig


def metric(key: str, label: str, unit: str, axis: str, description: str, **options: Any) -> Metric:
    """A measure of which less is better if it is in bits; others are shares."""
    words = {"label": label, "unit": unit, "axis": axis, "description": description}
    kind = {"lower_is_better": "bits" in unit, "headline": key in ("loss", "accuracy")}
    return Metric(key=key, **words, **kind, **options)


BITS, LENGTH = "bits per byte", "context length (bytes)"
FREQUENCIES = {"trivial": 4.9, "trivial_rule": "byte frequencies"}
SAME = "The same held-out bytes at every length: a longer window only adds context."
LOSS = metric("loss", "Loss on the same bytes", BITS, LENGTH, SAME, **FREQUENCIES)
WINDOWS = ("position in the context (bytes)", "In sliding windows of 512 bytes.")
POSITION = ("loss_by_position", "Loss by position in the context")
BY_POSITION = metric(*POSITION, BITS, *WINDOWS, **FREQUENCIES)
ASKED = "One of 16 marked bytes stands far back; asked at the end, is it named?"
RECALL = metric("recall", "Needles found", "share of needles", LENGTH, ASKED, trivial=1 / 16)
MEAN = "Mean over the steps since the point before."
TRAINING = metric("training_loss", "Training loss", BITS, "training step", MEAN)
SHARE, TOKENS = "share of sequences", "context length (tokens)"
RIGHT = "Every token of the answer is right."
ACCURACY = metric("accuracy", "Sequences right", SHARE, TOKENS, RIGHT, trivial=0.0)

LOSSES = {
    "alibi": (2.90, 2.79, 2.79, 2.85),
    "t5": (2.93, 2.86, 2.97, 3.24),
    "rope": (2.78, 2.74, 3.33, 3.90),
    "sinusoidal": (3.03, 3.87, 4.27, 4.89),
    "learned": (3.05,),
    "nope": (3.27, 3.33, 3.43, 3.59),
    "rope|window=64": (2.78, 2.73, 2.73, 2.73),
}
ROLES = {"nope": "control", "rope|window=64": "baseline"}
REASON = "the learned table ends at position 63"


def compared(*names: str) -> tuple[results.ComparedEncoding, ...]:
    """Encodings of a comparison, in the roles that these names have."""
    found = []
    for name in names:
        label, note = name.replace("|window=64", " (window 64)"), f"Why {name} is here."
        role = ROLES.get(name, "candidate")
        found.append(results.ComparedEncoding(name=name, label=label, role=role, note=note))
    return tuple(found)


def sample(
    *,
    seeds: tuple[int, ...] = (0, 1, 2),
    lengths: tuple[int, ...] = (64, 128, 256, 512),
    metric: Metric = LOSS,
    complete: bool = True,
) -> results.Comparison:
    """A comparison with plausible numbers, the same at every call."""
    noise = random.Random(0)
    measurements, refusals, runs = [], [], []

    def add(name: str, seed: int, key: str, x: float, value: float) -> None:
        measurements.append(
            results.Measurement(subject=name, seed=seed, metric=key, x=x, value=value)
        )

    for name, losses in LOSSES.items():
        for seed in seeds:
            shared = 0.02 * seed
            for loss, length in zip(losses, lengths, strict=False):
                value = loss + shared + noise.gauss(0, 0.01)
                if metric.key == ACCURACY.key:
                    value = max(0.0, 1.0 - (value - 2.6) / 2)
                add(name, seed, metric.key, length, value)
                add(name, seed, "recall", length, min(1.0, max(0.03, 1.4 - value / 3)))
            for bin_ in range(len(losses) * 4 if len(lengths) > 1 else 4):
                base = losses[min(bin_ // 4, len(losses) - 1)]
                add(name, seed, "loss_by_position", 16 + 32 * bin_, base + 0.4 / (bin_ + 1))
            if name not in ROLES or name == "nope":
                for step in range(20, 601, 20):
                    add(name, seed, "training_loss", step, losses[0] + 3 * 40 / (40 + step))
            cost = {"parameters": 147_000 + 128 * len(name), "peak_memory_bytes": 420 * 2**20}
            speed = 90_000 + 4000 * len(name) + 500 * seed
            time = {"steps": 600, "tokens_per_second": speed, "train_seconds": 13.5}
            runs.append(results.TrainedRun(subject=name, seed=seed, **cost, **time))
        refusals += [
            results.RefusedMeasurement(subject=name, metric=metric.key, x=length, reason=REASON)
            for length in lengths[len(losses) :]
        ]
    text = {"train_bytes": 4_900_000, "held_out_bytes": 500_000, "sha256": "ab" * 32}
    library = "the Python 3.11 standard library's source"
    provenance = results.Provenance(
        command="posenc compare --encodings rope,alibi,t5 --out <demo>",
        created="2026-01-01T12:00:00+00:00",
        versions={"posenc": "0.1.0", "python": "3.11.7", "torch": "2.13.0"},
        device="cpu",
        threads=1,
        seeds=seeds,
        corpus=results.Corpus(name=library, files=300, **text),
        settings={"width": 64, "layers": 2, "heads": 4, "steps": 600, "batch": 32},
    )
    return results.Comparison(
        task="language",
        title="Next-byte prediction",
        train_length=lengths[0],
        test_lengths=lengths,
        metrics=(metric, BY_POSITION, RECALL, TRAINING),
        subjects=compared(*LOSSES),
        runs=tuple(runs),
        measurements=tuple(measurements),
        refusals=tuple(refusals),
        provenance=provenance,
        complete=complete,
    )


def altered(
    comparison: results.Comparison,
    value: float | Callable[[results.Measurement], float],
    subject: str | None = None,
    metric: str | None = None,
    x: float | None = None,
) -> results.Comparison:
    """The comparison with other values at these measurements, or at all."""

    def chosen(m: results.Measurement) -> bool:
        found = ((subject, m.subject), (metric, m.metric), (x, m.x))
        return all(wanted in (None, given) for wanted, given in found)

    return replace(
        comparison,
        measurements=tuple(
            replace(m, value=value(m) if callable(value) else value) if chosen(m) else m
            for m in comparison.measurements
        ),
    )


STRETCHED = {
    "direct": (5.1, 0.05),
    "window": (2.4, 0.06),
    "yarn": (2.31, 0.62),
    "ntk": (2.36, 0.41),
    "interpolate": (2.55, 0.22),
    "rerope": (2.34, 0.71),
    "self_extend": (2.33, 0.69),
    "cut": (2.42, 0.05),
    "dynamic_ntk": (2.41, 0.37),
    "linear+log_n": (2.6, 0.2),
    "longrope": (2.39, 0.44),
}
LENGTHS = (128, 256, 512)


def studied(suite: NextTokenSuite, lengths: tuple[int, ...], **facts: Any) -> dict[str, Any]:
    """Facts of a study of a tiny Llama on bytes."""
    model = {"checkpoint": "tiny", "family": "llama", "length": lengths[0], "lengths": lengths}
    text = {"text": "a text", "sha256": "ab" * 32, "unit": "byte", "targets": 64, "asked": 64}
    needles = {"needles": "a marked byte far back", "metrics": suite.facts("byte")["metrics"]}
    return {**model, **text, **needles, **facts}


def stretched_sample() -> Study:
    """A study of a stretched checkpoint with plausible numbers, the same at every call."""
    suite = NextTokenSuite(
        torch.zeros(512), Pieces((512,)), LENGTHS[::2], ByteNeedles(), letters(), seed=0, windows=1
    )
    depths = (0.1, 0.5, 0.9)
    findings = []
    for key, (loss, share) in STRETCHED.items():
        reading = StudyReading(
            loss={n: 2.3 + (loss - 2.3) * place / 2 for place, n in enumerate(LENGTHS)},
            by_position=tuple((8.0 + 16 * n, loss + 1 / (1 + n)) for n in range(32)),
            needles={n: tuple(share * (1 + d) / 2 for d in depths) for n in LENGTHS},
            copied=dict.fromkeys(LENGTHS, 0.9 * share),
            per_second=12_000 - 900 * len(key),
            peak_memory_bytes=30_000_000 + 10**6 * len(key),
            pieces={"loss": {512: tuple(loss + 0.01 * ((7 * n) % 5 - 2) for n in range(64))}},
        )
        role = "baseline" if key in ("direct", "window") else "method"
        findings.append(Findings(key=key, role=role, writable=True, untuned=reading))
    return Study(
        **studied(
            suite, LENGTHS, factor=4.0, parameters=147_000, chance=1 / 16, copy_chance=1 / 26
        ),
        guide="The same bytes at every length.",
        depths=depths,
        findings=tuple(findings),
        chosen="rerope",
        reason="It finds the most needles.",
        command="posenc extend tiny --method all --factor 4",
        created="2026-01-01T12:00:00+00:00",
        versions={"posenc": "0.1.0", "torch": "2.13.0"},
        device="cpu",
        seconds=60.0,
    )


def next_token_model(
    tokens: Sequence[int], *, length: int, encoding: str = "rope", vocabulary: int = 256
) -> Decoder:
    """A decoder, blind to all but the last token, that knows what follows it in ``tokens``.

    It beats the frequencies of these tokens, of which there are 32 different ones at most.
    """
    dim = 32
    sizes = {"vocabulary": vocabulary, "dim": dim, "layers": 1, "heads": 2, "max_length": length}
    model = Decoder(DecoderConfig(encoding=encoding, tied=False, **sizes))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    nn.init.ones_(model.norm.weight)
    nn.init.ones_(model.get_parameter("blocks.0.attention_norm.weight"))
    for side in ("query", "key"):  # by which a rotation can be known; what is attended to is not
        nn.init.normal_(model.get_parameter(f"blocks.0.attention.{side}.weight"))
    kinds = {token: kind for kind, token in enumerate(sorted(set(tokens)))}
    counts = torch.full((vocabulary, dim), 0.01)
    for before, after in pairwise(tokens):
        counts[after, kinds[before]] += 1
    with torch.no_grad():
        model.embedding.weight[:, -1] = float(len(kinds) < dim)  # all others are of one kind
        model.embedding.weight[list(kinds), -1] = 0
        for token, kind in kinds.items():
            model.embedding.weight[token, kind] = 1
        # a norm makes sqrt(dim) of the one feature that a token has
        model.output.weight.copy_((counts / counts.sum(0)).log() / dim**0.5)
    return model
