"""The laws and oracles bite: each of these bugs, planted alone, is caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.attention import LayerCache
from posenc.attention.backends import native, sdpa
from posenc.attention.backends.common import fused
from posenc.attention.backends.common.base import Backend, Refusal
from posenc.encoding import Rotation
from posenc.encoding.prepared import Copies, Prepared
from posenc.encodings.common.rotation import Rotary
from posenc.encodings.embedding.sinusoidal import Sinusoidal
from posenc.encodings.query_key import rope as rope_file
from posenc.encodings.query_key.rope import Rope
from posenc.encodings.score import alibi as alibi_file
from posenc.encodings.score.alibi import Alibi
from posenc.encodings.score.shaw import ShawKeys
from posenc.encodings.score.t5 import T5
from posenc.encodings.score.transformer_xl import TransformerXL
from posenc.registry import ENCODINGS
from posenc.testing import LAWS, LawBroken, Subject
from posenc.testing.oracles import (
    attention_by_loops,
    rotate_by_loops,
    sinusoid_by_loops,
    t5_bucket_by_loops,
)

Plant = Callable[[pytest.MonkeyPatch], None]
Check = Callable[[], None]


def law(name: str, encoding: str) -> Check:
    """A law over an encoding of the registry."""

    def check() -> None:
        LAWS[name](Subject.of_entry(encoding, ENCODINGS[encoding]))

    return check


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 6, 9, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 1, 3, 9, 8, generator=generator, dtype=torch.float64)
    return q, k, v


GRID = Grid.of(Layout.sequence(9), causal=True)


def _close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def alibi_oracle() -> None:
    slopes = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    q, k, v = _inputs()
    rule = lambda h, b, at, to: -slopes[h] * abs(to - at)  # noqa: E731
    _close(
        attend(q, k, v, GRID, posenc.create("alibi", heads=6)),
        attention_by_loops(q, k, v, GRID, bias=rule),
    )


def rope_oracle() -> None:
    q, k, v = _inputs()
    turned = (rotate_by_loops(x, GRID.query.positions) for x in (q, k))
    _close(
        attend(q, k, v, GRID, posenc.create("rope", head_dim=8)),
        attention_by_loops(*turned, v, GRID),
    )


def t5_oracle() -> None:
    for causal in (True, False):
        t5 = T5(heads=1, causal=causal)
        distances = range(-300, 300)
        offsets = torch.tensor(distances, dtype=torch.float32).unsqueeze(-1)
        expected = [t5_bucket_by_loops(d, causal=causal) for d in distances]
        assert t5.bucket(offsets).tolist() == expected


def shaw_oracle() -> None:
    encoding = posenc.create("shaw", head_dim=8, max_distance=3).double().requires_grad_(False)
    assert isinstance(encoding.score, ShawKeys)
    rows = encoding.score.table.rows
    q, k, v = _inputs()
    keys = Encoding(score=encoding.score)
    expected = attention_by_loops(
        q, k, v, GRID, key_vector=lambda h, at, to: rows[max(-3, min(3, int(to - at))) + 3]
    )
    _close(attend(q, k, v, GRID, keys), expected)


def sinusoidal_oracle() -> None:
    got = Sinusoidal(dim=6).table(torch.tensor([3.0], dtype=torch.float64))[0]
    _close(got, torch.tensor(sinusoid_by_loops(3.0, 6), dtype=torch.float64))


def nope_oracle() -> None:
    q, k, v = _inputs()
    _close(attend(q, k, v, GRID, Encoding()), attention_by_loops(q, k, v, GRID))


@dataclass(frozen=True)
class Bug:
    """A planted bug, and the check that has to find it."""

    name: str
    plant: Plant
    noticed_by: Check


def _other_pairing(found: Rotation) -> Rotation:
    return replace(found, pairing="adjacent" if found.pairing == "half" else "half")


def _wrap(owner: object, name: str, change: Callable[..., object]) -> Plant:
    """Replace ``owner.name`` by ``change(original, *arguments)``."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)

        def changed(*arguments: object, **named: object) -> object:
            return change(original, *arguments, **named)

        patch.setattr(owner, name, changed)

    return plant


def _visible_without(mark: str) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        whole = Grid.visible.fget  # type: ignore[attr-defined]

        def visible(grid: Grid) -> Tensor:
            changes = {mark: None, "consecutive": False}
            sides = (replace(side, **changes) for side in (grid.query, grid.key))
            seen: Tensor = whole(Grid(*sides, grid.causal, grid.window))
            return seen

        patch.setattr(Grid, "visible", property(visible))
        _keep_away(patch, native.Native)  # it reads intervals

    return plant


def _keep_away(patch: pytest.MonkeyPatch, *backends: type[Backend]) -> None:
    for backend in backends:
        patch.setattr(backend, "plan", lambda self, problem: Refusal("out of the way"))


def _visible_shifted(**changes: int) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        whole = Grid.visible.fget  # type: ignore[attr-defined]

        def visible(grid: Grid) -> Tensor:
            order = grid.key.order - changes.get("causal", 0)
            key = replace(grid.key, order=order, start=None, consecutive=False)
            window = grid.window and grid.window + changes.get("window", 0)
            seen: Tensor = whole(Grid(grid.query, key, grid.causal, window))
            return seen

        patch.setattr(Grid, "visible", property(visible))
        # The kernel's own causal flag and the zero-copy view do not ask for visible.
        _keep_away(patch, native.Native, sdpa.Sdpa)

    return plant


