"""Short tables of what was measured, for the pages that recommend something."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import decoding
from benchmarks.measuring import RESULTS, table
from benchmarks.tasks import KEPT, cell

DEMO = Path(__file__).parent.parent / "docs/results/demo-summary.csv"

TASKS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "masked": ("masked", "loss", (64, 256)),
    "copying": ("copy-longer", "token_accuracy", (16, 32)),
    "counting": ("dyck", "token_accuracy", (16, 64)),
    "images": ("digits-apart", "scaled", (8, 12, 16)),
    "times": ("temperature", "error", (32, 64, 128)),
    "translating": ("translation", "bleu", (24, 36)),
}
"""Tables of ``choose/``: run, metric, lengths."""

FAMILIES = {
    "deberta_v2": "DeBERTa-v3",
    "mpnet": "MPNet",
    "t5": "T5",
    "xlnet": "XLNet",
    "bloom": "Bloom",
}
ENCODERS = {
    "deberta_v2": "DeBERTa-v3",
    "t5": "T5's encoder",
    "modernbert": "ModernBERT",
    "bert": "BERT",
}
ENGINES = {
    "transformers": "transformers",
    "compile": "`torch.compile`, freezing",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "posenc": "posenc",
}
LAYERS = {
    "modernbert": "ModernBERT-base, 64 tokens on either side",
    "gemma3": "Gemma 3 of 270M, window 512",
    "gpt_oss": "gpt-oss, a quarter of its heads and width, window 128 and full, sinks",
    "gemma2": "Gemma 2, attention alone, window 4,096 and full, soft cap",
    "inkling": "Inkling's attention module, full",
    "mistral": "Mistral, window 4,096",
}


def choosing() -> dict[str, str]:
    """The tables of ``choose/``, by name."""
    return {"text": text()} | {name: task(*kept) for name, kept in TASKS.items()}


def text() -> str:
    """Loss and recall of the comparison on text, at the trained and at the longest length."""
    rows, lengths = demo()
    ends = (lengths[0], lengths[-1])
    head = ("", *(f"bits per byte at {length}" for length in ends), f"recall at {ends[1]}")
    lines = [
        (
            f"`{row['subject'].replace('|', ', ')}`",
            *(number(row, f"loss@{length}", ".2f").split(" ")[0] for length in ends),
            number(row, f"recall@{ends[1]}", ".0%").split(" ")[0],
            row["verdict"],
        )
        for row in rows
    ]
    return table((*head, "verdict"), lines)


def language() -> str:
    """The comparison on text at every length, with intervals."""
    rows, lengths = demo()
    last = lengths[-1]
    head = ("bits per byte at", *lengths, f"recall at {last}", "verdict")
    lines = [
        (
            f"`{row['subject'].replace('|', ', ')}`",
            *(number(row, f"loss@{length}", ".2f") for length in lengths),
            number(row, f"recall@{last}", ".0%"),
            row["verdict"],
        )
        for row in rows
    ]
    return table(head, lines)


def demo() -> tuple[list[dict[str, str]], list[str]]:
    """Rows of the comparison on text, and its lengths."""
    with DEMO.open() as file:
        rows = list(csv.DictReader(file))
    lengths = [key.partition("@")[2] for key in rows[0] if key.startswith("loss@")]
    return rows, [length for length in lengths if length.isdigit()]


def number(row: Mapping[str, str], key: str, form: str) -> str:
    """A mean with its interval, as reports show it."""
    if not row[key]:
        return "cannot"
    shown = f"{float(row[key]):{form}}"
    if not row[f"{key}_low"]:
        return shown
    low, high = (f"{float(row[f'{key}_{end}']):{form}}".rstrip("%") for end in ("low", "high"))
    return f"{shown} ({low} to {high})"


def task(run: str, metric: str, lengths: Sequence[int]) -> str:
    """A metric of a run of ``benchmarks.tasks``, a row an encoding."""
    with (KEPT / f"{run}.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == metric]
    kept = [row for row in rows if int(row["length"]) in lengths]
    shown = list(dict.fromkeys(row["length"] for row in kept))
    lines = [
        (f"`{subject}`", *(cell(row) for row in kept if row["subject"] == subject))
        for subject in dict.fromkeys(row["subject"] for row in kept)
    ]
    return table((f"{rows[0]['label']} at", *shown), lines)


def families() -> str:
    """Times faster than transformers, of families with a bias."""
    seconds = {
        (row["engine"], row["model"], row["size"], row["pass"]): row["seconds"]
        for row in read("families")["rows"]
        if row["seconds"]
    }
    times = {
        place: seconds["transformers", *place] / own
        for (engine, *rest), own in seconds.items()
        if engine == "posenc" and ("transformers", *(place := tuple(rest))) in seconds
    }
    sizes = [128, 512, 2048, 8192]
    head = ("tokens", *FAMILIES.values())
    return table(head, ((f"{size:,}", *(pair(times, m, size) for m in FAMILIES)) for size in sizes))


def engines() -> str:
    """Milliseconds and memory of encoders in engines, a table a processor."""
    parts = []
    for name in ("engines_amd", "engines_intel"):
        if not (RESULTS / f"{name}.json").exists():
            continue
        results = read(name)
        settings, versions = results["settings"], results["versions"]
        parts.append(
            f"{results['device']}, {settings['threads']} threads, {results['date']}, PyTorch "
            f"{versions['torch']}, transformers {versions['transformers']}:\n"
        )
        parts.append(_beside(results["rows"]))
    return "\n".join(parts)


def _beside(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line a model and size, a column an engine that was timed; the shortest time bold."""
    shown = [engine for engine in ENGINES if any(row["engine"] == engine for row in rows)]
    places: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        size = f"{row['batch']} × {row['size']:,}"
        places.setdefault((ENCODERS[row["model"]], size), {})[row["engine"]] = row
    lines = []
    for place, found in places.items():
        times = {engine: row["seconds"] for engine, row in found.items() if row["seconds"]}
        best = min(times, key=lambda engine: times[engine])
        cells = [
            _time(found[engine], bold=engine == best) if engine in times else "–"
            for engine in shown
        ]
        lines.append((*place, *cells))
    labels = (ENGINES[engine] for engine in shown)
    return table(("milliseconds / MiB", "rows × tokens", *labels), lines)


