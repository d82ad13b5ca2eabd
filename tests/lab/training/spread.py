"""Trainings of small models on several ranks; the jobs of the pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from posenc import models
from posenc.errors import Interrupted, PosencError
from posenc.lab.training import TrainingPlan, Watch, fit, full_weights, loop
from posenc.layout import Layout
from posenc.models.complex import ClassifierConfig, SequenceClassifier
from posenc.models.encoder import Deberta, DebertaConfig

VOCABULARY, ROWS, LENGTH = 19, 5, 8
IGNORED = -100

STEPS = 8
"""Of a training: warm-up, full rate and decay, and enough for the smallest difference to show."""

SIZES: dict[str, Any] = {"dim": 16, "heads": 2}
TEXT: dict[str, Any] = {"vocabulary": VOCABULARY, "layers": 1, "max_length": 16, **SIZES}
CLASSES = {"body": "transformer", "vocabulary": VOCABULARY, "classes": 3, "hidden": 16, **SIZES}
VOCABULARIES = {"source_vocabulary": VOCABULARY, "target_vocabulary": VOCABULARY}
LAYERS = {"encoder_layers": 1, "decoder_layers": 1}
ENCODINGS = {"encoder_encoding": "rope", "decoder_encoding": "shaw"}
TRANSLATION: dict[str, Any] = {**VOCABULARIES, **LAYERS, **ENCODINGS, **SIZES}
PIXELS = {"channels": 1, "classes": 3}
IMAGES = {"size": (8, 8), "patch": 4, "layers": 1, "encoding": "rope_mixed", **PIXELS, **SIZES}
STAGES = {"dim": 8, "depths": (1, 1), "heads": (1, 2), "window": 4}
WINDOWS: dict[str, Any] = {"size": (16, 16), "patch": 2, **STAGES, **PIXELS}


def build(kind: str, encoding: str | None = None) -> nn.Module:
    """A small model of a kind of ``posenc.models.MODELS``, the same on every rank."""
    torch.manual_seed(3)
    text = models.EncoderConfig(**TEXT, encoding=encoding or "learned+t5")
    builders: dict[str, Callable[[], nn.Module]] = {
        "decoder": lambda: models.Decoder(models.DecoderConfig(**TEXT, encoding=encoding or "t5")),
        "encoder": lambda: models.Encoder(text),
        "masked_lm": lambda: models.MaskedLM(text),
        "text_classifier": lambda: models.TextClassifier(replace(text, classes=3)),
        "deberta": lambda: Deberta(DebertaConfig(**{**TEXT, "layers": 2})),
        "sequence_classifier": lambda: SequenceClassifier(ClassifierConfig(**CLASSES)),
        "transformer": lambda: models.Transformer(models.TransformerConfig(**TRANSLATION)),
        "vision_transformer": lambda: models.VisionTransformer(models.ImageConfig(**IMAGES)),
        "swin": lambda: models.Swin(models.SwinConfig(**WINDOWS)),
    }
    assert kind in builders, f"{kind} is new: say how to train it"
    return builders[kind]()


class Learning:
    """Random tokens or images, with labels of which a few are ignored."""

    tokens_per_step = ROWS * LENGTH

    def __init__(self, kind: str) -> None:
        self.kind = self.fingerprint = kind

    def batch(self, seed: int, step: int) -> Mapping[str, Any]:
        source = torch.Generator().manual_seed(100 * seed + step)
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=source)
        targets = tokens.roll(1, 1) % SIZES["dim"]  # as many classes as an encoder has features
        targets[torch.rand(ROWS, LENGTH, generator=source) < 0.4] = IGNORED
        batch = {"tokens": tokens, "targets": targets, "labels": tokens[:, 0] % 3}
        if self.kind in ("vision_transformer", "swin"):
            side = 16 if self.kind == "swin" else 8
            batch["tokens"] = torch.randn(ROWS, 1, side, side, generator=source)
            batch["targets"] = batch["labels"]
        elif self.kind.endswith("classifier"):
            batch["targets"] = batch["labels"]
        elif self.kind == "decoder":
            valid = torch.rand(ROWS, LENGTH, generator=source) < 0.8
            layout = Layout.sequence(LENGTH)
            return {**batch, "layout": Layout(layout.positions, layout.order, valid=valid)}
        return batch

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        others = {"transformer": [batch["tokens"].flip(1)], "decoder": [batch.get("layout")]}
        logits = model(batch["tokens"], *others.get(self.kind, []))
        return F.cross_entropy(
            logits.flatten(0, -2), batch["targets"].flatten(), ignore_index=IGNORED
        )

    def weight(self, batch: Mapping[str, Any]) -> int:
        return int((batch["targets"] != IGNORED).sum())


def plan(kind: str, steps: int, folder: str | None = None, **changes: Any) -> TrainingPlan:
    """Of so many steps, with a checkpoint in ``folder``."""
    path = None if folder is None else Path(folder)
    return TrainingPlan(encoding=kind, seed=1, steps=steps, rate=0.003, folder=path, **changes)


def trained(
    group: dist.ProcessGroup,
    kind: str,
    steps: int = STEPS,
    encoding: str | None = None,
    **changes: Any,
) -> tuple[list[float], dict[str, list[float]]]:
    """Losses and final weights; on one rank, of a training without a mesh."""
    ranks = dist.get_world_size(group)
    mesh = DeviceMesh.from_group(group, "cpu") if ranks > 1 else None
    result = fit(build(kind, encoding), Learning(kind), plan(kind, steps, **changes), mesh=mesh)
    weights = result.model.state_dict() if mesh is None else full_weights(result.model)
    return result.losses.tolist(), {name: x.flatten().tolist() for name, x in weights.items()}


def stopped(group: dist.ProcessGroup, after: int, **settings: Any) -> str:
    """The error of a training that one rank stops after so many steps."""
    calls = iter(range(1, 1000))

    def stop() -> bool:
        return next(calls) >= after and dist.get_rank(group) == dist.get_world_size(group) - 1

    mesh = DeviceMesh.from_group(group, "cpu")
    kind = settings.pop("kind")
    try:
        fit(build(kind), Learning(kind), plan(kind, STEPS, **settings), Watch(stop=stop), mesh=mesh)
    except Interrupted as error:
        return str(error)
    raise AssertionError("not stopped")


def killed(group: dist.ProcessGroup, at: int, kind: str, **settings: Any) -> int:
    """Saves after every step, and ends without a word after ``at``; steps done in this call."""
    done: list[int] = []

    class Killed(BaseException):
        pass

    def stepped(step: int, loss: Tensor, speed: float) -> None:
        done.append(step)
        if step == at:
            raise Killed

    mesh = DeviceMesh.from_group(group, "cpu")
    before, loop.SAVE_SECONDS = loop.SAVE_SECONDS, 0.0
    try:
        planned = plan(kind, STEPS, **settings)
        fit(build(kind), Learning(kind), planned, Watch(stepped=stepped), mesh=mesh)
    except Killed:
        return done[0]
    finally:
        loop.SAVE_SECONDS = before
    return done[0]


def refused_differing(group: dist.ProcessGroup, what: str, folder: str) -> str:
    """The error of a training in which the last rank differs from the others."""
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    settings: dict[str, Any] = {}
    if what == "folder":
        own = Path(folder) / str(int(last))
        own.mkdir(exist_ok=True)
        settings["folder"] = str(own)
    elif last:
        settings = {"accumulate": 2} if what == "plan" else {"encoding": "rope"}
    return refused(group, **settings)


def refused(group: dist.ProcessGroup, **settings: Any) -> str:
    """The error of a training that cannot be."""
    try:
        trained(group, "decoder", steps=2, **settings)
    except PosencError as error:
        return str(error)
    raise AssertionError("not refused")
