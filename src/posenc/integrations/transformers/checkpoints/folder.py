"""Reading and writing of transformers checkpoint folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as serialize
from torch import Tensor, nn

from posenc.errors import ArgumentError, CheckpointError, UnknownNameError
from posenc.integrations.transformers.checkpoints.extended import extended
from posenc.integrations.transformers.checkpoints.families import FAMILIES
from posenc.integrations.transformers.checkpoints.family import Family, family_name
from posenc.integrations.transformers.checkpoints.fields import Fields
from posenc.integrations.transformers.checkpoints.mapping import Match, fits, join, match
from posenc.integrations.transformers.checkpoints.stored import INDEX, WHOLE, StoredTensors
from posenc.models.block import GATED
from posenc.models.checkpoint import stored_tensors
from posenc.models.meta_init import meta_init
from posenc.models.stack import StackConfig
from posenc.storage import as_path, output_folder, write_bytes, write_json


def load(
    folder: Path | str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> nn.Module:
    """The model of a transformers checkpoint folder, in eval mode, without dropout.

    Reads ``config.json`` and safetensors (one file or shards), never pickle. Missing, unknown or
    mismatched tensors are errors.

    Args:
        folder: written by ``save_pretrained``, or downloaded from a hub.
        dtype: of the model; weights are converted.
        device: of the model.

    Raises:
        CheckpointError: if the folder is not such a checkpoint, its family or an option is not
            supported, or a file or tensor is missing, damaged, unknown or of another shape.
    """
    fields = Fields.read(as_path(folder))
    family = _family_of(fields)
    with StoredTensors(fields.path.parent) as stored:
        described = Fields(fields.values, fields.path, stored.shapes)
        empty = _made(
            lambda: meta_init(lambda: family.make(described), stored.shapes.values()), fields
        )
        matches, spelled = _matched(empty, family, stored)
        # shapes are compared before memory is allocated
        meta_init(lambda: extended(empty, fields), stored.shapes.values())
        with torch.random.fork_rng(devices=[]):
            model = _made(lambda: family.make(described), fields).to(dtype)
        _fill(model, matches, spelled, stored)
    return extended(model, fields).to(device).eval()


def _made(make: Callable[[], nn.Module], fields: Fields) -> nn.Module:
    """The model of a configuration.

    Raises:
        CheckpointError: if it cannot be created.
    """
    try:
        return make()
    except CheckpointError:
        raise
    except Exception as error:  # an arbitrary file
        raise CheckpointError(
            str(fields.path),
            expected="a valid configuration that matches the weights",
            got=str(error).removesuffix("."),
            remedy="Nothing was loaded.",
        ) from error


def save(
    model: nn.Module,
    folder: Path | str,
    *,
    family: str = "llama",
    like: Path | str | Fields | None = None,
    fields: Mapping[str, Any] | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a model atomically as a checkpoint folder for transformers.

    Args:
        model: with the family's architecture.
        folder: new or empty.
        family: ``model_type`` to write.
        like: a checkpoint folder, or the fields of its ``config.json``, that supplies further
            fields (ids of special tokens, for example). Its description of the encoding is kept if
            it is equivalent.
        fields: of ``config.json``, overriding those of ``like``. ``rope_parameters`` must match the
            model's encoding; they are derived from it by default.
        shard_bytes: maximum file size; larger models are written in shards with an index.

    Raises:
        UnknownNameError: for a family that does not exist or is read-only.
        ArgumentError: if the model does not have the family's architecture, or ``rope_parameters``
            do not match its encoding.
        CheckpointError: if ``like`` is not a checkpoint of this family.
        OutputError: if the folder is in use or cannot be written to.
    """
    written, tensors = _described(model, family, like, fields or {})
    _write(as_path(folder), written, tensors, shard_bytes)


