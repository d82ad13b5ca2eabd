"""Hold posenc's rules of other engines to the engines as they run.

    python -m benchmarks.engine_rules                                     (make engines)
    python -m benchmarks.engine_rules --engines mlx_lm --families llama,qwen3 --methods yarn

Each engine is installed in an environment of its own under ``build/engines`` and runs small
checkpoints of its families in ``environments.toml``, extended by every method, as ``posenc
extend`` writes them and as transformers saves them, at 100 and 500 tokens. Its logits must be those
of transformers, or those of transformers with the predicted rotation where a rule says that it
rotates otherwise; a checkpoint that a rule says it refuses must be refused. Prints what
is not as predicted and fails if anything is. Engines run whole are written to
``benchmarks/results/engine_rules.json``, and, if all was as predicted, their releases and
dates to posenc's list of what its rules were run with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import transformers
from benchmarks.engine_rules.checkpoints import METHODS, Checkpoint, written
from benchmarks.engine_rules.environments import environments
from benchmarks.engine_rules.verdicts import (
    SURPRISE,
    SYMBOLS,
    Logits,
    Result,
    Verdict,
    rows,
    verdict,
)
from benchmarks.measuring import RESULTS

from posenc.transformers.engines.runs import RUNS

WORK = Path("build/engines")
RESULT = RESULTS / "engine_rules.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    every = environments(WORK)
    parser.add_argument("--engines", type=_names, default=[*every], help=", ".join(every))
    parser.add_argument("--families", type=_names, help="default: all that an engine has")
    parser.add_argument("--methods", type=_names, default=[*METHODS], help="default: all")
    options = parser.parse_args()
    unknown = [name for name in options.engines if name not in every]
    unknown += [name for name in options.methods if name not in METHODS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    whole = options.families is None and len(options.methods) == len(METHODS)
    chosen = [every[name] for name in options.engines]
    wanted = {f for one in chosen for f in one.families if f in (options.families or one.families)}
    checkpoints, right = _checkpoints(sorted(wanted), tuple(options.methods))
    own = {
        one.name: Result({str(n): x.numpy() for n, x in right[one.name].items()})
        for one in checkpoints
    }
    surprises = _judged("transformers", transformers.__version__, checkpoints, own, right, whole)
    for environment in chosen:
        environment.install()
        out = WORK / f"{environment.name}-results"
        some = [one for one in checkpoints if one.family in environment.families]
        environment.run(some, out)
        results = {one.name: Result.read(out, one.name) for one in some}
        surprises += _judged(environment.engine, environment.release(), some, results, right, whole)
    sys.exit(surprises > 0)


def _names(text: str) -> list[str]:
    return text.split(",")


def _checkpoints(
    families: Sequence[str], methods: tuple[str, ...]
) -> tuple[list[Checkpoint], dict[str, Logits]]:
    """The checkpoints with their log-probabilities in transformers."""
    checkpoints = [
        one for family in families for one in written(family, methods, WORK / "checkpoints")
    ]
    right = {}
    for one in checkpoints:
        logits = one.log_probabilities()
        assert logits is not None  # by the model's own rotation
        right[one.name] = logits
    return checkpoints, right


def _judged(
    engine: str,
    release: str,
    checkpoints: Sequence[Checkpoint],
    results: Mapping[str, Result],
    right: Mapping[str, Logits],
    whole: bool,
) -> int:
    """Print an engine's verdicts, write them if it was run whole; the number of surprises."""
    verdicts = {
        one.name: verdict(one, results[one.name], engine, right[one.name]) for one in checkpoints
    }
    surprises = {name: one.message for name, one in verdicts.items() if one.symbol == SURPRISE}
    for name, message in surprises.items():
        print(f"{engine} {name}: {message}")
    counts = Counter(one.symbol for one in verdicts.values())
    told = ", ".join(f"{count} {SYMBOLS[symbol]}" for symbol, count in counts.most_common())
    print(f"{engine} {release}: {told}", flush=True)
    if whole:
        _write(engine, release, verdicts)
    return len(surprises)


def _write(engine: str, release: str, verdicts: Mapping[str, Verdict]) -> None:
    """Write an engine's part of the results, and its version where posenc reads it."""
    date = datetime.now(UTC).date().isoformat()
    results: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    results["methods"] = list(METHODS)
    results["transformers"] = transformers.__version__
    results.setdefault("engines", {})[engine] = {
        "release": release,
        "date": date,
        "cells": rows(verdicts, METHODS),
    }
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    if any(one.symbol == SURPRISE for one in verdicts.values()):
        return
    runs = json.loads(RUNS.read_text())
    runs[engine] = {"release": release, "date": date, "cells": len(verdicts)}
    RUNS.write_text(json.dumps(runs, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
