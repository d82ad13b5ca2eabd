"""Small models stretched without training, over several trained lengths and seeds.

    python -m benchmarks.stretching [--lengths 64 128] [--seeds 2] [--steps 1200] [--threads 2]

Models of bytes are trained on the shipped text as ``posenc extend`` trains its own
(kept in ``posenc-stretching/``, so that a second run only measures). Four tables:

- *order*: bits a byte at twice the trained length by each method, on the same bytes;
- *ramp*: YaRN at factor 4 with other ramps and temperatures, and other methods: how much worse than
  the original they are at the trained length, and their bits a byte at four times that;
- *masked*: a BERT of bytes with a table of positions, stretched by factor 4: bits a masked byte by
  length. For its report: ``posenc extend posenc-stretching/masked-0/bert
  --method all --factor 4``;
- *images*: a ViT that learned 8×8 digits with a table of positions: the share it classifies right
  when they are shown larger, the table interpolated. What ``posenc extend`` reports of one is at
  ``posenc extend posenc-stretching/digits-0/vit --images posenc-stretching/digits-0/images.npz
  --method all --factor 2``.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import torch
from benchmarks.measuring import write_results
from benchmarks.replacing import encodings_of, with_encodings, with_window
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, ViTConfig, ViTForImageClassification

from posenc.extension import extend_layers
from posenc.lab.evaluation.candidates import Method, methods_for
from posenc.lab.evaluation.checkpoint import Checkpoint
from posenc.lab.evaluation.demo_model import Repetition, train_demo_model
from posenc.lab.evaluation.images import ImageSource
from posenc.lab.evaluation.settings import Tuning
from posenc.lab.evaluation.study import measure_extensions
from posenc.lab.evaluation.texts import SpecialTokens, read_ids
from posenc.lab.experiments.corpus import Pieces, read_corpus
from posenc.lab.experiments.settings import ComparisonSettings
from posenc.lab.experiments.tasks.digits import Digits
from posenc.lab.experiments.tasks.masked import MASK, MaskedBytes
from posenc.lab.experiments.text_loss import Targets
from posenc.lab.reporting.numbers import estimate
from posenc.lab.training.checkpoint import TrainingPlan
from posenc.lab.training.loop import train
from posenc.models import Decoder
from posenc.transformers.live import LiveMaskedLM

FOLDER = Path("posenc-stretching")
ORDER = ("direct", "interpolate", "ntk", "ntk_by_parts", "yarn", "yarn@alpha=0.5@beta=4")
ORDER += ("dynamic_ntk", "self_extend", "leaky_rerope", "rerope")
RAMPS = ("yarn", "yarn@truncate=False", "yarn@temperature=1", "yarn@alpha=0.5@beta=4")
RAMPS += ("yarn@alpha=0.5@beta=3@truncate=False", "yarn@alpha=0.4@beta=1.2@truncate=False")
RAMPS += ("yarn@alpha=0.25@beta=2@truncate=False", "yarn@alpha=0.1@beta=1@truncate=False")
RAMPS += ("interpolate", "ntk", "dynamic_ntk", "longrope", "llama3", "self_extend", "rerope")
WINDOWS = 192
DIGITS, BERT_LENGTH = 8, 64
BERT_STEPS = 5000  # after 1,200 it knows little more than how frequent each byte is


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    text, pieces = Pieces.joined(read_corpus(None).held_out)
    rows: list[dict[str, object]] = []
    for length in options.lengths:
        models = [trained(length, seed, options.steps) for seed in range(options.seeds)]
        rows += order(models, text, pieces, length)
        rows += ramps(models, text, pieces, length)
    rows += masked(options.seeds)
    rows += images(options.seeds)
    path = write_results("stretching", rows, steps=options.steps, seeds=options.seeds)
    print(f"Written to {path}.")


def trained(length: int, seed: int, steps: int) -> Decoder:
    """The model of this length and seed, trained if it is not there yet."""
    folder = FOLDER / f"{length}-{seed}-{steps}"
    if not (folder / "model").exists():
        print(f"training at {length} bytes, seed {seed}", flush=True)
        work = folder / "training"
        work.mkdir(parents=True, exist_ok=True)
        # Nothing is asked to be copied here: fewer rows than usual are for that.
        model = train_demo_model(
            work, length=length, steps=steps, seed=seed, repetition=Repetition(rows=2, latest=0.5)
        )
        model.save(folder / "model")
        shutil.rmtree(work)
    return Decoder.load(folder / "model").requires_grad_(requires_grad=False).eval()


def stretched(model: Decoder, spec: str, *, factor: float, length: int) -> nn.Module:
    method = Method.parse(spec)
    records = extend_layers(
        encodings_of(model), method.name, factor=factor, length=length, **method.options
    )
    return with_encodings(model, records)


def order(
    models: list[Decoder], text: torch.Tensor, pieces: Pieces, length: int
) -> list[dict[str, object]]:
    """Every method at twice the trained length, from worst to best."""
    targets = Targets.spread(pieces, width=length // 2, longest=2 * length, count=WINDOWS)
    found = {
        spec: [
            targets.loss(stretched(m, spec, factor=2, length=length), text, 2 * length)
            for m in models
        ]
        for spec in ORDER
    }
    found["window"] = [targets.loss(with_window(m, length), text, 2 * length) for m in models]
    found["direct at L"] = [targets.loss(m, text, length) for m in models]
    print(f"\ntrained at {length} bytes; bits a byte at {2 * length}, without training")
    rows: list[dict[str, object]] = []
    for spec, losses in sorted(found.items(), key=lambda pair: -sum(pair[1])):
        print(f"  {spec:26} {shown(losses)}   {'  '.join(f'{x:.3f}' for x in losses)}", flush=True)
        rows.append({"table": "order", "length": length, "method": spec, "bits": losses})
    return rows


def ramps(
    models: list[Decoder], text: torch.Tensor, pieces: Pieces, length: int
) -> list[dict[str, object]]:
    """YaRN at factor 4: loss at the trained length, as a share of the original's, and at 4 L."""
    targets = Targets.spread(pieces, width=length // 2, longest=4 * length, count=WINDOWS)
    base = [targets.loss(model, text, length) for model in models]
    print(
        f"\ntrained at {length} bytes, factor 4; at {length} against the original; at {4 * length}"
    )
    rows: list[dict[str, object]] = []
    for spec in RAMPS:
        twins = [stretched(model, spec, factor=4, length=length) for model in models]
        short = [targets.loss(m, text, length) / b - 1 for m, b in zip(twins, base, strict=True)]
        long = [targets.loss(m, text, 4 * length) for m in twins]
        print(f"  {spec:52} {shown(short, '+.1%')}   {shown(long)}", flush=True)
        rows.append(
            {"table": "ramp", "length": length, "method": spec, "worse": short, "bits": long}
        )
    return rows


def masked(seeds: int) -> list[dict[str, object]]:
    """Masked bytes by a table of positions, as ``posenc extend`` measures them."""
    text = read_ids(None, encode=None, training=False, special=SpecialTokens(mask=MASK))
    found: dict[str, dict[int, list[float]]] = {}
    for seed in range(seeds):
        folder = FOLDER / f"masked-{seed}"
        if not (folder / "bert").exists():
            work = folder / "training"
            work.mkdir(parents=True, exist_ok=True)
            task = BertBytes(
                ComparisonSettings(out=FOLDER, task="masked", train_length=BERT_LENGTH)
            )
            plan = TrainingPlan(
                encoding="learned", seed=seed, steps=BERT_STEPS, rate=1e-3, folder=work
            )
            train(task, plan).model.model.save_pretrained(folder / "bert")
        subject = Checkpoint.open(folder / "bert")
        methods = methods_for("all", subject.model, length=BERT_LENGTH)
        outcome = measure_extensions(subject, text, methods, factor=4, tuning=Tuning(steps=0))
        for each, reading in outcome.study.ranked():
            for length, bits in reading.loss.items():
                found.setdefault(each.key, {}).setdefault(length, []).append(bits)
    print(f"\nmasked bytes restored, learned at {BERT_LENGTH}; bits each")
    for key, lengths in found.items():
        print(f"  {key:28} {'   '.join(f'{n}: {shown(b)}' for n, b in lengths.items())}")
    return [
        {"table": "masked", "method": key, "length": length, "bits": bits}
        for key, lengths in found.items()
        for length, bits in lengths.items()
    ]


class BertBytes(MaskedBytes):
    """The lab's task of masked bytes, learned by a BERT."""

    def build(self, encoding: str) -> LiveMaskedLM:
        config = BertConfig(
            vocab_size=MASK + 1,
            hidden_size=96,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            type_vocab_size=1,
            max_position_embeddings=BERT_LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return LiveMaskedLM(BertForMaskedLM(config))


def images(seeds: int) -> list[dict[str, object]]:
    """Larger digits by a table of positions, as ``posenc extend`` measures them.

    The model of each seed and the images it has not seen are kept for that command.
    """
    found: dict[tuple[str, int], list[float]] = {}
    for seed in range(seeds):
        folder = FOLDER / f"digits-{seed}"
        source = ImageSource(folder / "images.npz")
        if not (folder / "vit").exists():
            _train_vit(folder, seed)
        subject = Checkpoint.open(folder / "vit")
        methods = methods_for("all", subject.model, length=DIGITS)
        outcome = measure_extensions(subject, source, methods, factor=2, tuning=Tuning(steps=0))
        for each, reading in outcome.study.ranked():
            for side, share in reading.right.items():
                found.setdefault((each.key, side), []).append(share)
    print("\ndigits learned at 8×8; share classified right")
    for (way, side), shares in found.items():
        print(f"  {way:26} {side}×{side}  {shown(shares, '.1%')}")
    return [
        {"table": "images", "side": side, "method": way, "right": shares}
        for (way, side), shares in found.items()
    ]


def _train_vit(folder: Path, seed: int) -> None:
    """A ViT that learns digits, as a checkpoint of transformers, and the digits held out."""
    task = VitDigits(ComparisonSettings(out=FOLDER, task="digits", encodings=("learned2d",)))
    work = folder / "training"
    work.mkdir(parents=True, exist_ok=True)
    plan = TrainingPlan(encoding="learned2d", seed=seed, steps=1200, rate=3e-3, folder=work)
    model = train(task, plan).model.eval()
    held_out = task.held_out
    np.savez(folder / "images.npz", images=held_out.pixels.numpy(), labels=held_out.labels.numpy())
    model.model.save_pretrained(folder / "vit")


class VitDigits(Digits):
    """The lab's task of digits, learned by a ViT."""

    def build(self, encoding: str) -> Vit:
        config = ViTConfig(
            image_size=DIGITS,
            patch_size=self.settings.options["patch"],
            num_channels=1,
            hidden_size=self.settings.width,
            intermediate_size=4 * self.settings.width,
            num_hidden_layers=self.settings.layers,
            num_attention_heads=self.settings.heads,
            hidden_dropout_prob=self.settings.options["dropout"],
            attention_probs_dropout_prob=self.settings.options["dropout"],
            num_labels=10,
        )
        return Vit(ViTForImageClassification(config))


class Vit(nn.Module):
    """A ViT that answers logits alone."""

    def __init__(self, model: ViTForImageClassification) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=images).logits
        return logits


def shown(values: list[float], form: str = ".3f") -> str:
    found = estimate(values)
    assert found is not None
    return found.shown(form)


if __name__ == "__main__":
    main()
