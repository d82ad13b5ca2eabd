"""Sizes of files and folders."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from scripts.figures import repeated_classes

import posenc

PACKAGE = Path(posenc.__file__).parent
LONGEST = 500
LARGEST = 0.25
FOLDERS, FILES = 12, 9
"""Of the top floor at most."""

LINES = {file: len(file.read_text().splitlines()) for file in PACKAGE.rglob("*.py")}


def test_no_file_is_too_long_to_keep_in_mind() -> None:
    """A method is one file, whatever its length."""
    sites = [PACKAGE / "encodings" / site for site in ("embedding", "query_key", "score", "value")]
    lines = {file: n for file, n in LINES.items() if file.parent not in sites}
    assert {str(file.relative_to(PACKAGE)): n for file, n in lines.items() if n > LONGEST} == {}


def test_the_top_floor_can_be_seen_at_once() -> None:
    floor = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert len([path for path in floor if path.is_dir()]) <= FOLDERS
    assert len([path for path in floor if path.suffix == ".py"]) <= FILES


def test_no_room_holds_more_than_a_quarter_of_the_lines() -> None:
    """Rooms are the folders of the top floor, and those of the lab."""
    rooms: Counter[tuple[str, ...]] = Counter()
    for file, lines in LINES.items():
        parts = file.relative_to(PACKAGE).parts
        rooms[parts[: 2 if parts[0] == "lab" else 1]] += lines
    assert {name: n for name, n in rooms.items() if n > LARGEST * sum(LINES.values())} == {}


def test_a_class_name_is_defined_once() -> None:
    """Those of CONTRIBUTING alone have two classes, which a paper names."""
    contributing = (PACKAGE.parents[1] / "CONTRIBUTING.md").read_text()
    repeated = repeated_classes(PACKAGE)
    assert {name for name in repeated if f"`{name}`" not in contributing} == set()
    assert set(repeated) == {"Deberta", "Swin"}
