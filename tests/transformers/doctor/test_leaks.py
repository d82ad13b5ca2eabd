"""Documents that reach one another in packed batches; each verdict against documents read alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AttentionInterface, DataCollatorWithFlattening
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from posenc.errors import PosencError
from posenc.transformers import accelerate
from posenc.transformers.doctor.leaks import OWN_ROWS, Leaks, find_leaks
from posenc.transformers.doctor.packed import PackedBatch
from tests.support.tiny_models import VOCABULARY, tiny_model

LENGTHS = (5, 7, 4)
GENERATOR = torch.Generator().manual_seed(2)
TEXTS = [torch.randint(3, VOCABULARY, (n,), generator=GENERATOR).tolist() for n in LENGTHS]
PLACES = "position_ids that begin anew with each document"


def batch(**options: Any) -> dict[str, Any]:
    """Three documents, packed by transformers' collator."""
    features = [{"input_ids": ids, "labels": ids} for ids in TEXTS]
    made: dict[str, Any] = DataCollatorWithFlattening(return_tensors="pt", **options)(features)
    return dict(made)


def found(model: Any, given: Any) -> list[tuple[str, tuple[int, ...], str]]:
    return [(one.mode, one.documents, one.remedy) for one in find_leaks(model, given).modes]


def separate(model: Any) -> list[tuple[str, tuple[int, ...], str]]:
    """Findings on a model that separates documents, but not beside a cache."""
    del model
    return [
        ("training", (), ""),
        ("evaluation", (), ""),
        ("evaluation with a cache", (2,), "use_cache=False"),
    ]


@torch.no_grad()
def reads_alone(model: Any, given: dict[str, Any], use_cache: bool) -> bool:
    """True if outputs are those of each document in a row of its own."""
    model.eval()
    inputs = {k: x for k, x in given.items() if k not in ("labels", "document_ids")}
    packed = model(**inputs, use_cache=use_cache).logits[0]
    alone = [model(torch.tensor([ids]), use_cache=use_cache).logits[0] for ids in TEXTS]
    return bool((packed - torch.cat(alone)).abs().max() < 1e-3 * packed.abs().max())


def with_mask() -> dict[str, Any]:
    given = batch()
    return given | {"attention_mask": torch.ones_like(given["input_ids"])}


def without_places() -> dict[str, Any]:
    numbers = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]
    return batch(return_position_ids=False) | {"document_ids": numbers}


def by_bounds() -> dict[str, Any]:
    return batch(return_position_ids=False, return_flash_attn_kwargs=True)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2", "deepseek_v3"])
@pytest.mark.parametrize("attention", ["eager", "sdpa", "posenc"])
def test_position_ids_separate_without_a_cache(kind: str, attention: str) -> None:
    model = tiny_model(kind)
    if attention == "posenc":
        accelerate(model, check=False)
    else:
        model.set_attn_implementation(attention)
    assert found(model, batch()) == separate(model)
    assert reads_alone(model, batch(), False)
    assert not reads_alone(model, batch(), True)


@pytest.mark.parametrize(
    ("make", "remedy"),
    [(with_mask, "no attention_mask"), (without_places, PLACES), (by_bounds, PLACES)],
)
def test_arguments_that_join_documents(make: Callable[[], Any], remedy: str) -> None:
    model = tiny_model("llama")
    assert found(model, make()) == [
        ("training", (2,), remedy),
        ("evaluation", (2,), remedy),
        ("evaluation with a cache", (2,), f"use_cache=False and {remedy}"),
    ]
    assert not reads_alone(model, make(), False)


@pytest.mark.parametrize("kind", ["bloom", "falcon_mamba", "qwen3_next", "bert"])
def test_models_that_join_whatever_they_are_told(kind: str) -> None:
    model = tiny_model(kind)
    leaks = found(model, batch() if kind != "bloom" else without_places())
    assert all(remedy == OWN_ROWS for _, _, remedy in leaks)
    # of an encoder, both sides are reached
    assert all(documents == ((0, 2) if kind == "bert" else (2,)) for _, documents, _ in leaks)


def test_rows_of_their_own() -> None:
    rows = {"input_ids": torch.tensor([ids[:4] for ids in TEXTS])}
    rows |= {"document_ids": torch.arange(3)[:, None].expand(3, 4)}
    for kind in ("llama", "bloom", "falcon_mamba"):
        leaks = find_leaks(tiny_model(kind), rows)
        assert leaks.lengths == (4, 4, 4)
        assert not any(one.documents or one.largest for one in leaks.modes)


def test_dropout_is_off_and_all_is_put_back() -> None:
    model = tiny_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5)
    model.train()
    model.transformer.h[0].eval()
    before = [(m.training, dict(vars(m))) for m in model.modules()]
    implementation, state = model.config._attn_implementation, torch.random.get_rng_state()
    assert found(model, batch())[0] == ("training", (), "")
    assert all(m.training == flag for m, (flag, _) in zip(model.modules(), before, strict=True))
    rates = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    assert 0.5 in rates
    assert model.config._attn_implementation == implementation
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not any(m._forward_hooks for m in model.modules())


def test_dropout_does_not_change_what_is_found() -> None:
    leaks = find_leaks(tiny_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5), with_mask())
    training, evaluation, _ = (one.largest for one in leaks.modes)
    assert training == pytest.approx(evaluation, rel=1e-5)


