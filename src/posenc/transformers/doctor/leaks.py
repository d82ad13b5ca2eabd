"""Documents of a packed batch that reach one another, found by changing one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from posenc.errors import ArgumentError
from posenc.transformers.acceleration.accelerated import is_on_interface
from posenc.transformers.acceleration.api import INTERNAL
from posenc.transformers.acceleration.trials import device_of, transformers_model
from posenc.transformers.calls import names_of
from posenc.transformers.doctor.packed import BOUNDS, IDS, MASK, PLACES, SEQUENCES, PackedBatch
from posenc.transformers.settings import settings_kept
from posenc.transformers.stretching.changes import Change, undo
from posenc.transformers.stretching.configs import configs_of

MODES = {"training": False, "evaluation": False, "evaluation with a cache": True}
"""Passes that are tried, and their ``use_cache``."""

TOLERANCE = {torch.float16: 0.03, torch.bfloat16: 0.1}
"""Largest change of a token's output, as a share of its size, that rounding explains; 0.001
otherwise."""

OWN_ROWS = "a row of its own for each document"


@dataclass(frozen=True)
class Leak:
    """Documents that another one reaches in one kind of passes.

    Args:
        mode: ``training``, ``evaluation`` or ``evaluation with a cache``.
        documents: numbers of those whose outputs moved.
        largest: change of a token's output, as a share of its size.
        remedy: settings by which none moves, as tried; "" where none did.
    """

    mode: str
    documents: tuple[int, ...]
    largest: float
    remedy: str


@dataclass(frozen=True)
class Leaks:
    """Leaks in a packed batch.

    Args:
        lengths: tokens of each document.
        changed: the document that was changed, from 0.
        modes: what moved in each kind of passes.
    """

    lengths: tuple[int, ...]
    changed: int
    modes: tuple[Leak, ...]


@dataclass(frozen=True)
class _Pass:
    """A pass: its arguments, and the attention implementation; None: as it is."""

    inputs: Mapping[str, Any]
    use_cache: bool
    attention: str | None = None


def find_leaks(model: nn.Module, batch: PackedBatch | Mapping[str, Any]) -> Leaks:
    """Change one document of a packed batch, and see whether outputs of others move.

    transformers separates documents by ``position_ids`` in passes without a cache and without an
    ``attention_mask`` [B, T]; other arguments and layers that carry a state may join them. Training
    is tried without dropout, as the passes of a Trainer are: without a cache. The model is left as
    it was.

    Args:
        model: of transformers, of text.
        batch: what a collator returns; see ``PackedBatch.of``.

    Raises:
        ArgumentError: for a batch that tells no documents, or does not fit the model.
    """
    packed = batch if isinstance(batch, PackedBatch) else PackedBatch.of(batch)
    inner = transformers_model(model)
    _require_fitting(inner, packed)
    changed = (len(packed.lengths) - 1) // 2
    trial = _Trial(inner, packed, changed)
    modes = []
    for mode, use_cache in MODES.items():
        if use_cache and "use_cache" not in names_of(inner.base_model.forward):
            continue
        with _as_in(inner, training=mode == "training"):
            modes.append(trial.leak(mode, _Pass(packed.inputs, use_cache)))
    return Leaks(tuple(packed.lengths), changed, tuple(modes))


def _require_fitting(model: Any, packed: PackedBatch) -> None:
    """Require tokens of the model's vocabulary.

    Raises:
        ArgumentError: for another model or batch.
    """
    if model.main_input_name != IDS:
        raise ArgumentError(
            "batch",
            expected=f"a model of text, which takes {IDS}",
            got=f"{type(model).__name__}, which takes {model.main_input_name}",
            remedy="Packed batches are of text.",
        )
    ids, vocabulary = packed.inputs[IDS], model.config.get_text_config().vocab_size
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise ArgumentError(
            "input_ids of the batch",
            expected=f"numbers from 0 to {vocabulary - 1:,}, the model's vocabulary",
            got=f"{int(ids.min()):,} to {int(ids.max()):,}",
            remedy="Make the batch with the tokenizer of this model.",
        )


@contextmanager
def _as_in(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Training mode without dropout, or evaluation mode, without gradients."""
    with settings_kept(model), torch.no_grad(), torch.random.fork_rng():
        for module in model.modules():
            module.training = training
            for name, value in vars(module).items():
                if isinstance(value, float) and ("drop" in name or isinstance(module, nn.Dropout)):
                    setattr(module, name, 0.0)
        yield


