"""The page of ``benchmarks.device``: its record as Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.measuring import table

Record = dict[str, Any]

TITLES = {
    "environment": "Environment",
    "trial": "Trial: small problems beside the definition",
    "tests": "Tests",
    "static": "What the compiler makes of the kernels",
    "times": "Times and memory beside plain SDPA",
    "long": "One long call",
}


def page(record: Record) -> str:
    """All steps that have results so far."""
    steps = record["steps"]
    told = _first(steps.get("environment", {}).get("results", []))
    name = told.get("device", "an unknown device")
    lines = [f"# posenc on {name}", ""]
    if record["dry_run"]:
        lines += ["**A dry run on the CPU: no number here tells of a device.**", ""]
    lines += [
        f"Revision {record['revision']}, {record['date']}. Written by `python -m benchmarks.device`"
        f" in {sum(step['seconds'] for step in steps.values()) / 60:.1f} of "
        f"{record['minutes']:g} minutes.",
        "",
        table(
            ("step", "outcome", "seconds"),
            [(TITLES[n], outcome(n, step), f"{step['seconds']:.0f}") for n, step in steps.items()],
        ),
    ]
    for name, step in steps.items():
        lines += ["", f"## {TITLES[name]}", "", *PARTS[name](step["results"])]
    return "\n".join(lines) + "\n"


def outcome(name: str, step: Record) -> str:
    """A step in a line."""
    results = step["results"]
    if name == "tests":
        counts = Counter(each["outcome"] for each in results)
        words = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    else:
        failed = sum("error" in each for each in results)
        words = f"{len(results) - failed} of {len(results)} measured"
    return words if step["state"] == "complete" else f"{words}; {step['state']}"


def _environment(results: list[Record]) -> Iterable[str]:
    rows = []
    for key, value in _first(results).items():
        if isinstance(value, dict):
            value = ", ".join(f"{name} {version}" for name, version in value.items())
        if value is not None and key not in ("item", "seconds"):
            rows.append((key, f"{value:,}" if isinstance(value, int) else str(value)))
    yield table(("", ""), rows)


def _trial(results: list[Record]) -> Iterable[str]:
    yield table(
        ("backend", "difference", "seconds"),
        [
            (
                each["item"],
                each.get("error") or each.get("unavailable") or each["difference"] or "none",
                f"{each.get('seconds', 0):.1f}",
            )
            for each in results
        ],
    )


def _tests(results: list[Record]) -> Iterable[str]:
    groups: dict[str, Counter[str]] = {}
    for each in results:
        name = each["item"].partition("[")[0].rpartition("::")[2]
        groups.setdefault(name, Counter())[each["outcome"]] += 1
    outcomes = ("passed", "failed", "skipped", "not run")
    yield table(
        ("test", *outcomes),
        [(name, *(str(counts[o] or "") for o in outcomes)) for name, counts in groups.items()],
    )
    for outcome in ("failed", "skipped"):
        reasons: dict[str, list[str]] = {}
        for each in results:
            if each["outcome"] == outcome:
                name = each["item"].rpartition("::")[2]
                reasons.setdefault(_line(each.get("reason", "")), []).append(name)
        if reasons:
            yield from ("", f"### {outcome.capitalize()}", "")
            rows = [(reason, ", ".join(names)) for reason, names in reasons.items()]
            yield table(("reason", "tests"), rows)


def _times(results: list[Record]) -> Iterable[str]:
    yield (
        "Multiples of plain SDPA's time with the same mask in the same rounds: forward / forward "
        "and backward. In brackets the backend that `auto` took."
    )
    tables: dict[str, dict[str, dict[str, Record]]] = {}
    for each in results:
        method, size, contender = re.split(r", (?=\d)|: ", each["item"], maxsplit=2)
        tables.setdefault(size, {}).setdefault(method, {})[contender] = each
    shows: tuple[tuple[str, Callable[[Record], str]], ...] = (
        ("times", _ratios),
        ("peak memory forward and backward, MB", _peak),
        ("largest error of output / gradients, of the largest value", _errors),
    )
    for size, rows in tables.items():
        names = list(dict.fromkeys(name for row in rows.values() for name in row))
        for title, show in shows:
            cells = [
                (method, *(_cell(row.get(name), show) for name in names))
                for method, row in rows.items()
            ]
            if any(cell not in ("", "–") for _, *row in cells for cell in row):
                yield from ("", f"### {size}: {title}", "", table(("", *names), cells))
    yield from _reasons(results)


def _cell(each: Record | None, show: Callable[[Record], str]) -> str:
    if each is None or each.get("error") == "out of time":
        return ""
    return show(each["reading"]) if "reading" in each else "–"


def _ratios(reading: Record) -> str:
    ratios = [reading.get(f"{name}_ratio") for name in ("forward", "both")]
    if ratios[0] is None:
        return "–"
    served = reading.get("served_by")
    words = " / ".join("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
    return words + (f" ({served})" if served and reading["contender"] == "posenc" else "")


def _peak(reading: Record) -> str:
    peak = reading.get("both_memory")
    return "–" if peak is None else f"{peak / 1e6:,.0f}"


def _errors(reading: Record) -> str:
    errors = [reading.get(f"{name}_error") for name in ("output", "gradient")]
    if errors[0] is None:
        return "–"
    return " / ".join("–" if e is None else f"{float(e):.0e}" for e in errors)


def _long(results: list[Record]) -> Iterable[str]:
    rows = [
        (
            each["item"],
            str(each["reading"]["length"]),
            _mega(each["reading"]["forward_memory"]),
            _mega(each["reading"]["both_memory"]),
        )
        for each in results
        if "reading" in each
    ]
    yield table(("encoding", "tokens", "peak forward, MB", "and backward, MB"), rows)
    yield from _reasons(results)


def _mega(number: int | None) -> str:
    return "–" if number is None else f"{number / 1e6:,.0f}"


def _static(results: list[Record]) -> Iterable[str]:
    loops = [loop for each in results for loop in each.get("loops", ())]
    plain = {
        (loop["case"]["width"], loop["launch"]): loop
        for loop in loops
        if loop["case"]["method"] == "none" and loop["case"]["kind"] == "near"
    }
    yield (
        "Instructions of a thread in the loop over tiles; *of none*: multiples of those without an "
        "encoding, and of their modelled cycles."
    )
    yield ""
    rows = []
    for loop in loops:
        case, beside = loop["case"], plain.get((loop["case"]["width"], loop["launch"]))
        rows.append(
            (
                f"{case['method']}, {case['kind']}",
                str(case["width"]),
                loop["launch"],
                f"{loop['block'][0]} × {loop['block'][1]}, {loop['warps']}",
                str(loop["registers"]),
                str(loop["spilled"]),
                f"{loop['shared'] / 1024:.0f}",
                loop["tensor_core"].split(".")[0],
                str(loop["total"]),
                "" if beside is None else f"{loop['total'] / beside['total']:.2f}",
                "" if beside is None else f"{loop['cycles'] / beside['cycles']:.2f}",
            )
        )
    head = (
        *("encoding, tiles", "width", "launch", "tile, warps", "registers", "spilled, B"),
        *("shared, KiB", "tensor cores by", "instructions", "of none", "modelled"),
    )
    yield table(head, rows)
    yield from _reasons(results)


def _reasons(results: list[Record]) -> Iterable[str]:
    """Why items were not measured."""
    reasons: dict[str, list[str]] = {}
    for each in results:
        reason = each.get("error") or each.get("reading", {}).get("refusal")
        if reason:
            reasons.setdefault(_line(reason), []).append(each["item"])
    if reasons:
        yield from ("", "### Not measured", "")
        yield table(
            ("reason", "cases"), [(reason, "; ".join(items)) for reason, items in reasons.items()]
        )


PARTS: dict[str, Callable[[list[Record]], Iterable[str]]] = {
    "environment": _environment,
    "trial": _trial,
    "tests": _tests,
    "static": _static,
    "times": _times,
    "long": _long,
}


def _first(results: list[Record]) -> Record:
    return results[0] if results else {}


def _line(text: str) -> str:
    return " ".join(str(text).rpartition("which cannot, because ")[2].split())[:300]
