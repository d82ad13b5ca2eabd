"""A page says what its records say, and no more than it may."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from posenc.lab.reporting import page as pages
from posenc.lab.reporting.drawing import Look
from posenc.lab.reporting.opening import Opening, Remedy, Verdict, Verdicts


def page(remedies: tuple[Remedy, ...] = (), **changes: object) -> pages.Page:
    rows = (Verdict(name="a", words=("holds", ""), why="Because."),)
    told = {"guide": "Holds: well.", "meanings": {"holds": "at < most"}}
    judged = Verdicts(title="Verdicts", columns=("loss", "recall"), rows=rows, **told)
    opening = Opening(headline="a < b", verdicts=judged, remedies=remedies)
    looks = {"a": Look("--series-0", [1, 0], "circle")}
    facts = ("posenc try", "<one>")
    return pages.Page(
        **({"facts": facts, "charts": (), "looks": looks, "opening": opening} | changes)
    )


def own(rendered: str) -> str:
    return re.sub(r"<script>.*?</script>", "", rendered, flags=re.DOTALL)


def test_words_of_users_are_escaped() -> None:
    text = own(page().render())
    assert "<h1>a &lt; b</h1>" in text
    assert "posenc try · &lt;one&gt;" in text
    title = "holds: at &lt; most. Because."
    assert f'<span class="verdict good" title="{title}">holds</span>' in text
    assert "<summary>Holds: well.</summary>" in text
    assert '<dt class="good">holds</dt><dd>at &lt; most</dd>' in text
    assert "<td>—</td>" in text, "no word on recall"


def test_what_is_not_there_leaves_no_trace() -> None:
    text = own(page().render())
    for part in ('id="settle"', 'class="multiples"', "for comparison", 'class="command"'):
        assert part not in text
    remedies = (Remedy(text="Try more:", command="posenc more"), Remedy(text="Or less:"))
    full = own(page(remedies, command="posenc try").render())
    bare = re.sub(r"</?span[^>]*>", "", full)
    assert "<p>Try more:</p>" in bare
    assert "<p>Or less.</p>" in bare, "no colon without a command"
    assert bare.count("<code>posenc ") == 2


def test_heads_of_groups_span_their_columns() -> None:
    columns = (
        pages.TableColumn(name="name", text=True),
        *(pages.TableColumn(name=n, group="loss at") for n in "12"),
        pages.TableColumn(name="1", group="recall at"),
        pages.TableColumn(name="speed"),
        pages.TableColumn(name="memory"),
    )
    row = (pages.Cell(text="a", kind="name"), *(pages.Cell(text=str(n), value=n) for n in range(5)))
    table = pages.TableSection(
        key="t", title="T", guide="", columns=columns, rows=(row,), marked="a"
    )
    assert [(group, len(own)) for group, own in table.groups] == [
        ("", 1), ("loss at", 2), ("recall at", 1), ("", 1), ("", 1),
    ]  # fmt: skip
    text = own(page(sections=(table,)).render())
    assert '<th colspan="2">loss at</th>' in text
    assert text.count('rowspan="2"') == 3
    assert '<tr class="chosen">' in text
    assert '<td data-label="loss at 2" data-value="1">1</td>' in text


def test_maps_and_words() -> None:
    sides = {"corner": "depth", "rows": ("10%",), "columns": ("64", "128")}
    maps = pages.MapSection(key="m", title="M", guide="", shares={"a": ((0.81, 0.2),)}, **sides)
    lists = (("", ("S.",)), ("L", ("T.",)))
    words = pages.TextSection(key="w", title="W", paragraphs=("P.",), lists=lists)
    text = own(page(sections=(maps, words)).render())
    assert '<td style="--share: 0.81" class="strong">81</td>' in text
    assert '<td style="--share: 0.20">20</td>' in text
    assert text.index("<p>P.</p>") < text.index("<li>S.</li>") < text.index("<h3>L</h3>")
    assert text.count("<h3>") == 1


def test_scripts_are_bundled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all processes of a user, but again where the cache is damaged or not to be had."""
    made: list[str] = []

    def bundle() -> str:
        made.append("scripts")
        return "scripts ✓"

    monkeypatch.setattr("vl_convert.javascript_bundle", bundle)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert pages.bundled() == pages.bundled() == "scripts ✓"
    assert len(made) == 1
    (file,) = (tmp_path / "posenc/scripts").iterdir()
    file.write_bytes(b"\xff")
    assert pages.bundled() == pages.bundled() == "scripts ✓"
    assert len(made) == 2
    file.unlink()
    file.mkdir()
    assert "scripts ✓" in page().render()
    assert len(made) == 3
