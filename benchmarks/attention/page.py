"""Rows of a bench as tables, with values over their limits in bold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set

from benchmarks.attention.limits import LIMITS, MEMORY, PASSES, Limit, Readings, Row
from benchmarks.measuring import table

from posenc.lab.bench.run import PLAIN

POSENC, WRITTEN_OUT = "posenc", "bias written out"


def tables(rows: Sequence[Row], device: str = "cpu") -> dict[str, str]:
    """Markdown tables by name, of what was measured; ``device`` as in ``LIMITS``."""
    over = _over(rows, device)
    dtypes = dict.fromkeys(row["dtype"] for row in rows)
    found = {f"times in {dtype}": _times(rows, dtype, over) for dtype in dtypes}
    found |= {
        "short rows": _short_rows(rows, over),
        "other contenders": _others(rows),
        "layers": _others(rows, "layer"),
        "generation": _generation(rows),
        "memory": _memory(rows),
        "limits": _limits(rows, device),
    }
    return {name: text for name, text in found.items() if text}


def _over(rows: Sequence[Row], device: str) -> Set[tuple[object, ...]]:
    """Cases and quantities that are over their limits."""
    readings = Readings(rows)
    values = ((limit, readings.value(limit)) for limit in LIMITS[device])
    return {
        (limit.quantity, *_case(limit.__dict__))
        for limit, value in values
        if value is not None and not limit.met(value)
    }


def _case(row: Row) -> tuple[object, ...]:
    return tuple(row[name] for name in ("encoding", "length", "causal", "dtype", "batch"))


def _timed(rows: Sequence[Row], level: str = "call") -> list[Row]:
    return [row for row in rows if row["level"] == level and row["forward_ratio"] is not None]


def _ratios(row: Row | None, over: Set[tuple[object, ...]] = frozenset()) -> str:
    """``0.53 / 0.48``: forward / forward and backward."""
    if row is None:
        return "–"
    shown = []
    for quantity in PASSES:
        ratio = row[f"{quantity}_ratio"]
        text = "–" if ratio is None else f"{ratio:.2f}"
        missed = row["contender"] == POSENC and (quantity, *_case(row)) in over
        shown.append(f"**{text}**" if missed else text)
    return " / ".join(shown)


def _size(length: int, causal: bool) -> str:
    return f"{length:,}" + (", causal" if causal else "")


def _times(rows: Sequence[Row], dtype: str, over: Set[tuple[object, ...]]) -> str:
    """A row an encoding, a column a length and mask."""
    chosen = [
        row
        for row in _timed(rows)
        if (row["dtype"], row["batch"], row["contender"]) == (dtype, 1, POSENC)
    ]
    sizes = sorted({(row["causal"], row["length"]) for row in chosen})
    cells = {(row["encoding"], row["causal"], row["length"]): row for row in chosen}
    lines = [
        (f"`{name}`", *(_ratios(cells.get((name, *size)), over) for size in sizes))
        for name in dict.fromkeys(row["encoding"] for row in chosen)
    ]
    head = ("forward / and backward", *(_size(length, causal) for causal, length in sizes))
    return table(head, lines) if lines else ""


def chosen(rows: Sequence[Row], names: Mapping[str, str]) -> str:
    """A table of these encodings, under other names, by size."""
    found = {_case(row): row for row in _timed(rows) if row["contender"] == POSENC}

    def cell(name: str, length: int, causal: bool, batch: int) -> str:
        case = (name, length, causal, "float32", batch)
        return _ratios(found[case]) if case in found else ""

    sizes = {
        "128": (128, False, 1),
        "128, 16 rows of 12 heads": (128, False, 16),
        "512": (512, False, 1),
        "2,048": (2048, False, 1),
        "2,048, causal": (2048, True, 1),
    }
    lines = [(label, *(cell(name, *size) for name in names)) for label, size in sizes.items()]
    return table(("tokens", *names.values()), lines)


def _short_rows(rows: Sequence[Row], over: Set[tuple[object, ...]]) -> str:
    chosen = [row for row in _timed(rows) if row["batch"] > 1]
    cells: dict[str, dict[str, Row]] = {}
    for row in chosen:
        size = f"{row['batch']} × {row['heads']} heads × {row['length']} tokens"
        case = f"`{row['encoding']}`, {size}, {row['dtype']}"
        cells.setdefault(case, {})[row["contender"]] = row
    return _by_contender(cells, over)


def _others(rows: Sequence[Row], level: str = "call") -> str:
    """A row a case, a column a contender, where others than posenc were measured."""
    cells: dict[str, dict[str, Row]] = {}
    for row in _timed(rows, level):
        if row["batch"] == 1:
            case = f"`{row['encoding']}`, {_size(row['length'], row['causal'])}"
            case += "" if row["dtype"] == "float32" else f", {row['dtype']}"
            cells.setdefault(case, {})[row["contender"]] = row
    compared = {case: found for case, found in cells.items() if {*found} - {PLAIN, POSENC}}
    return _by_contender(compared)


def _by_contender(
    cells: dict[str, dict[str, Row]], over: Set[tuple[object, ...]] = frozenset()
) -> str:
    names = dict.fromkeys(name for found in cells.values() for name in found)
    shown = [name for name in names if name not in (PLAIN, "plain layer")]
    lines = [
        (case, *(_ratios(found.get(name), over) if name in found else "" for name in shown))
        for case, found in cells.items()
    ]
    return table(("forward / and backward", *shown), lines) if lines else ""


def _generation(rows: Sequence[Row]) -> str:
    """Times of a token by tokens in the cache."""
    chosen = [row for row in _timed(rows, "token") if row["contender"] == POSENC]
    readings = Readings(rows)
    contexts = sorted({row["length"] for row in chosen})
    lines = []
    for name in dict.fromkeys(row["encoding"] for row in chosen):
        quantity = "of transformers" if name == "rope" else "of rope"
        cells = []
        for length in contexts:
            case = {"encoding": name, "length": length, "causal": True}
            limit = Limit(row="", quantity=quantity, bound=0, **case)  # type: ignore[arg-type]
            value = readings.value(limit)
            cells.append("–" if value is None else f"{value:.2f}")
        beside = "a Llama of transformers" if name == "rope" else "`rope`"
        lines.append((f"`{name}` beside {beside}", *cells))
    return table(("a token with a cache of", *map(_count, contexts)), lines) if lines else ""


def _count(number: int) -> str:
    return f"{number:,}"


def _memory(rows: Sequence[Row]) -> str:
    """Megabytes beyond the inputs at the greatest length."""
    chosen = [
        row
        for row in rows
        if row["contender"] in (PLAIN, POSENC) and row["both_memory"] is not None
    ]
    if not chosen:
        return ""
    most = max(row["length"] for row in chosen)
    chosen = [row for row in chosen if row["length"] == most]
    dtypes = list(dict.fromkeys(row["dtype"] for row in chosen))
    cells: dict[str, dict[str, str]] = {}
    for row in chosen:
        ours = row["contender"] == POSENC
        name = f"`{row['encoding']}`" if ours else row["contender"]
        peaks = (row[quantity.replace(" ", "_")] / 1e6 for quantity in MEMORY)
        shown = " / ".join(f"{peak:,.0f}" for peak in peaks)
        cells.setdefault(name, {}).setdefault(row["dtype"], shown)
    lines = [(name, *(found.get(dtype, "–") for dtype in dtypes)) for name, found in cells.items()]
    return table((f"{most:,} tokens, MB, forward / and backward", *dtypes), lines)


def _limits(rows: Sequence[Row], device: str) -> str:
    """How many limits are met, and how many of each encoding are not."""
    readings = Readings(rows)
    values = [(limit, readings.value(limit)) for limit in LIMITS[device]]
    measured = [(limit, value) for limit, value in values if value is not None]
    if not measured:
        return ""
    over = [limit for limit, value in measured if not limit.met(value)]
    groups = Counter(limit.encoding for limit in over)
    missed = ", ".join(f"`{name}` {count}" for name, count in groups.items())
    met = f"{len(measured) - len(over)} of {len(measured)} limits are met"
    return f"{met}; missed: {missed}.\n" if over else f"{met}.\n"