def test_a_leak_in_training_alone() -> None:
    model = tiny_model("llama")

    def mix(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output + output.mean(1, keepdim=True) if module.training else output

    model.model.layers[0].mlp.register_forward_hook(mix)
    assert found(model, batch())[:2] == [("training", (0, 2), OWN_ROWS), ("evaluation", (), "")]


def test_an_attention_without_a_mask() -> None:
    """Of a name for which transformers makes no mask: of all settings, one is needed."""
    AttentionInterface.register("posenc_unmasked", sdpa_attention_forward)
    model = tiny_model("llama")
    model.set_attn_implementation("posenc_unmasked")
    leaks = found(model, batch())
    assert leaks[1] == ("evaluation", (2,), "attn_implementation='sdpa'")
    assert model.config._attn_implementation == "posenc_unmasked"


def test_a_small_leak() -> None:
    """Through one head of one layer whose values are small."""
    model = tiny_model("llama")
    given = with_mask()
    full = find_leaks(model, given).modes[1].largest
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.05
    (_, leak, _) = find_leaks(model, given).modes
    assert leak.documents == (2,)
    assert 0 < leak.largest < full


def test_padding_is_no_document() -> None:
    ids = torch.tensor([[*TEXTS[0], *TEXTS[1], 0, 0]])
    mask = torch.tensor([[1] * 5 + [2] * 7 + [0, 0]])
    packed = PackedBatch.of({"input_ids": ids, "attention_mask": mask})
    assert packed.lengths == [5, 7]
    assert packed.documents[0].tolist() == [0] * 5 + [1] * 7 + [-1] * 2
    assert packed.positions()[0, :12].tolist() == [*range(5), *range(7)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_flash_attn_kwargs": True},
        {"return_seq_idx": True},
        {"return_flash_attn_kwargs": True, "return_position_ids": False},
        {"return_seq_idx": True, "return_position_ids": False},
        {"return_position_ids": True, "position_ids_start": 2},
    ],
)
def test_documents_of_what_the_collator_returns(options: dict[str, Any], tmp_path: Path) -> None:
    made = batch(**options)
    packed = PackedBatch.of(made)
    assert packed.lengths == [*LENGTHS]
    assert packed.positions()[0].tolist() == [place for n in LENGTHS for place in range(n)]
    plain = {k: x.tolist() if isinstance(x, Tensor) else x for k, x in made.items()}
    (tmp_path / "batch.json").write_text(json.dumps(plain))
    tensors = {k: torch.as_tensor(x).contiguous() for k, x in made.items()}
    save_file(tensors, tmp_path / "batch.safetensors")
    for name in ("batch.json", "batch.safetensors"):
        read = PackedBatch.read(tmp_path / name)
        assert torch.equal(read.documents, packed.documents)
        assert read.inputs.keys() == packed.inputs.keys()
    bounds = packed.bounds()
    assert bounds["cu_seq_lens_q"].tolist() == [0, 5, 12, 16]
    assert (bounds["max_length_q"], bounds["cu_seq_lens_k"].dtype) == (7, torch.int32)


def test_a_changed_document_has_other_tokens_of_the_batch() -> None:
    packed = PackedBatch.of(batch())
    ids, other = packed.inputs["input_ids"][0], packed.changed(1)[0]
    assert [int(i) for i in (ids != other).nonzero().flatten()] == [*range(5, 12)]
    assert set(other.tolist()) <= set(ids.tolist())
    for number in (0, 3):
        same = {"input_ids": [[number] * 4], "document_ids": [[0, 0, 1, 1]]}
        changed = PackedBatch.of(same).changed(0)[0].tolist()
        assert changed[2:] == [number] * 2
        assert number not in changed[:2]
        assert max(changed) <= max(number, 1)


IDS = {"input_ids": [[3, 4, 5, 6]]}
WRONG: dict[str, Any] = {
    "no names": [1, 2],
    "no tokens": {"position_ids": [[0, 1, 0, 1]]},
    "a row alone": {"input_ids": [3, 4, 5]},
    "fractions": {"input_ids": [[3.5, 4.5]]},
    "words": {"input_ids": [["a", "b"]]},
    "ragged rows": {"input_ids": [[3, 4], [5]]},
    "no documents": IDS,
    "one document": IDS | {"position_ids": [[0, 1, 2, 3]]},
    "one document by number": IDS | {"document_ids": [[7, 7, 7, 7]]},
    "positions of other tokens": IDS | {"position_ids": [[0, 1, 0]]},
    "ends that fall": IDS | {"cu_seq_lens_q": [0, 3, 2, 4]},
    "ends before the end": IDS | {"cu_seq_lens_q": [0, 1, 3]},
    "ends of two rows": {"input_ids": [[3, 4], [5, 6]], "cu_seq_lens_q": [0, 2, 4]},
    "two answers": IDS | {"position_ids": [[0, 1, 0, 1]], "cu_seq_lens_q": [0, 1, 4]},
    "other tokens": {"input_ids": [[3, 4, 5, VOCABULARY]], "position_ids": [[0, 1, 0, 1]]},
    "other arguments": IDS | {"position_ids": [[0, 1, 0, 1]], "inputs_embeds": [[[1.0]]]},
    "a word": IDS | {"position_ids": "none"},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str) -> None:
    model = tiny_model("gpt2")
    with pytest.raises(PosencError) as caught:
        find_leaks(model, WRONG[name])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", [None, "{", "[1]", '{"input_ids": 3}'])
@pytest.mark.parametrize("ending", ["json", "safetensors"])
def test_files_that_are_refused(text: str | None, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"batch.{ending}"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PosencError, match="batch"):
        PackedBatch.read(path)


def test_models_of_images() -> None:
    packed = PackedBatch.of(batch())
    with pytest.raises(PosencError, match="text"):
        find_leaks(tiny_model("vit"), packed)


def test_what_is_found_is_plain() -> None:
    leaks = find_leaks(tiny_model("llama"), batch())
    assert isinstance(leaks, Leaks)
    assert leaks.changed == 1
    assert leaks.lengths == LENGTHS
