"""Output folders are whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from posenc.errors import OutputError
from posenc.lab.folders import output_folder
from posenc.storage import write_bytes


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "below" / "out"
    with output_folder(out) as partial:
        write_bytes(partial / "a", b"a")
        assert not out.exists()
        assert partial.parent == out.parent
    assert [path.name for path in out.iterdir()] == ["a"]
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("error", [RuntimeError("none"), KeyboardInterrupt()])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_error_leaves_what_was_there(
    tmp_path: Path, error: BaseException, overwrite: bool
) -> None:
    out = tmp_path / "out"
    if overwrite:
        out.mkdir()
        (out / "old").write_text("old")

    def write() -> None:
        with output_folder(out, overwrite=overwrite) as partial:
            (partial / "new").write_text("new")
            raise error

    with pytest.raises(type(error)):
        write()
    assert [path.name for path in tmp_path.rglob("*")] == (["out", "old"] if overwrite else [])


def test_an_output_error_says_that_nothing_was_left(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as raised, output_folder(tmp_path / "out"):
        raise OutputError("out", expected="to write", got="a full disk", remedy="Free some.")
    assert raised.value.remedy.endswith("nothing was left behind.")


def test_a_folder_in_use_is_refused_or_replaced_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("old")
    with pytest.raises(OutputError, match="folder: expected a new or empty folder"):
        output_folder(out, "folder").__enter__()
    with output_folder(out, overwrite=True) as partial:
        (partial / "new").write_text("new")
        assert (out / "old").exists()
    assert [path.name for path in out.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [out]


def test_one_folder_may_become_part_of_another(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with output_folder(out) as outer:
        with output_folder(outer) as inner:  # empty as yet
            (inner / "a").write_text("a")
        (outer / "b").write_text("b")
    assert sorted(path.name for path in out.iterdir()) == ["a", "b"]


def test_a_link_to_an_empty_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link = tmp_path / "out"
    link.symlink_to(tmp_path / "far")
    with output_folder(link) as partial:
        (partial / "a").write_text("a")
    assert link.is_symlink()
    assert (tmp_path / "far" / "a").exists()


def test_a_name_that_cannot_be_given(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError), output_folder(tmp_path / "file" / "out"):
        raise AssertionError("never entered")
    with pytest.raises(OutputError, match="to write"), output_folder(tmp_path / "out") as partial:
        partial.rename(tmp_path / "elsewhere")
