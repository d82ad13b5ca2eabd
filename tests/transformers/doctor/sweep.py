"""Diagnose the default config of every causal language model of transformers.

Prints each model's time, or the reason why it could not be run, and each that was not read as by
hand; fails if there are any of the latter, if a diagnosis raises, or if too few models were run.

    python -m tests.transformers.doctor.sweep [MODEL_TYPE ...]
"""

from __future__ import annotations

import os
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Lock

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from posenc.transformers.doctor.diagnosis import Diagnosis, diagnose
from tests.transformers.doctor.layers_by_hand import BY_HAND, summary

LEAST = 165 / 189
"""Share of models to be read by running."""

IMPORTING = Lock()
"""transformers imports modules when they are first asked for."""


def diagnosed(kind: str) -> Diagnosis | str:
    """The diagnosis of a default config; transformers' reason where it has none."""
    with TemporaryDirectory() as folder:
        try:
            with IMPORTING:
                transformers.AutoConfig.for_model(kind).save_pretrained(folder)
        except Exception as error:  # of transformers
            return f"no default config: {' '.join(str(error).split())[:200]}"
        return diagnose(Path(folder), budget=0)


def emit(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(kinds: list[str]) -> int:
    transformers.logging.set_verbosity_error()
    seconds: list[float] = []
    wrong = crashed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each waits for a process of its own
        futures = {kind: pool.submit(diagnosed, kind) for kind in kinds}
        for kind, future in futures.items():
            try:
                diagnosis = future.result()
            except Exception:
                crashed += 1
                emit(f"{kind} CRASHED\n{traceback.format_exc()}")
                continue
            if isinstance(diagnosis, str) or diagnosis.reading.by == "config":
                reason = diagnosis if isinstance(diagnosis, str) else diagnosis.reading.reason
                emit(f"{kind} not run: {reason}")
                continue
            seconds.append(diagnosis.reading.seconds)
            emit(f"{kind} {seconds[-1]:.1f} s")
            if kind in BY_HAND and summary(diagnosis.reading) != BY_HAND[kind]:
                wrong += 1
                emit(f"{kind} WRONG: {summary(diagnosis.reading)} instead of {BY_HAND[kind]}")
    read = len(seconds)
    times = f"median {median(seconds or [0.0]):.1f} s, longest {max(seconds, default=0.0):.1f} s"
    emit(f"{read} of {len(kinds)} run, {times}")
    emit(f"{wrong} not as read by hand, {crashed} crashed")
    return int(bool(wrong or crashed) or read < LEAST * len(kinds))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)))
