"""Training a translator: until it no longer gets better, and on from where it was stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from posenc.errors import (
    ArgumentError,
    CheckpointError,
    Interrupted,
)
from posenc.experiments.fitting import fitted_options
from posenc.experiments.recipe import Recipe
from posenc.experiments.sequences import padded, pair_loss
from posenc.experiments.translation.data import Data, epoch_batches, even_batches, learnable
from posenc.experiments.translation.folder import KIND, open_folder
from posenc.experiments.translation.parallel import read_parallel
from posenc.experiments.translation.scoring import bleu, chrf
from posenc.experiments.translation.settings import TranslatorSettings
from posenc.experiments.translation.subwords import Subwords
from posenc.experiments.translation.translator import ROOM, Translator
from posenc.models import Transformer, TransformerConfig
from posenc.storage import Shapes, load_tensors, save_tensors, write_json
from posenc.training.checkpoint import require_state_shapes
from posenc.training.interrupt import interruptible
from posenc.training.records import record

__all__ = ["Event", "Prepared", "Report", "Stepped", "train_translator"]

TRAIN_ANEW = "It is damaged, or of another version of posenc: train anew (--replace)."
STATE, MODEL, REPORT = "state.safetensors", "model", "report.json"
BETAS, WEIGHT_DECAY, LARGEST_NORM = (0.9, 0.98), 0.01, 1.0


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Text and vocabulary are there; training begins, or goes on.

    Args:
        train, validation, test, skipped: numbers of pairs.
        vocabulary: ids.
        parameters: of the model.
        step: steps already done by an earlier call.
    """

    train: int
    validation: int
    test: int
    skipped: int
    vocabulary: int
    parameters: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """A step was done.

    Args:
        step: how many so far.
        loss: of its batch, in nats a token, smoothing included.
        validation: loss of the validation pairs, if this step was followed by a look at them.
        best: whether that was the lowest so far.
    """

    step: int
    loss: float
    validation: float | None = None
    best: bool = False


Event = Prepared | Stepped


@dataclass(frozen=True, kw_only=True)
class Report:
    """What came out.

    Args:
        bleu, chrf: of the test pairs, by beam search.
        signature: sacrebleu's description of the BLEU.
        examples: (source, translation, reference) of a few test pairs.
        validation: loss of the validation pairs at its lowest, in nats a token.
        best_step: when that was.
        steps: that were trained.
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


@dataclass(kw_only=True)
class _Progress:
    """How far a training came."""

    step: int = 0
    epoch: int = 0
    place: int = 0
    best: float = math.inf
    best_step: int = 0
    waited: int = 0
    seconds: float = 0.0
    losses: list[tuple[int, float]] = field(default_factory=list)


def train_translator(
    settings: TranslatorSettings, *, progress: Callable[[Event], None] = lambda event: None
) -> Report:
    """Learn a vocabulary, train, keep the best model, and score it on held-out pairs.

    Into ``settings.out`` go the translator (``model/``, which ``Translator.load`` reads), the
    settings, the state of training and a report. After a Ctrl-C the step is finished and the
    state saved. On the CPU a training that was stopped, or killed, and continued with the same
    ``threads`` ends with the same bits as one that was not.

    Args:
        settings: what to do.
        progress: receives the events.

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
    with torch.random.fork_rng(), _threads(settings.threads):
        torch.manual_seed(settings.seed)
        model = _model(settings, subwords).to(settings.device)
        open_folder(settings, data.fingerprint, replaced=(STATE, REPORT, MODEL))
        session = _Session(settings, data, Translator(model, subwords), progress)
        with interruptible() as stop:
            return session.run(stop)


