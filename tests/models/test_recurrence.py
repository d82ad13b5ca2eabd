"""Segment recurrence: with a memory as long as the past, it is one long pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posenc import Layout
from posenc.errors import ArgumentError, LengthError
from posenc.grid import Grid
from posenc.models import Decoder, DecoderConfig, in_segments
from posenc.registry import ENCODINGS
from tests.models.text_encodings import TEXT_ENCODINGS, one_of_each_kind

LENGTH = 20
WINDOWED = [
    n for n in TEXT_ENCODINGS if "windows_are_windows" not in ENCODINGS[n].claims.exceptions
]


def make(encoding: str, **changes: object) -> Decoder:
    torch.manual_seed(0)
    fields = {"vocabulary": 17, "dim": 32, "layers": 3, "heads": 4, "max_length": 40}
    return Decoder(DecoderConfig(encoding=encoding, **(fields | changes))).eval()  # type: ignore[arg-type]


def text(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(17, (rows, length), generator=torch.Generator().manual_seed(1))


def run(model: Decoder, segment: int, memory: int, **options: object) -> Tensor:
    parts = in_segments(model, text(), segment=segment, memory=memory, **options)  # type: ignore[arg-type]
    return torch.cat(list(parts), dim=1)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("encoding", one_of_each_kind(TEXT_ENCODINGS))
def test_a_memory_as_long_as_the_past_is_one_pass(encoding: str) -> None:
    model = make(encoding)
    close(run(model, 6, LENGTH), model(text()))


@pytest.mark.parametrize(("segment", "memory"), [(6, 4), (1, 5)])
@pytest.mark.parametrize("encoding", one_of_each_kind(WINDOWED))
def test_segments_see_the_memory_before_them(
    encoding: str, segment: int, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(encoding)
    got = run(model, segment, memory)
    visible = Grid.visible.fget  # type: ignore[attr-defined]

    def seen(grid: Grid) -> Tensor:
        first = grid.query.order // segment * segment - memory
        shown: Tensor = visible(grid) & (grid.key.order[:, None] >= first[:, :, None]).unsqueeze(1)
        return shown

    monkeypatch.setattr(Grid, "visible", property(seen))
    for block in model.blocks:
        block.attention.backend = "reference"
    close(got, model(text()))


@pytest.mark.parametrize("encoding", ["rope", "transformer_xl", "conv"])
def test_without_a_memory_segments_stand_alone(encoding: str) -> None:
    model = make(encoding)
    parts = in_segments(model, text(), segment=5, memory=0)
    last = list(parts)[-1]
    alone = model(text()[:, 15:], Layout.sequence(5, start=15))
    if encoding == "conv":  # which still knows the tokens just before
        assert not torch.allclose(last, alone, atol=1e-4)
    else:
        close(last, alone)


def test_streams_go_on_from_call_to_call() -> None:
    model = make("transformer_xl")
    cache = model.new_cache()
    parts = []
    for half in text().split([12, 8], dim=1):
        parts += list(in_segments(model, half, segment=4, memory=7, cache=cache))
    close(torch.cat(parts, dim=1), run(model, 4, 7))


def test_documents_are_kept_apart_in_the_memory() -> None:
    model, layout = make("rope"), Layout.packed([9, 11])
    close(run(model, 4, LENGTH, layout=layout), model(text(), layout))


@pytest.mark.parametrize("encoding", one_of_each_kind(TEXT_ENCODINGS))
def test_no_gradient_flows_into_the_memory(encoding: str) -> None:
    model, embedded = make(encoding).train(), []

    def keep(_: object, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if inputs[0].is_floating_point():  # the tied head calls the embedding too
            return
        output.retain_grad()
        embedded.append(output)

    model.embedding.register_forward_hook(keep)
    _, second = in_segments(model, text(length=8), segment=4, memory=4)
    second.logsumexp(-1).sum().backward()
    assert embedded[0].grad is None
    assert embedded[1].grad is not None


def test_a_learned_table_ends() -> None:
    with pytest.raises(LengthError, match="0 to 15"):
        run(make("learned", max_length=16), 4, 4)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="segment"):
        in_segments(make("rope"), text(), segment=0, memory=1)
    with pytest.raises(ArgumentError, match="memory"):
        in_segments(make("rope"), text(), segment=1, memory=-1)
    model = make("rope")
    cache = model.new_cache()
    model(text(), Layout.packed([9, 11]), cache=cache)
    with pytest.raises(ArgumentError, match="no plain sequence"):
        model(text(), cache=cache)