def _time(row: Mapping[str, Any], *, bold: bool) -> str:
    time = f"{1e3 * row['seconds']:,.0f}"
    return f"{f'**{time}**' if bold else time} / {row['MiB']:,.0f}"


def windows() -> str:
    """Times faster than transformers, of layers with windows, sinks and caps."""
    times = {
        (row["model"], row["tokens"], row["direction"]): row["times faster"]
        for row in read("model_windows")["rows"]
        if "times faster" in row
    }
    sizes = [1024, 4096, 8192]
    head = ("one layer, tokens", *(f"{size:,}" for size in sizes))
    return table(
        head, ((label, *(pair(times, m, size) for size in sizes)) for m, label in LAYERS.items())
    )


def real() -> dict[str, str]:
    """Parts of the page of real models, by name."""
    results = read("real_models")
    found = {(row["model"], row["check"]): row["outcome"] for row in results["rows"]}
    taken = {(row["model"], row["check"]): row["seconds"] for row in results["rows"]}
    read_by, extended = (found["smollm2", check] for check in ("evaluated", "extended"))
    moved, sentences = found["smollm2", "stretched"], found["minilm", "embedded"]
    cosines = sentences["cosine of texts with other ends"]
    lines = [
        ("SmolLM2, the last 512 of 16,384 tokens, bits a token", f"{moved['plain']:.2f}"),
        ('… with YaRN by `stretch(model, "yarn", factor=2)`', f"{moved['yarn']:.2f}"),
        ("… its outputs after `restore`", "the same bits" if moved["restored"] else "others"),
        ("MiniLM, cosine of two texts with other ends, as it was", f"{cosines['as it was']:.3f}"),
        (f"… read to {sentences['longest']} tokens", f"{cosines['extended']:.3f}"),
    ]
    for model, label in (("smollm2", "SmolLM2"), ("minilm", "MiniLM")):
        for tokens, row in found[model, "accelerated"]["by tokens"].items():
            what = f"{label}, time of a pass over {tokens} tokens, `accelerate` ÷ without"
            lines.append((what, f"{row['time']:.2f}"))
        apart = found[model, "exported"]["apart"]
        lines.append((f"{label} in ONNX Runtime, largest difference", f"{apart:.0e}"))
    minutes = {check: taken["smollm2", check] / 60 for check in ("evaluated", "extended")}
    return {
        "measured": f"{results['device']}, {results['machine']['threads']} threads, PyTorch "
        f"{results['versions']['torch']}, {results['date']}.\n",
        "evaluated": f"{read_by['headline']} ({minutes['evaluated']:.0f} minutes).\n\n"
        + _by_length(read_by["of"]),
        "extended": f"{extended['headline']} ({minutes['extended']:.0f} minutes).\n\n"
        + _by_length(extended["of"]),
        "others": table(("", "measured"), lines),
        "decoded": _decoded(),
    }


def _decoded() -> str:
    """The machine, its bandwidth, and times of a token in engines."""
    results = read("decoding")
    settings = results["settings"]
    return (
        f"{results['device']}, {settings['threads']} threads, which read "
        f"{settings['bandwidth'] / 1e9:.0f} GB/s from memory; {results['date']}.\n\n"
        + decoding.shown(results["rows"], settings)
    )


def _by_length(models: Mapping[str, Any]) -> str:
    """Loss and needles found by length, a line a model."""
    lengths = list(next(iter(models.values()))["loss"])
    lines = [
        (
            f"`{name}`",
            *(
                f"{row['loss'][n]:.2f}, {sum(row['needles'][n]):.0f} of {len(row['needles'][n])}"
                for n in lengths
            ),
        )
        for name, row in models.items()
    ]
    return table(("bits a token, needles", *(f"{int(n):,}" for n in lengths)), lines)


def pair(times: Mapping[tuple[str, Any, str], float], model: str, size: Any) -> str:
    """``4.40 / 2.79``: forward / forward and backward."""
    found = [times.get((model, size, direction)) for direction in ("forward", "both")]
    if found[0] is None:
        return "–"
    forms = (".2f" if value is not None and value < 10 else ".1f" for value in found)
    return " / ".join(
        "–" if value is None else f"{value:{form}}"
        for value, form in zip(found, forms, strict=True)
    )


def read(name: str) -> dict[str, Any]:
    """A file of results."""
    results: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return results