@dataclass(frozen=True)
class _Trial:
    """A model, and a batch of which one document is changed."""

    model: Any
    packed: PackedBatch
    changed: int

    def leak(self, mode: str, given: _Pass) -> Leak:
        """Documents that move, and settings by which none does."""
        documents, largest = self.moved(given)
        remedy = self._remedy(given) if documents else ""
        return Leak(mode, documents, largest, remedy)

    def moved(self, given: _Pass) -> tuple[tuple[int, ...], float]:
        """Other documents whose outputs move, and by how much at most."""
        before, after = (
            self._outputs(replace(given, inputs={**given.inputs, IDS: ids}))
            for ids in (self.packed.inputs[IDS], self.packed.changed(self.changed))
        )
        documents = self.packed.documents
        change = (after - before).norm(dim=-1) / before.norm(dim=-1).clamp(min=1e-30)
        change[(documents < 0) | (documents == self.changed)] = 0
        beyond = change > TOLERANCE.get(self.model.dtype, 1e-3)
        return tuple(sorted(set(documents[beyond].tolist()))), float(change.max())

    def _outputs(self, given: _Pass) -> Tensor:
        """Last hidden states, float64.

        Raises:
            ArgumentError: if the model does not take the batch.
        """
        model, device, outputs = self.model, device_of(self.model), list[Any]()
        options = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in given.inputs.items()}
        if "use_cache" in names_of(model.base_model.forward):
            options["use_cache"] = given.use_cache
        if "logits_to_keep" in names_of(model.forward):
            options["logits_to_keep"] = 1
        name, changes = given.attention, list[Change]()
        if name is not None:
            changes = [Change.of(config, INTERNAL, name) for config in configs_of(model)]
        hook = model.base_model.register_forward_hook(lambda *call: outputs.append(call[-1]))
        torch.manual_seed(0)
        try:
            model(**options)
        except Exception as error:  # of any model type
            raise ArgumentError(
                "batch",
                expected=f"arguments that {type(model).__name__} takes",
                got=f"{', '.join(given.inputs)}: {type(error).__name__}: {error}",
                remedy="Pass what the collator of its training returns.",
            ) from error
        finally:
            hook.remove()
            undo(changes)
        hidden: Tensor = outputs[-1][0]
        return hidden.double().cpu()

    def _remedy(self, given: _Pass) -> str:
        """The fewest of the settings, in their order, by which nothing moves."""
        chosen: list[tuple[str, _Pass]] = []
        for setting in self._settings(given):
            chosen.append(setting)
            if self._stops(given, chosen):
                break
        else:
            return OWN_ROWS
        for setting in chosen[:-1]:
            fewer = [other for other in chosen if other is not setting]
            if self._stops(given, fewer):
                chosen = fewer
        return " and ".join(words for words, _ in chosen)

    def _stops(self, given: _Pass, chosen: list[Any]) -> bool:
        for _, change in chosen:
            given = change(given)
        try:
            return not self.moved(given)[0]
        except ArgumentError:  # of a setting that the model does not take
            return False

    def _settings(self, given: _Pass) -> Iterator[Any]:
        """Settings in words, and the pass with each."""
        packed, names = self.packed, names_of(self.model.forward)

        def with_inputs(**inputs: Any) -> Any:
            return lambda one: replace(one, inputs={**one.inputs, **inputs})

        if given.use_cache:
            yield "use_cache=False", lambda one: replace(one, use_cache=False)
        if MASK in given.inputs:
            yield (
                f"no {MASK}",
                lambda one: replace(
                    one, inputs={name: x for name, x in one.inputs.items() if name != MASK}
                ),
            )
        if PLACES in names:
            places, known = packed.positions(), given.inputs.get(PLACES)
            if known is None or not torch.equal(known, places):
                yield (
                    f"{PLACES} that begin anew with each document",
                    with_inputs(position_ids=places),
                )
        if len(packed.documents) == 1 and BOUNDS not in given.inputs:
            bounds = packed.bounds()
            yield ", ".join(bounds), with_inputs(**bounds)
            yield SEQUENCES, with_inputs(seq_idx=packed.documents.int())
        if is_on_interface(type(self.model)):
            for name in ("sdpa", "eager"):
                if name != self.model.config._attn_implementation:
                    yield (
                        f"attn_implementation={name!r}",
                        lambda one, name=name: replace(one, attention=name),
                    )
