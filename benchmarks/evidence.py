"""Short tables of what was measured, for the pages that recommend something."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
WHOLE = {"deberta_v2": "DeBERTa-v3-base", "mpnet": "MPNet-base", "t5": "T5-base, encoder"}
ENGINES = {
    "posenc": "posenc",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "onnxruntime_int8": "ONNX Runtime, int8",
}
LAYERS = {
    "modernbert": "ModernBERT-base, 64 tokens on either side",
    "gemma3": "Gemma 3 of 270M, window 512",
    "gpt_oss": "gpt-oss, a quarter of its heads and width, window 128 and full, sinks",
    "gemma2": "Gemma 2, attention alone, window 4,096 and full, soft cap",
    "inkling": "Inkling's attention module, full",
    "mistral": "Mistral, window 4,096",
    "llama": "Llama, causal",
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
    rows = read("transformers_amd")["rows"]
    times = {
        (row["model"], row["size"], row["pass"]): row["transformers_s"] / row["engine_s"]
        for row in rows
        if row["engine"] == "posenc"
        and row.get("layers", 1) == 1
        and row["transformers_s"]
        and row["engine_s"]
    }
    sizes = [128, 512, 2048, 8192]
    head = ("tokens", *FAMILIES.values())
    return table(head, ((f"{size:,}", *(pair(times, m, size) for m in FAMILIES)) for size in sizes))


def whole() -> str:
    """Times faster than transformers, of whole encoders, by rows and tokens."""
    times = {
        (row["model"], (row.get("batch", 1), row["size"]), row["pass"]): row["transformers_s"]
        / row["engine_s"]
        for row in read("transformers_whole")["rows"]
    }
    sizes = [(64, 64), (16, 128), (1, 512), (16, 256)]
    head = ("12 layers, rows × tokens", *(f"{rows} × {tokens}" for rows, tokens in sizes))
    return table(
        head, ((label, *(pair(times, m, size) for size in sizes)) for m, label in WHOLE.items())
    )


def engines() -> str:
    """Times faster than transformers in the same run, of posenc and of inference engines."""
    times = {
        (row["engine"], row["size"]): row["transformers_s"] / row["engine_s"]
        for row in read("transformers_engines")["rows"]
    }
    sizes = [512, 2048]
    head = ("tokens", *(f"{size:,}" for size in sizes))
    return table(
        head,
        (
            (label, *(f"{times[key, n]:.2f}" if (key, n) in times else "–" for n in sizes))
            for key, label in ENGINES.items()
        ),
    )


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
