"""Attention on several ranks equals attention on one, for every encoding."""

from __future__ import annotations

import pytest
import torch

from posenc.registry import ENCODINGS
from tests.attention.comparing import built
from tests.distributed.equality import LAYOUTS, SPLITS, Case
from tests.distributed.pool import Pool

NAMES = [name for name, entry in ENCODINGS.items() if set(entry.claims.sites) - {"embedding"}] + [
    "nope"
]

WITHOUT_HEADS = {2: {"dape", "rope_pp"}, 3: {"dape"}}
"""Encodings whose heads cannot be shared out, by the number of ranks: they are mixed, or pairs."""


def check(pool: Pool, ranks: int, cases: list[Case]) -> None:
    found = pool.run("tests.distributed.equality:differences", ranks, cases=cases)
    assert found == [[]] * ranks, "\n".join(found[0])


KINDS = ["nope", "rope", "alibi", "t5", "shaw", "deberta", "forgetting", "cope", "dape", "kerple"]
"""One or more of each way in which a score or a transform is spread."""


def spread(names: list[str], ranks: int, form: str) -> list[Case]:
    """Layouts and shards take turns, so that each of them meets most encodings."""
    splits, layouts = list(SPLITS), list(LAYOUTS)
    return [
        Case(name, layouts[(ranks + i) % 3], splits[(2 * ranks + i) % len(splits)], form)
        for i, name in enumerate(names)
    ]


# Of two ranks the next is the one before: three are the fewest that tell directions apart.
@pytest.mark.parametrize(
    ("form", "ranks"),
    [
        ("auto", 3),
        ("gather", 2),
        *(
            pytest.param(form, ranks, marks=pytest.mark.exhaustive)
            for form, ranks in (("auto", 2), ("auto", 4), ("gather", 3), ("gather", 4))
        ),
    ],
)
def test_every_encoding(pool: Pool, form: str, ranks: int) -> None:
    check(pool, ranks, spread(NAMES, ranks, form))


@pytest.mark.parametrize("form", ["auto", "gather"])
def test_four_ranks(pool: Pool, form: str) -> None:
    check(pool, 4, spread(KINDS, 4, form))


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_every_encoding_by_heads(pool: Pool, ranks: int) -> None:
    names = [name for name in NAMES if name not in WITHOUT_HEADS[ranks]]
    check(pool, ranks, spread(names, ranks, "heads"))


def test_every_split_of_every_layout(pool: Pool) -> None:
    """Each by every form; windows take turns, so that each split and layout meets both."""
    names = ["rope", "t5", "alibi", "deberta", "shaw"]
    cases = [
        Case(names[(i + j) % len(names)], layout, split, form, (None, 7)[(i + j + n) % 2])
        for i, split in enumerate(SPLITS)
        for j, layout in enumerate(LAYOUTS)
        for n, form in enumerate(("ring", "gather", "heads"))
    ]
    check(pool, 3, cases)


def test_sinks_and_caps(pool: Pool) -> None:
    """A sink joins the sum of each query once, not once a rank."""
    cases = [
        Case(name, layout, split, form, capped=True)
        for name in ("rope", "t5")
        for layout, split in (("sequence", "balanced"), ("packed", "uneven"))
        for form in ("ring", "gather", "heads")
    ]
    check(pool, 2, cases)


def test_transforms_by_the_keys_of_all_ranks(pool: Pool) -> None:
    """The longest text is that of all, also for queries that see a part of it."""
    cases = [
        Case(name, layout, "balanced", form, causal=causal)
        for name in ("rope:dynamic_ntk", "alibi:log_n")
        for layout in LAYOUTS
        for form, causal in (("gather", True), ("heads", False), ("auto", False))
    ]
    check(pool, 2, cases)


@pytest.mark.parametrize("backend", [pytest.param("native", marks=built), "blockwise", "reference"])
def test_backends(pool: Pool, backend: str) -> None:
    names = ["nope", "rope", "t5", "shaw", "deberta", "forgetting", "fire", "transformer_xl"]
    ringless = {"forgetting", *(["fire"] if backend == "native" else [])}
    cases = [
        Case(name, "sequence", "balanced", form, backend=backend)
        for name in names
        for form in (["gather"] if name in ringless else ["ring", "gather"])
    ]
    check(pool, 2, cases)


def test_both_directions(pool: Pool) -> None:
    cases = [
        Case(name, layout, "balanced", form, window, torch.float64, causal=False)
        for name in ("alibi", "rope", "deberta", "fire")
        for layout in LAYOUTS
        for form in ("ring", "gather", "heads")
        for window in (None, 4)
    ]
    check(pool, 2, cases)