def _cached_late(
    original: Callable[..., object], cache: object, k: Tensor, v: Tensor, at: Layout
) -> object:
    moved = Layout.sequence(at.length, at.start + 1) if at.start else at
    return original(cache, k, v, moved)


def _cache_drops(original: Callable[..., object], cache: LayerCache, *chunk: object) -> object:
    if cache.length == 4:
        cache.truncate(3)
    return original(cache, *chunk)


def _bfloat_angles(original: Callable[..., Tensor], rope: Rope, layout: Layout) -> Tensor:
    coarse = layout.with_positions(layout.positions.bfloat16().float())
    return original(rope, coarse)


def _query_only(found: Rotation) -> Rotation:
    cosine, sine = found.key
    return replace(found, key=(torch.ones_like(cosine), torch.zeros_like(sine)))


def _keys_backwards(found: Rotation) -> Rotation:
    cosine, sine = found.key
    return replace(found, key=(cosine, -sine))


FOREVER: dict[object, object] = {}

BUGS = [
    Bug("alibi rewards distance", _wrap(Alibi, "bias", lambda f, s, o: -f(s, o)), alibi_oracle),
    Bug(
        "alibi's slopes in another order",
        _wrap(alibi_file, "geometric_slopes", lambda f, heads: sorted(f(heads), reverse=True)),
        alibi_oracle,
    ),
    Bug(
        "t5's far bucket off by one",
        _wrap(T5, "bucket", lambda f, s, o: f(s, o) - (o[..., 0] < -127).long()),
        t5_oracle,
    ),
    Bug("t5 mixes up the directions", _wrap(T5, "bucket", lambda f, s, o: f(s, -o)), t5_oracle),
    Bug(
        "rope in bfloat16",
        _wrap(Rope, "angles", _bfloat_angles),
        law("shift_is_as_claimed", "rope"),
    ),
    Bug(
        "rope's frequencies in bfloat16",
        _wrap(
            rope_file,
            "geometric_frequencies",
            lambda f, *ladder, like: f(*ladder, like=like.bfloat16()).to(like),
        ),
        rope_oracle,
    ),
    Bug(
        "rope turns queries only",
        _wrap(Rope, "lower", lambda f, *given: _query_only(f(*given))),
        law("shift_is_as_claimed", "rope"),
    ),
    Bug(
        "rope turns keys backwards",
        _wrap(Rope, "lower", lambda f, *given: _keys_backwards(f(*given))),
        rope_oracle,
    ),
    Bug(
        "shaw clips one too early",
        _wrap(
            type(posenc.create("shaw", head_dim=8).score.table),  # type: ignore[union-attr, arg-type]
            "bucket",
            lambda f, s, o: f(s, o).clamp(1, 2 * s.max_distance - 1),
        ),
        shaw_oracle,
    ),
    Bug(
        "sine and cosine swapped",
        _wrap(
            Sinusoidal, "table", lambda f, s, p: f(s, p).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        ),
        sinusoidal_oracle,
    ),
    Bug(
        "prepared calls are kept for good",
        _wrap(Prepared, "__init__", lambda _, self: vars(self).update(_slots=FOREVER)),
        law("nothing_kept_outlives_weights", "shaw"),
    ),
    Bug(
        "weights that changed are not noticed",
        _wrap(Copies, "hold", lambda f, *given: True),
        law("weights_that_change_are_followed", "t5"),
    ),
    Bug(
        "rows are claimed that depend on keys",
        lambda patch: patch.setattr(TransformerXL, "rows_by_position", True),
        law("lowered_is_forward", "transformer_xl"),
    ),
    Bug("documents ignored", _visible_without("document"), law("packed_is_separate", "rope")),
    Bug("padding ignored", _visible_without("valid"), law("padded_is_unpadded", "shaw")),
    Bug("the next token is visible", _visible_shifted(causal=1), law("causal_is_causal", "nope")),
    Bug("the window is one too wide", _visible_shifted(window=1), law("windows_are_windows", "t5")),
    Bug(
        "cached keys one place late",
        _wrap(LayerCache, "append", _cached_late),
        law("cached_is_full", "alibi"),
    ),
    Bug(
        "the cache drops a token",
        _wrap(LayerCache, "append", _cache_drops),
        law("cached_is_full", "nope"),
    ),
    Bug(
        "the view of the table is off by one",
        _wrap(sdpa, "bias_by_offset", lambda f, term, grid: f(term, grid).roll(1, -1)),
        law("backends_agree", "alibi"),
    ),
    Bug(
        "the structured form forgets the scale",
        _wrap(ShawKeys, "lower", lambda f, s, q, k, g, *, scale: f(s, q, k, g, scale=1.0)),
        law("lowered_is_forward", "shaw"),
    ),
    Bug(
        "the structured form of a rotation has the other pairing",
        _wrap(Rotary, "lower", lambda f, *given: _other_pairing(f(*given))),
        law("lowered_is_forward", "rope"),
    ),
    Bug(
        "the scale is left out",
        _wrap(Encoding, "default_scale", lambda f, s, width: 1.0),
        nope_oracle,
    ),
    Bug(
        "grouped heads in the wrong order",
        _wrap(
            fused,
            "scaled_dot_product_attention",
            lambda f, q, k, v, *, enable_gqa, **named: f(
                q, *(x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v)), **named
            ),
        ),
        law("grouped_heads_are_repeated", "nope"),
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.noticed_by()
    bug.plant(monkeypatch)
    with pytest.raises((LawBroken, AssertionError)):
        bug.noticed_by()