class _Session:
    """One call of ``train_translator``."""

    def __init__(
        self,
        settings: TranslatorSettings,
        data: Data,
        translator: Translator,
        tell: Callable[[Event], None],
    ) -> None:
        self.settings, self.data, self.translator, self.tell = settings, data, translator, tell
        self.model = translator.model
        self.optimizer = AdamW(
            self.model.parameters(),
            lr=settings.learning_rate,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )
        self.state = _Progress()
        self.best = _copied(self.model)
        if settings.existing == "resume" and (settings.out / STATE).exists():
            self._restore()
        self.batches = self._epoch()

    def run(self, stop: Callable[[], bool]) -> Report:
        settings, data, state = self.settings, self.data, self.state
        self.tell(
            Prepared(
                train=len(data.train),
                validation=len(data.validation),
                test=len(data.test),
                skipped=data.skipped,
                vocabulary=self.translator.subwords.size,
                parameters=sum(parameter.numel() for parameter in self.model.parameters()),
                step=state.step,
            )
        )
        earlier, began = state.seconds, time.perf_counter()
        while state.step < settings.steps and state.waited < settings.patience:
            loss = self._step()
            state.seconds = earlier + time.perf_counter() - began
            if state.step % settings.every and state.step < settings.steps:
                self.tell(Stepped(step=state.step, loss=loss))
            else:
                found = self._validate()
                self._keep(found)
                self._save()
                best = state.best_step == state.step
                self.tell(Stepped(step=state.step, loss=loss, validation=found, best=best))
            if stop():
                self._save()
                raise Interrupted(
                    "training",
                    expected=f"{settings.steps} steps",
                    got=f"a stop after {state.step}",
                    remedy=f"It is saved: go on with --resume --out {settings.out}.",
                )
        return self._finish()

    def _epoch(self) -> list[list[int]]:
        settings = self.settings
        return epoch_batches(
            self.data.train,
            tokens=settings.batch_tokens,
            seed=settings.seed,
            epoch=self.state.epoch,
        )

    def _step(self) -> float:
        """Train on the next batch; its loss."""
        settings, state, data = self.settings, self.state, self.data.train
        if state.place == len(self.batches):
            state.epoch, state.place = state.epoch + 1, 0
            self.batches = self._epoch()
        rows = self.batches[state.place]
        batch = padded([(data[i].source, data[i].target) for i in rows])
        for group in self.optimizer.param_groups:
            group["lr"] = _rate(state.step + 1, settings)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        moved = {name: x.to(settings.device) for name, x in batch.items()}
        loss = pair_loss(self.model, moved, smoothing=settings.smoothing)
        if not math.isfinite(loss.item()):
            raise ArgumentError(
                "learning_rate",
                expected="one at which training converges",
                got=f"{settings.learning_rate}, whose loss at step {state.step + 1} is no number",
                remedy="Lower it, or raise warmup.",
            )
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_NORM)
        self.optimizer.step()
        state.step, state.place = state.step + 1, state.place + 1
        return loss.item()

    @torch.no_grad()
    def _validate(self) -> float:
        """Mean loss of a token of the validation pairs, in nats."""
        self.model.eval()
        total = count = 0.0
        for batch in even_batches(self.data.validation, tokens=self.settings.batch_tokens):
            tokens = float((batch["sizes"][:, 1] - 1).sum())
            moved = {name: x.to(self.settings.device) for name, x in batch.items()}
            total += tokens * float(pair_loss(self.model, moved))
            count += tokens
        return total / count

    def _keep(self, loss: float) -> None:
        state = self.state
        state.losses.append((state.step, loss))
        if loss < state.best:
            state.best, state.best_step, state.waited = loss, state.step, 0
            self.best = _copied(self.model)
        else:
            state.waited += 1

    def _finish(self) -> Report:
        with torch.no_grad():
            for name, tensor in _tensors(self.model).items():
                tensor.copy_(self.best[name])
        self.model.eval()
        settings, test, state = self.settings, self.data.test, self.state
        self.translator.save(settings.out / MODEL)
        lines = [one.line for one in test]
        written = self.translator.translate(
            lines,
            beams=settings.beams,
            length_penalty=settings.length_penalty,
            drop_unknown=True,
        )
        references = [one.translation for one in test]
        score, signature = bleu(written, references)
        parts = (self.data.train, self.data.validation, self.data.test)
        train, validation, tested = map(len, parts)
        report = Report(
            bleu=score,
            chrf=chrf(written, references),
            signature=signature,
            examples=tuple(zip(lines[:5], written[:5], references[:5], strict=True)),
            validation=state.best,
            best_step=state.best_step,
            steps=state.step,
            stopped_early=state.waited >= settings.patience,
            seconds=state.seconds,
            pairs=(train, validation, tested, self.data.skipped),
        )
        plain = {"kind": KIND, **asdict(report), "losses": state.losses}
        write_json(settings.out / REPORT, plain)
        return report

    def _save(self) -> None:
        tensors: dict[str, Tensor] = {}
        for name, tensor in _tensors(self.model).items():
            tensors[f"model.{name}"] = tensor
            tensors[f"best.{name}"] = self.best[name]
        for name, parameter in self.model.named_parameters():
            for key, tensor in self.optimizer.state[parameter].items():
                tensors[f"optimizer.{name}.{key}"] = tensor
        tensors["generator"] = torch.get_rng_state()
        if torch.device(self.settings.device).type == "cuda":
            tensors["generator.cuda"] = torch.cuda.get_rng_state(self.settings.device)
        meta = {"data": self.data.fingerprint, "progress": _plain(self.state)}
        save_tensors(self.settings.out / STATE, tensors, meta)

    @torch.no_grad()
    def _restore(self) -> None:
        path = self.settings.out / STATE
        tensors, meta = load_tensors(path, fits=self._require_fit, remedy=TRAIN_ANEW)
        try:
            for name, tensor in _tensors(self.model).items():
                tensor.copy_(tensors[f"model.{name}"])
                self.best[name].copy_(tensors[f"best.{name}"])
            for name, parameter in self.model.named_parameters():
                prefix = f"optimizer.{name}."
                self.optimizer.state[parameter] = {
                    key.removeprefix(prefix): tensor.to(parameter.device)
                    for key, tensor in tensors.items()
                    if key.startswith(prefix)
                }
            torch.set_rng_state(tensors["generator"])
            if torch.device(self.settings.device).type == "cuda":
                torch.cuda.set_rng_state(tensors["generator.cuda"], self.settings.device)
            self.state = record(_Progress, meta["progress"])
        except (KeyError, TypeError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                str(path), expected="the state of this training", got=error, remedy=TRAIN_ANEW
            ) from error
        if self.state.best_step == 0:
            self.state.best = math.inf

    def _require_fit(self, shapes: Shapes, meta: dict[str, Any]) -> None:
        """Refuse tensors of another model, before any is read."""
        wanted = {
            f"{part}.{name}": tuple(tensor.shape)
            for name, tensor in _tensors(self.model).items()
            for part in ("model", "best")
        }
        require_state_shapes(self.settings.out / STATE, self.model, shapes, wanted)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _model(settings: TranslatorSettings, subwords: Subwords) -> Transformer:
    reach = settings.max_length + ROOM
    own, cross = Recipe.parse(settings.encoding), Recipe.parse(settings.cross_encoding)
    return Transformer(
        TransformerConfig(
            source_vocabulary=subwords.size,
            target_vocabulary=subwords.size,
            shared=True,
            dim=settings.width,
            heads=settings.heads,
            encoder_layers=settings.layers,
            decoder_layers=settings.layers,
            encoder_encoding=own.encoding,
            decoder_encoding=own.encoding,
            cross_encoding=cross.encoding,
            encoder_options=fitted_options(own, reach),
            decoder_options=fitted_options(own, reach),
            cross_options=fitted_options(cross, reach),
            dropout=settings.dropout,
            max_length=reach,
        )
    )


def _rate(step: int, settings: TranslatorSettings) -> float:
    warmup = settings.warmup
    return settings.learning_rate * min(step / warmup, math.sqrt(warmup / step))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each once though layers may share it."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in _tensors(model).items()}


def _plain(state: _Progress) -> dict[str, Any]:
    """As JSON, which has no infinity."""
    return {**asdict(state), "best": state.best if state.best_step else 0.0}
