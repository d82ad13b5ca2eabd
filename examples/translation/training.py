"""Train a translator until it no longer gets better, and score it on held-out pairs."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from examples.translation.data import Batches, Data, even_batches, learnable
from examples.translation.settings import Settings
from examples.translation.translator import Translator, new_model
from posenc.errors import (
    ArgumentError,
    CheckpointError,
    DataError,
    Interrupted,
    OutputError,
    UnknownNameError,
)
from posenc.lab.experiments.sequences import Subwords, bleu, chrf, pair_loss, read_parallel
from posenc.lab.training import TrainingPlan, Watch, fit, interruptible
from posenc.lab.training.checkpoint import CHECKPOINT
from posenc.storage import make_folder, read_json, write_json

__all__ = ["Existing", "Report", "load_settings", "open_folder", "train_translator"]

Existing = Literal["refuse", "resume", "replace"]
KIND, RECORD, MODEL, LOOKS, REPORT = (
    "posenc translator",
    "settings.json",
    "model",
    "looks.json",
    "report.json",
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Scores of a trained translator.

    Args:
        bleu, chrf: of the test pairs, by beam search.
        signature: sacrebleu's description of the BLEU.
        examples: (source, translation, reference) of a few test pairs.
        validation: loss of the validation pairs at its lowest, in nats a token.
        best_step: step of that loss.
        steps: number of steps trained.
        stopped_early: whether because it no longer got better.
        seconds: of training, over all calls.
        pairs: numbers of pairs to train, validate and test with, and left out.
    """

    bleu: float
    chrf: float
    signature: str
    examples: tuple[tuple[str, str, str], ...]
    validation: float
    best_step: int
    steps: int
    stopped_early: bool
    seconds: float
    pairs: tuple[int, int, int, int]


def train_translator(
    settings: Settings,
    out: Path,
    *,
    existing: Existing = "refuse",
    tell: Callable[[str], None] = lambda line: None,
    stepped: Callable[[int, float], None] = lambda step, loss: None,
) -> Report:
    """Learn a vocabulary, train, keep the best model, and score it on held-out pairs.

    Into ``out`` go the best translator so far (``model/``, which ``Translator.load`` reads), the
    settings, a checkpoint and a report. On the CPU a training that was stopped, or killed, and
    continued with the same ``threads`` ends with the same bits as one that was not.

    Args:
        settings: of the training.
        out: output folder.
        existing: ``"refuse"`` a folder in use; ``"resume"`` its training; or ``"replace"`` it.
        tell: called with lines on the progress.
        stepped: called after each step with its number and loss.

    Raises:
        DataError: when the text is unusable, or not the one to be resumed with.
        ArgumentError: when an encoding cannot serve, or other settings are to be resumed.
        OutputError: when the output folder is in use, read-only or full.
        CheckpointError: when a file that is needed to resume is damaged.
        Interrupted: after Ctrl-C; the state is saved.
    """
    text = read_parallel(settings.text, settings.target, skip_empty=settings.skip_bad)
    subwords = Subwords.learn(learnable(text), size=settings.vocabulary)
    data = Data.of(text, subwords, settings)
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        with torch.random.fork_rng(), interruptible() as stop:
            torch.manual_seed(settings.seed)
            model = new_model(settings, subwords.size)
            open_folder(settings, out, data.fingerprint, existing)
            looks = _Looks(out, settings, data, Translator(model, subwords), tell, stepped)
            looks.train(stop)
            return looks.report()
    finally:
        torch.set_num_threads(threads)


