"""Random lives of a cache: each call with it equals one without, to all tokens that it keeps.

A life is determined by its number. Run more of them with
``python -m tests.testing.cache_fuzz --count 1000``.
"""

from __future__ import annotations

import argparse
import copy
import pickle
import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from posenc.attention import Attention, LayerCache, decoding
from posenc.layout import Layout
from posenc.registry import ENCODINGS, create
from posenc.testing.subject import agree, fold, seeded, spread

NAMES = (
    *(
        n
        for n, e in ENCODINGS.items()
        if e.claims.sites != ("embedding",) and e.claims.axes != (2,)
    ),
    *("rope+alibi", "rope+t5", "rope+shaw", "rope+forgetting", "rope_pp+kerple"),
)
"""Encodings that act in attention on texts, and records of several of their parts."""

MODES: tuple[Callable[[], AbstractContextManager[object]], ...] = (
    *(torch.no_grad, torch.no_grad, torch.inference_mode, torch.enable_grad),
)

HEAD_DIM, ROWS, LONGEST = 8, 3, 300

SIZES = (1, 1, 1, 1, 2, 5, 17)
"""Tokens of a call after the first."""


class Life:
    """A layer, its cache, and the tokens and layout of what the cache keeps."""

    def __init__(self, number: int) -> None:
        self.dice = dice = random.Random(number)
        self.name, heads = dice.choice(NAMES), dice.choice([4, 6])
        part = ENCODINGS.get(self.name.partition("+")[0])
        assert part is not None
        self.axes = 1 if part.claims.axes is None else min(part.claims.axes)
        self.causal = part.claims.causal_only or "+" in self.name or dice.random() < 0.7
        self.dtype = dice.choice([torch.float64, torch.float32])
        options = {} if "+" in self.name else dict(part.sample)
        self.dim = dim = heads * HEAD_DIM
        context = {"dim": dim, "heads": heads, "head_dim": HEAD_DIM, "max_length": 2 * LONGEST}
        with seeded(number):
            encoding = create(self.name, **context, causal=self.causal, **options)  # type: ignore[arg-type]
            spread(encoding)
            softmax = encoding.score is None or not encoding.score.replaces_softmax
            self.layer = Attention(
                dim=dim,
                heads=heads,
                kv_heads=dice.choice([heads, heads // 2]),
                encoding=encoding,
                causal=self.causal,
                window=dice.choice([None, None, None, 1, 8, 64]),
                merged=dice.random() < 0.3,
                scale=dice.choice([None, None, 1.0]),
                sinks=softmax and dice.random() < 0.2,
                softcap=2.0 if softmax and dice.random() < 0.2 else None,
            )
        self.layer = self.layer.to(self.dtype).eval()
        self.generator = torch.Generator().manual_seed(number)
        self.kind = dice.choice(["sequence", "sequence", "sequence", "padded", "packed", "steps"])
        self.x = torch.zeros(ROWS, 0, dim, dtype=self.dtype)
        self.layout: Layout | None = None
        self.cache = LayerCache()

    def first(self) -> Layout:
        """The layout of the first tokens, of which some end where tables or tiles do."""
        length = self.dice.choice([1, 2, 3, 16, 63, 64, 65, 250, 255, 256])
        if self.kind == "padded":
            lengths = [self.dice.randint(1, length) for _ in range(ROWS)]
            return Layout.padded(lengths, length, side="left")
        if self.kind == "packed":
            return Layout.packed([length, self.dice.randint(1, 9)])
        return Layout.sequence(length, self.dice.choice([0, 0, 62, 127]))

    def next(self) -> Layout:
        """The layout of the tokens after those that are kept."""
        past, dice = self.layout, self.dice
        if past is None or past.length == 0:
            return self.first()
        layout = past.following()
        if self.kind == "steps":  # positions and orders go on after a gap
            layout = layout.with_positions(layout.positions + dice.choice([0, 3]))
        elif layout.document is not None and dice.random() < 0.3:
            layout = Layout(layout.positions * 0, layout.order, layout.document + 1)
        for _ in range(dice.choice(SIZES) - 1):
            layout = layout.concat(layout.following())
        return layout

    def step(self) -> None:
        """Perhaps select, forget or copy; then one call, held to that of the definition."""
        if self.layout is not None:
            self.change(self.layout)
        layout = self.next()
        new = torch.randn(len(self.x), layout.length, self.dim, generator=self.generator).to(
            self.dtype
        )
        self.x = torch.cat([self.x, new], dim=1)
        self.layout = layout if self.layout is None else self.layout.concat(layout)
        with self.dice.choice(MODES)():
            got = self.layer(new.clone(), fold(layout, self.axes), cache=self.cache)
        assert self.cache.length == self.layout.length
        with torch.no_grad():
            self.layer.backend = "reference"
            expected = self.layer(
                new,
                fold(layout, self.axes),
                context=self.x,
                context_layout=fold(self.layout, self.axes),
            )
            self.layer.backend = "auto"
        agree(
            f"the output of {layout} after {self.x.shape[1] - layout.length} tokens",
            got.detach().clone(),
            expected,
            tolerance=1e-9 if self.dtype == torch.float64 else 1e-4,
        )

    def change(self, layout: Layout) -> None:
        """Change the cache, or have another take its place, as beams and sessions do."""
        choice = self.dice.choice(["", "", "", "rows", "forget", "copy", "deepcopy", "pickle"])
        if choice == "rows":
            rows = torch.tensor([self.dice.randrange(len(self.x)) for _ in range(ROWS)])
            self.cache.select(rows)
            self.x, self.layout = self.x[rows], layout.select(rows)
        elif choice == "forget":
            kept = self.dice.choice([0, 1, layout.length - 1, layout.length, layout.length // 2])
            self.cache.truncate(kept)
            begin = layout.length - kept
            self.x, self.layout = self.x[:, begin:], layout.slice(begin, layout.length)
        elif choice in ("copy", "deepcopy", "pickle"):
            old, self.cache = self.cache, self._copied(choice)
            if old.keys is not None and old.values is not None and old.layout is not None:
                with torch.no_grad():  # what another appends is its own, cropped or not
                    if self.dice.random() < 0.5:
                        old.keys, old.values = old.keys[:, :, :1], old.values[:, :, :1]
                        old.layout = old.layout.slice(0, 1)
                    junk = old.keys[:, :, :1] * torch.nan, old.values[:, :, :1] * torch.nan
                    old.append(*junk, old.layout.slice(0, 1))

    def _copied(self, how: str) -> LayerCache:
        copied: LayerCache
        if how == "copy" or (self.cache.keys is not None and self.cache.keys.requires_grad):
            copied = copy.copy(self.cache)
        elif how == "deepcopy":
            copied = copy.deepcopy(self.cache)
        else:
            copied = pickle.loads(pickle.dumps(self.cache))
        return copied


def fuzz(count: int, *, first: int = 0) -> list[str]:
    """Run lives ``first`` to ``first + count - 1``.

    Returns:
        What went wrong, by number.
    """
    findings = []
    for number in range(first, first + count):
        life = Life(number)
        about = f"life {number}, {life.name}, {life.kind}"
        least = life.dice.choice([8, decoding.LEAST])  # tables of the past are outgrown, or not
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoding, "LEAST", least)
            for step in range(life.dice.randint(3, 7)):
                try:
                    life.step()
                except Exception as error:
                    findings.append(f"{about}, step {step}: {type(error).__name__}: {error}")
                    break
    return findings


def main() -> int:
    """Print the findings; the exit status is 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="lives (300)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (0)")
    arguments = parser.parse_args()
    findings = fuzz(arguments.count, first=arguments.first)
    sys.stdout.write("".join(f"{finding}\n" for finding in findings))
    sys.stdout.write(f"{arguments.count} lives, {len(findings)} findings\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
