"""The page of a comparison's report, from its records and the summary of them."""

from __future__ import annotations

from collections.abc import Iterator

from posenc.lab.experiments.charts import draw_charts, subject_looks
from posenc.lab.experiments.gates import reason
from posenc.lab.experiments.results import Comparison
from posenc.lab.experiments.summary import Summary
from posenc.lab.experiments.verdicts import Row, longest_measured
from posenc.lab.reporting.numbers import count_in_words, counted, size_in_words
from posenc.lab.reporting.opening import Opening, Verdict, Verdicts, meanings
from posenc.lab.reporting.page import Cell, Column, Page, TableSection, Term, TextSection
from posenc.lab.reporting.sentences import sentence
from posenc.lab.reporting.verdicts import BREAKS, HOLDS, SEVERITY


def comparison_page(comparison: Comparison, summary: Summary) -> Page:
    """The page with its charts."""
    provenance, recall = comparison.provenance, comparison.metric("recall")
    corpus, metric = provenance.corpus, comparison.headline
    lists = [("", summary.answer)]
    if comparison.expectation:
        lists.append(("Expected from the literature", (comparison.expectation,)))
    judged = sentence("how_judged", noun=metric.noun, recall=recall) if recall else None
    method = TextSection(
        key="method",
        title="How this was measured",
        paragraphs=(sentence("how_compared"), *([judged] if judged else [])),
        terms=(
            *(Term(name=m.label, note=m.unit, text=(m.description,)) for m in comparison.metrics),
            *(
                Term(name=s.label, note=s.role, text=(s.note,))
                for s in comparison.subjects
                if s.note
            ),
        ),
    )
    return Page(
        facts=tuple(_facts(comparison)),
        opening=opening(comparison, summary),
        charts=draw_charts(comparison, summary),
        looks=subject_looks(comparison),
        sections=(
            _table(comparison, summary),
            TextSection(key="findings", title="In words", lists=tuple(lists)),
            method,
        ),
        command=provenance.command,
        settings={
            "corpus": _corpus(comparison),
            "sha256": corpus.sha256,
            "seeds": provenance.seeds,
            "device": f"{provenance.device}, {counted(provenance.threads, 'thread')} a process",
            "versions": " · ".join(f"{n} {value}" for n, value in provenance.versions.items()),
            **provenance.settings,
            "made": provenance.created,
        },
        note="Beside this page: every chart as PNG and SVG, comparison.json, measurements.csv, "
        "summary.csv.",
    )


def opening(comparison: Comparison, summary: Summary) -> Opening:
    """The headline, verdicts by loss and by recall, and ways to settle what is open."""
    metric, recall = comparison.headline, comparison.metric("recall")
    longest = longest_measured(comparison, summary.rows)
    rows = [
        Verdict(
            name=row.subject.label,
            words=(row.predicts, row.finds or "") if recall else (row.predicts,),
            why=reason(comparison, row),
            note=row.subject.note,
            reference=row.subject.role != "candidate",
        )
        for row in summary.rows
    ]
    shares = {"holds": HOLDS, "breaks": BREAKS, "than": f"at {comparison.train_length}"}
    facts: dict[str, dict[str, object]] = dict.fromkeys(SEVERITY, shares)
    facts |= {"overfitted": {"metric": metric}}
    facts |= {
        "unlearned": {
            "metrics": [m for m in (metric, recall) if m and (m.learned, m.trivial) != (None, None)]
        }
    }
    words = (word for row in summary.rows for word in (row.predicts, row.finds or "", row.verdict))
    return Opening(
        headline=summary.headline,
        verdicts=Verdicts(
            title=f"Verdicts at {longest} {comparison.length_unit}",
            columns=(metric.noun, *([recall.noun] if recall else [])),
            rows=tuple(rows),
            guide=sentence("length_words", **shares) if len(comparison.test_lengths) > 1 else "",
            meanings=meanings(words, lambda word: sentence(f"means_{word}", **facts.get(word, {}))),
        ),
        remedies=summary.remedies,
    )


def _facts(comparison: Comparison) -> Iterator[str]:
    """The task, the lengths, the seeds and the data."""
    lengths = comparison.test_lengths
    longer = f", tested at up to {lengths[-1]}" if len(lengths) > 1 else ""
    yield f"posenc compare · {comparison.title}"
    yield f"trained at {comparison.train_length} {comparison.length_unit}{longer}"
    if comparison.complete:
        yield counted(comparison.most_seeds, "seed")
    else:
        yield f"unfinished: {len(comparison.runs)} runs so far"
    yield comparison.provenance.corpus.name


def _corpus(comparison: Comparison) -> str:
    """The data with their sizes."""
    corpus = comparison.provenance.corpus
    text = corpus.name + (f": {counted(corpus.files, 'file')}" if corpus.files else "")
    if corpus.train_bytes:
        text += f", {corpus.train_bytes:,} {corpus.unit} to train on"
        text += f", {corpus.held_out_bytes:,} held out"
    return text


def _table(comparison: Comparison, summary: Summary) -> TableSection:
    """All results, a row a subject."""
    metric, recall = comparison.headline, comparison.metric("recall")
    recalled = sorted({length for row in summary.rows for length in row.recall})
    train, groups = comparison.train_length, [(f"{metric.unit} at", comparison.test_lengths)]
    if recall is not None and recalled:
        groups.append((f"{recall.label.lower()} at", tuple(recalled)))
    measured = (
        Column(
            name=str(length),
            group=group,
            note="trained" if length == train and group == groups[0][0] else "",
        )
        for group, lengths in groups
        for length in lengths
    )

    def cells(row: Row) -> Iterator[Cell]:
        label, role = row.subject.label, row.subject.role
        yield Cell(text=str(row.rank or "–"), kind="rank", value=row.rank)
        named = {"value": label, "kind": "name", "title": row.subject.note}
        yield Cell(text=label, small="" if role == "candidate" else role, **named)
        small = ""
        if recall and row.finds and row.predicts != row.finds:
            small = f"{metric.noun}: {row.predicts}, {recall.noun}: {row.finds}"
        why = reason(comparison, row)
        yield Cell(text=row.verdict, small=small, value=row.verdict, kind="verdict", title=why)
        for length in comparison.test_lengths:
            if length in row.refusals and length not in row.values:
                yield Cell(text="cannot", kind="refused", title=row.refusals[length])
            else:
                yield Cell.of(row.values.get(length), ".1%" if metric.is_share else None)
        for length in recalled:
            yield Cell.of(row.recall.get(length), ".1%")
        speed, memory, size = row.tokens_per_second, row.peak_memory_bytes, row.parameters
        yield Cell(text=count_in_words(speed), value=speed)
        yield Cell(text=size_in_words(memory), value=memory)
        yield Cell(text=count_in_words(size), value=size)

    return TableSection(
        key="table",
        title="All results",
        guide=f"{metric.label} ({metric.unit}), with 95 % intervals over seeds; best at the "
        "longest length first. Encodings that share a rank cannot be told apart by their paired "
        "seeds.",
        columns=(
            *(Column(name=name, text=True) for name in ("#", "encoding", "verdict")),
            *measured,
            *(Column(name=name) for name in ("tokens/s", "memory", "parameters")),
        ),
        rows=tuple(tuple(cells(row)) for row in summary.rows),
        notes=tuple(
            (
                row.subject.label,
                f"at {', '.join(map(str, row.refusals))}: "
                f"{'; '.join(dict.fromkeys(row.refusals.values()))}.",
            )
            for row in summary.rows
            if row.refusals
        ),
    )
