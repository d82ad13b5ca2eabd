"""The encoder–decoder: every encoding on each attention, padding, norms, decoding, saving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Layout
from posenc.errors import ArgumentError, LengthError, UnknownNameError
from posenc.models import Sample, Transformer, TransformerConfig, beam_search, generate
from posenc.registry import ENCODINGS
from tests.models.text_encodings import TEXT_ENCODINGS, one_of_each_kind

SOURCE, TARGET = 23, 19
REVERSED = Layout(torch.arange(10.0, -1, -1).view(1, 11, 1), torch.arange(10, -1, -1).view(1, 11))
BOTH_SIDES = [n for n in TEXT_ENCODINGS if not ENCODINGS[n].claims.causal_only]
IN_ATTENTION = [n for n in BOTH_SIDES if "embedding" not in ENCODINGS[n].claims.sites]


def make(encoding: str = "rope", **changes: object) -> Transformer:
    """A model with ``encoding`` on every attention that can have it."""
    torch.manual_seed(0)
    fields: dict[str, object] = {
        "source_vocabulary": SOURCE,
        "target_vocabulary": TARGET,
        "dim": 32,
        "heads": 4,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "max_length": 40,
        "encoder_encoding": encoding if encoding in BOTH_SIDES else "sinusoidal",
        "decoder_encoding": encoding,
        "cross_encoding": encoding if encoding in IN_ATTENTION else "nope",
    }
    return Transformer(TransformerConfig(**(fields | changes))).eval()  # type: ignore[arg-type]


def draw(vocabulary: int, rows: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(vocabulary, (rows, length), generator=generator)


def source(rows: int = 3, length: int = 11) -> Tensor:
    return draw(SOURCE, rows, length)


def target(rows: int = 3, length: int = 9) -> Tensor:
    return draw(TARGET, rows, length)


def begin(rows: int = 3) -> Tensor:
    return torch.zeros(rows, 1, dtype=torch.int64)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("encoding", one_of_each_kind(TEXT_ENCODINGS))
def test_cached_equals_whole(encoding: str) -> None:
    model = make(encoding)
    given, whole = model.given(source()), model(source(), target())
    for chunks in ([1] * 9, [4, 1, 4]):
        cache = given.new_cache()
        parts = [given(part, cache=cache) for part in target().split(chunks, dim=1)]
        close(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("encoding", one_of_each_kind(TEXT_ENCODINGS))
def test_padding_on_either_side_changes_nothing(encoding: str) -> None:
    model, lengths = make(encoding), [11, 6, 3]
    logits = model(
        source(), target(), Layout.padded(lengths, side="left"), Layout.padded([9, 4, 7])
    )
    for row, (length, kept) in enumerate(zip(lengths, [9, 4, 7], strict=True)):
        alone = model(source()[row : row + 1, 11 - length :], target()[row : row + 1, :kept])
        close(logits[row, :kept], alone[0])


def test_a_seed_gives_the_same_sample_with_the_cache_and_without() -> None:
    def draw(seed: int, *, cached: bool) -> Tensor:
        sampling = Sample(temperature=2.0, generator=torch.Generator().manual_seed(seed))
        given = make().given(source())
        return generate(given, begin(), max_new_tokens=12, sampling=sampling, cached=cached)

    assert torch.equal(draw(1, cached=True), draw(1, cached=False))
    assert not torch.equal(draw(1, cached=True), draw(2, cached=True))


@pytest.mark.parametrize("encoding", ["sinusoidal", "rope", "t5"])
def test_a_batch_of_sources_decodes_as_each_alone(encoding: str) -> None:
    model, lengths = make(encoding), [11, 6, 3]
    given = model.given(source(), Layout.padded(lengths))
    together = generate(given, begin(), max_new_tokens=10, stop_token=7)
    beams = beam_search(given, begin(), beams=3, max_new_tokens=10, stop_token=7)
    for row, length in enumerate(lengths):
        alone = model.given(source()[row : row + 1, :length])
        expected = generate(alone, begin(1), max_new_tokens=10, stop_token=7)
        assert torch.equal(together[row, : expected.shape[1]], expected[0])
        found = beam_search(alone, begin(1), beams=3, max_new_tokens=10, stop_token=7)
        assert torch.equal(beams.tokens[row], found.tokens[0])
        close(beams.scores[row], found.scores[0])


@pytest.mark.parametrize("encoding", sorted(set(TEXT_ENCODINGS) - set(BOTH_SIDES)))
@pytest.mark.parametrize("site", ["encoder_encoding", "cross_encoding"])
def test_encodings_that_only_count_back_are_refused_elsewhere(encoding: str, site: str) -> None:
    with pytest.raises(ArgumentError, match=f"{site}.*bidirectional.*{encoding}"):
        make("rope", **{site: encoding})


@pytest.mark.parametrize("encoding", sorted(set(BOTH_SIDES) - set(IN_ATTENTION)))
def test_encodings_of_token_vectors_are_refused_in_cross_attention(encoding: str) -> None:
    with pytest.raises(ArgumentError, match=r"cross.*without an embedding part"):
        make("rope", cross_encoding=encoding)


NO_POSITIONS = ("nope", "repo", "scalable_softmax")
"""Encodings that know order by the causal mask alone."""


@pytest.mark.parametrize("encoding", [n for n in IN_ATTENTION if n not in NO_POSITIONS])
def test_the_cross_attention_knows_where_source_and_target_stand(encoding: str) -> None:
    model = make("nope", cross_encoding=encoding)
    # Some learn from nothing: what starts at zero is given a value.
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".encoding." in name:
            torch.nn.init.normal_(parameter)
    plain = model(source(), target())
    assert not torch.allclose(model(source(), target(), REVERSED), plain, atol=1e-4)


def test_without_an_encoding_cross_attention_does_not() -> None:
    model = make("nope")
    close(model(source(), target(), REVERSED), model(source(), target()))


@pytest.mark.parametrize(
    ("norm", "norm_first", "activation"),
    [
        ("layer", True, "relu"),
        ("layer", False, "gelu"),
        ("rms", True, "swiglu"),
        ("rms", False, "relu"),
        ("batch", True, "gelu"),
        ("batch", False, "swiglu"),
    ],
)
def test_norms_and_activations(norm: str, norm_first: bool, activation: str) -> None:
    model = make("rope", norm=norm, norm_first=norm_first, activation=activation).train()
    layouts = Layout.padded([11, 6, 3]), Layout.padded([9, 4, 7])
    model(source(), target(), *layouts).logsumexp(-1).sum().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None]
    assert not without
    model.eval()
    given = model.given(source(), layouts[0])
    cache = given.new_cache()
    parts = [given(part, cache=cache) for part in target().split(1, dim=1)]
    close(torch.cat(parts, dim=1), model(source(), target(), layouts[0]))
    assert (model.encoder_norm is None) is not norm_first


@pytest.mark.parametrize("encoding", ["rope", "deberta", "shaw", "forgetting"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_merged_projections_are_the_same_model(encoding: str, kv_heads: int) -> None:
    options = {"projections": "content"} if encoding == "deberta" else {}
    shape: dict[str, object] = {"kv_heads": kv_heads, "decoder_options": options}
    if encoding in BOTH_SIDES:
        shape["encoder_options"] = shape["cross_options"] = options
    plain, merged = make(encoding, **shape), make(encoding, merged=True, **shape)
    weights = plain.state_dict()
    for name in [
        n for n in weights if n.endswith(("attention.query.weight", "cross.query.weight"))
    ]:
        layer = name.removesuffix("query.weight")
        for kind in ("weight", "bias"):
            parts = [weights.pop(f"{layer}{part}.{kind}") for part in ("query", "key", "value")]
            weights[f"{layer}merged.{kind}"] = torch.cat(parts)
    merged.load_state_dict(weights)
    close(merged(source(), target()), plain(source(), target()))
    merged(source(), target()).logsumexp(-1).sum().backward()
    plain(source(), target()).logsumexp(-1).sum().backward()
    whole = merged.get_parameter("encoder.0.attention.merged.weight").grad
    parts = [
        plain.get_parameter(f"encoder.0.attention.{n}.weight").grad
        for n in ("query", "key", "value")
    ]
    assert whole is not None
    close(whole, torch.cat([part for part in parts if part is not None]))


def test_shared_and_tied_embeddings() -> None:
    model = make(source_vocabulary=TARGET, shared=True)
    assert model.source_embedding is model.target_embedding
    assert model.output is None
    separate = make(tied=False)
    assert separate.output is not None
    assert separate.source_embedding.weight.shape == (SOURCE, 32)
    with pytest.raises(ArgumentError, match="shared"):
        make(shared=True)


def test_embeddings_are_scaled_by_the_root_of_the_width() -> None:
    model = make("nope", encoder_layers=1, norm_first=False)
    seen: list[Tensor] = []
    model.encoder[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model.encode(source())
    close(seen[0], model.source_embedding(source()) * 32**0.5)


def test_records_serve_as_well_as_names(tmp_path: Path) -> None:
    named = make("alibi")
    torch.manual_seed(0)
    records = posenc.create_layers("alibi", layers=2, heads=4)
    model = Transformer(
        named.config, encoder_encodings=records, decoder_encodings=records, cross_encodings=records
    ).eval()
    close(model(source(), target()), named(source(), target()))
    with pytest.raises(ArgumentError, match="by name"):
        model.save(tmp_path)
    with pytest.raises(ArgumentError, match=r"cross_encodings.*one per layer"):
        Transformer(named.config, cross_encodings=records[:1])


def test_a_learned_table_ends() -> None:
    given = make("learned", max_length=12).given(source())
    assert generate(given, begin(), max_new_tokens=12).shape == (3, 13)
    with pytest.raises(LengthError, match="0 to 11"):
        generate(given, begin(), max_new_tokens=13)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="source: "):
        make()(source().float(), target())
    with pytest.raises(ArgumentError, match="target: "):
        make()(source(), target()[0])
    with pytest.raises(ArgumentError, match="encoder_layers"):
        make(encoder_layers=0)
    with pytest.raises(UnknownNameError, match="rope"):
        make(cross_encoding="ropee")


def test_compiled_equals_eager() -> None:
    model = make("rope", merged=True)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    close(compiled(source(), target()), model(source(), target()))
