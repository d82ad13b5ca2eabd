"""Dropout, positions and errors of attention over several ranks."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

from posenc import ENCODINGS, Layout, distributed
from posenc.distributed import ring
from posenc.errors import ArgumentError, UnknownNameError
from posenc.models import Decoder, DecoderConfig
from posenc.testing.subject import Subject, agree, tokens_of
from tests.distributed import jobs
from tests.distributed.equality import LENGTH, encoding_of, tensors
from tests.distributed.pool import MOST, Pool
from tests.support.processes import forking

JOBS = "tests.distributed.jobs"


def joined(parts: list[tuple[Tensor, ...]], dim: int) -> list[Tensor]:
    """Tensors of all ranks, tokens in the order of the text."""
    index = torch.cat([part[0] for part in parts]).argsort()
    columns = list(zip(*parts, strict=True))[1:]
    return [torch.cat(column, dim=dim).index_select(dim, index) for column in columns]


@pytest.mark.parametrize("form", ["ring", "gather", "heads"])
@pytest.mark.parametrize("layout", ["sequence", "packed"])
def test_dropout_is_the_same_for_any_number_of_ranks(pool: Pool, form: str, layout: str) -> None:
    arguments = {"form": form, "name": "shaw", "layout": layout}
    alone, both = (joined(pool.run(f"{JOBS}:dropped", ranks, **arguments), 2) for ranks in (1, 2))
    undropped = pool.run(f"{JOBS}:dropped", 1, **arguments)[0][1]
    torch.testing.assert_close(undropped, alone[0])
    for got, want in zip(both, alone, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("form", ["ring", "gather", "heads"])
def test_second_derivatives_are_refused(pool: Pool, form: str) -> None:
    for message in pool.run(f"{JOBS}:second_derivative", 2, form=form):
        assert "Attend in one process" in message


@pytest.mark.parametrize("form", ["ring", "gather", "heads"])
def test_layouts_may_be_written_on_one_rank(pool: Pool, form: str) -> None:
    assert max(pool.run(f"{JOBS}:written_difference", 2, form=form)) < 1e-5


@pytest.mark.parametrize("most", [LENGTH, 5])
@pytest.mark.parametrize("form", ["auto", "gather", "heads"])
@pytest.mark.parametrize("name", ["forgetting", "alibi"])
def test_queries_may_be_other_tokens_than_keys(pool: Pool, name: str, form: str, most: int) -> None:
    """Sinks and caps read logits themselves: sums up to the queries do not cancel out."""
    arguments = {"name": name, "form": form, "most": most}
    assert max(pool.run(f"{JOBS}:queries_difference", 2, **arguments)) < 1e-10


def test_groups_end_with_their_destruction(pool: Pool) -> None:
    assert not any(pool.run(f"{JOBS}:holds_group", MOST))


def test_the_example_trains_alike_on_one_rank_and_two(pool: Pool) -> None:
    arguments = ["--tokens", "96", "--steps", "4", "--checkpoint"]
    alone, both = (
        pool.run(f"{JOBS}:long_context", ranks, arguments=arguments)[0] for ranks in (1, 2)
    )
    assert both == pytest.approx(alone, rel=1e-5)
    assert both[-1] < both[0]


def test_positions_have_gradients(pool: Pool) -> None:
    whole = joined(pool.run(f"{JOBS}:positions_gradient", 1, form="gather"), 0)
    found = joined(pool.run(f"{JOBS}:positions_gradient", 3, form="auto"), 0)
    torch.testing.assert_close(found, whole)


def test_refusals_name_the_method(pool: Pool) -> None:
    for name, form, message in (
        ("stick_breaking", "ring", "the weights of StickBreaking are no softmax"),
        ("cope", "ring", "the result of Cope for a pair depends on other tokens"),
        ("dape", "heads", "Dape mixes heads"),
        ("alibi", "heads", "4 ranks do not divide its 6 heads"),
    ):
        for found in pool.run(f"{JOBS}:error", 4 if name == "alibi" else 2, name=name, form=form):
            assert message in found


def test_ranks_with_other_encodings(pool: Pool) -> None:
    for found in pool.run(f"{JOBS}:error", 3, name="alibi", form="auto", other="kerple"):
        assert "others on rank 2 than on rank 0" in found


def test_ranks_with_other_options_than_before(pool: Pool) -> None:
    for found in pool.run(f"{JOBS}:other_scale", 3):
        assert "others on rank 2 than on rank 0" in found


def test_mesh_of_several_axes(pool: Pool) -> None:
    for found in pool.run(f"{JOBS}:several_axes", 4):
        assert found == [
            "axis: expected one of the mesh's 2 axes, ('rows', 'tokens'), got None. Name the axis "
            "that the sequence is spread over, or pass mesh[name].",
            "mesh: expected a mesh of one axis, got 2 axes, ('rows', 'tokens'). Pass the axis that "
            "the batch is split over, mesh[name].",
        ]


def test_explanations(pool: Pool) -> None:
    (text, *_) = pool.run(f"{JOBS}:explanation", 2, name="cope")
    assert text.startswith("gather: keys and values of all ranks are gathered")
    assert "Not ring, because the result of Cope" in text
    (text, *_) = pool.run(f"{JOBS}:explanation", 2, name="alibi")
    assert text.startswith("ring: ")


def test_no_cache_over_ranks(pool: Pool) -> None:
    assert "cache: expected None" in pool.run(f"{JOBS}:cached", 1)[0]


@pytest.mark.long
def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    """Both that of a call of attention and that of a training, which run side by side.

    Some of those that live are notified by the timeout alone.
    """
    context, groups = forking(), {"attention": 4, "training": 3}
    results = context.SimpleQueue()  # type: ignore[attr-defined]
    processes = [
        context.Process(target=jobs.dying, args=(of, rank, ranks, str(tmp_path / of), results))  # type: ignore[attr-defined]
        for of, ranks in groups.items()
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [p.exitcode for p in processes] == [0, 0, 0, -signal.SIGKILL, 0, 0, -signal.SIGKILL]
    for _ in range(5):
        of, rank, text = results.get()
        assert f"no answer of rank {groups[of] - 1} for 9 s" in text, (of, rank, text)


def test_shards_hold_every_token_once() -> None:
    for ranks in (1, 2, 3, 4):
        whole = torch.arange(LENGTH)
        for parts in (
            [distributed.contiguous(LENGTH, ranks, rank) for rank in range(ranks)],
            [distributed.balanced(LENGTH, ranks, rank) for rank in range(ranks)],
            [
                distributed.balanced(LENGTH, ranks, rank, documents=[11, 4, 11])
                for rank in range(ranks)
            ],
        ):
            assert torch.equal(torch.cat(parts).sort().values, whole)


def test_balanced_shards_have_the_same_work() -> None:
    work = [int((distributed.balanced(64, 4, rank) + 1).sum()) for rank in range(4)]
    assert max(work) == min(work)
    taken = distributed.take(Layout.sequence(64), distributed.balanced(64, 4, 1))
    assert taken.order[0].tolist() == [*range(8, 16), *range(48, 56)]
    assert distributed.take(Layout.sequence(64), torch.arange(8, 16)).start == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_gradients_are_summed_in_float32_or_better(dtype: torch.dtype) -> None:
    summed = ring._zeros(torch.zeros(2, dtype=dtype)).dtype
    assert summed == torch.promote_types(dtype, torch.float32)


def test_bad_arguments() -> None:
    with pytest.raises(ArgumentError, match="rank: expected 0 … 1, got 2"):
        distributed.contiguous(4, 2, 2)
    with pytest.raises(ArgumentError, match="documents: expected 4 tokens in all"):
        distributed.balanced(4, 2, 0, documents=[3])
    with pytest.raises(UnknownNameError, match="form"):
        distributed.ContextParallel(None, form="spiral")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="mesh: expected a DeviceMesh"):
        distributed.sum_gradients(torch.nn.Linear(1, 1), None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="model: expected a module whose tokens meet"):
        distributed.parallelize(torch.nn.Linear(1, 1), None)  # type: ignore[arg-type]
    config = DecoderConfig(vocabulary=3, dim=8, layers=1, heads=2, encoding="rope", norm="batch")
    with pytest.raises(ArgumentError, match="batch norm"):
        distributed.parallelize(Decoder(config), None)  # type: ignore[arg-type]


EMBEDDINGS = [name for name, entry in ENCODINGS.items() if "embedding" in entry.claims.sites]


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embedding_parts_read_no_other_token_unless_they_say_so(name: str) -> None:
    encoding = encoding_of(name, torch.float64).eval()
    assert encoding.embedding is not None
    if not encoding.embedding.pairwise:
        return
    layout = Subject.of_entry(name, ENCODINGS[name]).place(Layout.sequence(LENGTH))
    x, tokens = tensors(torch.float64)[3][:, 0], tokens_of(2, LENGTH)
    whole = encoding.embed(x, layout, tokens=tokens)
    for index in (distributed.balanced(LENGTH, 3, 1), torch.arange(0)):
        own = encoding.embed(x[:, index], distributed.take(layout, index), tokens=tokens[:, index])
        agree(name, own, whole[:, index], tolerance=1e-6)