def _described(
    model: nn.Module, family: str, like: Path | str | Fields | None, fields: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields of ``config.json``, and tensors by the family's names."""
    writers = {name: known.write for name, known in FAMILIES.items() if known.write is not None}
    name = family_name(family)
    if name not in writers:
        raise UnknownNameError.of("family", family, writers)
    template = _template(family, like, fields)
    described = writers[name](model, template)
    if "rope_parameters" in fields and "rope_parameters" in described.fields:
        raise ArgumentError(
            "rope_parameters",
            expected=f"values of the model's encoding: {described.fields['rope_parameters']}",
            got=template.values["rope_parameters"],
            remedy="Omit them: they are derived from the model.",
        )
    tensors = _theirs(model, FAMILIES[name], described.tensors)
    dtypes = {tensor.dtype for tensor in tensors.values()}
    written = {
        **template.values,
        **described.fields,
        **fields,
        "architectures": [described.architecture],
        "model_type": family,
        "dtype": str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else "float32",
    }
    return written, tensors


def _template(family: str, like: Path | str | Fields | None, fields: Mapping[str, Any]) -> Fields:
    """Initial fields of a configuration.

    Raises:
        CheckpointError: if ``like`` is not a checkpoint of this family.
    """
    if like is None:
        return Fields(fields, Path("fields"))
    template = like if isinstance(like, Fields) else Fields.read(Path(like))
    if template.values.get("model_type") != family:
        raise template.wrong("model_type", repr(family), repr(template.values.get("model_type")))
    return Fields({**template.values, **fields}, template.path)


def _family_of(fields: Fields) -> Family:
    kind = fields.get("model_type", None)
    if not isinstance(kind, str) or family_name(kind) not in FAMILIES:
        raise CheckpointError(
            f"model_type in {fields.path}",
            expected=f"one of {', '.join(FAMILIES)}",
            got="none" if kind is None else repr(kind),
            remedy="Name a folder written by save_pretrained of transformers."
            if kind is None
            else "Models of other families are not supported.",
        )
    fields.require("quantization_config", None)
    return FAMILIES[family_name(kind)]


def _heads(model: nn.Module) -> int:
    """Heads of every layer; 1 (unused) if layers differ."""
    return model.config.heads if isinstance(model.config, StackConfig) else 1


def _gated(model: nn.Module) -> bool:
    config = model.config
    return isinstance(config, StackConfig) and config.activation in GATED


def _matched(
    model: nn.Module, family: Family, stored: StoredTensors
) -> tuple[list[Match], dict[str, str]]:
    """The model's tensors with their rules, and the spelling of each source in the checkpoint.

    Raises:
        CheckpointError: if a tensor is missing, unknown, or of another shape or dtype.
    """
    tensors, heads = stored_tensors(model), _heads(model)
    meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    matches, left = match(family.rows(_gated(model)), meta, heads=heads)
    if left:
        raise LookupError(f"no rule for {left[0]}")
    spelled: dict[str, str] = {}
    for name, tensor in join(matches).items():
        spelling = next((s for s in family.spellings(name) if s in stored.shapes), None)
        if spelling is None:
            raise _missing(name, family, stored)
        stored.require(spelling, tensor.shape)
        spelled[name] = spelling
    used = set(spelled.values())
    unknown = sorted(name for name in stored.shapes.keys() - used if not _ignored(name, family))
    if unknown:
        raise CheckpointError(
            str(stored.path(unknown[0])),
            expected="only tensors of the model",
            got=unknown[0] + (f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""),
            remedy="This variant is not supported; nothing was loaded.",
        )
    return matches, spelled


def _missing(name: str, family: Family, stored: StoredTensors) -> CheckpointError:
    """The error of a checkpoint without a tensor: of a head, if it has no head at all."""
    prefix = family.prefix
    if prefix and not any(other.startswith(prefix) for other in (name, *stored.shapes)):
        return CheckpointError(
            str(stored.folder),
            expected=f"a model with an output layer ({name}), which predicts the next token",
            got="one without, saved from the bare model",
            remedy="Save the whole model, as AutoModelForCausalLM loads it. Nothing was loaded.",
        )
    return CheckpointError(
        str(stored.folder),
        expected=f"a tensor {name}",
        got="none",
        remedy="config.json describes a model with it. Download both again. Nothing was loaded.",
    )


@torch.no_grad()
def _fill(
    model: nn.Module, matches: Sequence[Match], spelled: Mapping[str, str], stored: StoredTensors
) -> None:
    """Copy every tensor of the model from the checkpoint."""
    tensors, heads = stored_tensors(model), _heads(model)
    begin = dict.fromkeys(spelled, 0)  # first column of the next piece
    for item in matches:
        theirs = []
        for name, part in zip(item.names, item.parts, strict=True):
            tensor = stored.read(spelled[name])
            if item.rule.piece:
                tensor = tensor.narrow(1, begin[name], part.shape[1])
                begin[name] += part.shape[1]
            theirs.append(tensor)
        ours = tensors[item.name]
        ours.copy_(item.rule.read(theirs, heads).reshape(ours.shape))


def _ignored(name: str, family: Family) -> bool:
    """True if an unused tensor is allowed."""
    spellings = (s for pattern in family.ignored for s in family.spellings(pattern))
    return any(fits(spelling, name) is not None for spelling in spellings)


def _theirs(model: nn.Module, family: Family, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Checkpoint tensors from model tensors."""
    plain = {name: tensor.detach().cpu() for name, tensor in ours.items()}
    matches, left = match(family.rows(_gated(model)), plain, heads=_heads(model))
    if left:
        raise ArgumentError(
            "model",
            expected="only tensors of this family",
            got=left[0],
            remedy="Use model.save(folder), or another family.",
        )
    return {name: tensor.contiguous() for name, tensor in join(matches).items()}


def _write(
    folder: Path, fields: Mapping[str, Any], tensors: Mapping[str, Tensor], shard_bytes: int
) -> None:
    with output_folder(folder, "folder") as partial:
        shards = _shards(tensors, shard_bytes)
        index: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            file = (
                WHOLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            )
            write_bytes(partial / file, serialize(shard, metadata={"format": "pt"}))
            index |= dict.fromkeys(shard, file)
        if len(shards) > 1:
            total = sum(t.numel() * t.element_size() for t in tensors.values())
            metadata = {"total_size": total}
            write_json(partial / INDEX, {"metadata": metadata, "weight_map": index})
        write_json(partial / "config.json", dict(sorted(fields.items())))


def _shards(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Consecutive tensors in groups of at most ``limit`` bytes (or one tensor)."""
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    return shards