class _Looks:
    """Looks at the validation pairs every so many steps, on which early stopping rests.

    A look is (step, loss, seconds). Resuming drops those after the checkpoint, which come again.
    """

    def __init__(
        self,
        out: Path,
        settings: Settings,
        data: Data,
        translator: Translator,
        tell: Callable[[str], None],
        stepped: Callable[[int, float], None],
    ) -> None:
        self.out, self.settings, self.data, self.translator = out, settings, data, translator
        self.tell, self.stepped = tell, stepped
        self.looks: list[tuple[int, float, float]] = []
        if (out / LOOKS).exists():
            self.looks = [(int(s), float(x), float(t)) for s, x, t in read_json(out / LOOKS)]
        self.began = time.perf_counter()
        parameters = sum(p.numel() for p in translator.model.parameters())
        left_out = f", {data.skipped:,} left out" if data.skipped else ""
        tell(
            f"{len(data.train):,} pairs to train on, {len(data.validation):,} to validate with, "
            f"{len(data.test):,} to test{left_out}; {translator.subwords.size:,} subwords; "
            f"{parameters / 1e6:.1f} M parameters, {settings.encoding}"
        )

    @property
    def best(self) -> tuple[int, float, float]:
        return min(self.looks, key=lambda look: look[1])

    @property
    def exhausted(self) -> bool:
        """Whether the loss was not lowered by as many looks as patience allows."""
        later = [look for look in self.looks if look[0] > self.best[0]] if self.looks else []
        return len(later) >= self.settings.patience

    def train(self, stop: Callable[[], bool]) -> None:
        """Train until patience or steps are exhausted.

        Raises:
            Interrupted: after ``stop`` returned True.
        """
        if self.exhausted:
            return
        settings = self.settings
        plan = TrainingPlan(
            encoding=settings.encoding,
            seed=settings.seed,
            steps=settings.steps,
            rate=settings.learning_rate,
            device=settings.device,
            folder=self.out,
            schedule=lambda step, _: min(
                (step + 1) / settings.warmup, math.sqrt(settings.warmup / (step + 1))
            ),
        )
        watch = Watch(
            stop=lambda: self.exhausted or stop(), started=self._start, stepped=self._step
        )
        try:
            fit(self.translator.model, Batches(self.data, settings), plan, watch)
        except Interrupted as error:
            if not self.exhausted:
                raise Interrupted(
                    "training",
                    expected=error.expected,
                    got=error.got,
                    remedy=f"It is saved: go on with --resume --out {self.out}.",
                ) from None

    def _start(self, step: int) -> None:
        self.looks = [look for look in self.looks if look[0] <= step]
        self.began -= self.looks[-1][2] if self.looks else 0.0
        if step:
            self.tell(f"goes on after step {step}")

    def _step(self, step: int, loss: Tensor, speed: float) -> None:
        settings = self.settings
        if not torch.isfinite(loss):
            raise ArgumentError(
                "learning_rate",
                expected="one at which training converges",
                got=f"{settings.learning_rate}, whose loss at step {step} is no number",
                remedy="Lower it, or raise warmup.",
            )
        self.stepped(step, float(loss))
        if step % settings.every and step < settings.steps:
            return
        found = self._validate()
        best = not self.looks or found < self.best[1]
        if best:
            self.translator.save(self.out / MODEL)
        self.looks.append((step, found, time.perf_counter() - self.began))
        write_json(self.out / LOOKS, self.looks)
        lowest = ", the lowest so far" if best else ""
        self.tell(f"step {step}: validation {found:.3f} nats a token{lowest}")

    @torch.no_grad()
    def _validate(self) -> float:
        """Mean loss of a token of the validation pairs, in nats."""
        model = self.translator.model.eval()
        total = count = 0.0
        for batch in even_batches(self.data.validation, tokens=self.settings.batch_tokens):
            tokens = float((batch["sizes"][:, 1] - 1).sum())
            moved = {name: x.to(self.settings.device) for name, x in batch.items()}
            total, count = total + tokens * float(pair_loss(model, moved)), count + tokens
        model.train()
        return total / count

    def report(self) -> Report:
        """Score the best model, and write the report."""
        settings, data = self.settings, self.data
        lines = [pair.line for pair in data.test]
        references = [pair.translation for pair in data.test]
        written = Translator.load(self.out / MODEL, device=settings.device).translate(
            lines, beams=settings.beams, length_penalty=settings.length_penalty, drop_unknown=True
        )
        score, signature = bleu(written, references)
        report = Report(
            bleu=score,
            chrf=chrf(written, references),
            signature=signature,
            examples=tuple(zip(lines[:5], written[:5], references[:5], strict=True)),
            validation=self.best[1],
            best_step=self.best[0],
            steps=self.looks[-1][0],
            stopped_early=self.exhausted,
            seconds=self.looks[-1][2],
            pairs=(len(data.train), len(data.validation), len(data.test), data.skipped),
        )
        plain = {"kind": KIND, **asdict(report), "losses": [look[:2] for look in self.looks]}
        write_json(self.out / REPORT, plain)
        return report


def load_settings(out: Path) -> Settings:
    """The settings of the training in ``out``.

    Raises:
        OutputError: when there is none.
        CheckpointError: when its record is damaged.
    """
    return Settings.from_json(_record(out)["settings"])


def open_folder(settings: Settings, out: Path, fingerprint: str, existing: Existing) -> None:
    """Make the output folder ready for a new training, or one that goes on.

    Raises:
        OutputError: when it is in use, or cannot be made.
        ArgumentError: when a training of other settings is to be resumed.
        DataError: when the text is no longer that of the training to be resumed.
        CheckpointError: when its record is damaged.
    """
    if existing not in get_args(Existing):
        raise UnknownNameError.of("existing", existing, get_args(Existing))
    if existing == "resume":
        plain = _record(out)
        before, now = Settings.from_json(plain["settings"]).to_json(), settings.to_json()
        for name in sorted(before.keys() - {"threads"}):
            if now[name] != before[name]:
                raise ArgumentError(
                    name,
                    expected=f"{before[name]!r}, as in the training to be resumed",
                    got=repr(now[name]),
                    remedy="Resume with the same settings (or none but --out), or train anew.",
                )
        if plain["data"] != fingerprint:
            raise DataError(
                "text",
                expected="the text that training began with",
                got="another one",
                remedy="Restore it, or train anew into another folder.",
            )
        return
    occupied = out.is_file() or (out.is_dir() and any(out.iterdir()))
    if occupied and existing == "refuse":
        raise OutputError(
            "out",
            expected="a new or empty folder",
            got=f"{out}, which exists",
            remedy="Choose another, go on with what is in it (--resume), or replace it "
            "(--replace).",
        )
    if occupied:
        _record(out)  # nothing is removed that is not a translator
        shutil.rmtree(out / MODEL, ignore_errors=True)
        for name in (CHECKPOINT, LOOKS, REPORT):
            (out / name).unlink(missing_ok=True)
    make_folder(out)
    write_json(out / RECORD, {"kind": KIND, "settings": settings.to_json(), "data": fingerprint})


def _record(out: Path) -> Any:
    if not (out / RECORD).is_file():
        raise OutputError(
            "out",
            expected="the folder of a translator in training",
            got=f"{out}, which has no {RECORD}",
            remedy="Give the folder that was trained into.",
        )
    plain: Any = read_json(out / RECORD, remedy="Restore it from a copy, or train anew.")
    known = isinstance(plain, dict) and {"kind", "settings", "data"} <= plain.keys()
    if not known or plain["kind"] != KIND or not isinstance(plain["settings"], dict):
        raise CheckpointError(
            str(out / RECORD),
            expected=f"the record of a {KIND}",
            got="something else",
            remedy="Choose another folder.",
        )
    return plain
