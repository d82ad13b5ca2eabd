"""Pictures: colours, images of cells, and the files drawn."""

from __future__ import annotations

import base64
import io
import math
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from posenc.errors import ArgumentError, OutputError
from posenc.lab.visualization import pictures
from posenc.lab.visualization.panels import Trail
from posenc.lab.visualization.profile import make_profile


def decode(uri: str) -> torch.Tensor:
    """The pixels of a PNG, as ``[R, K, 4]``."""
    content = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
    with Image.open(io.BytesIO(content)) as image:
        assert (image.format, image.mode) == ("PNG", "RGBA")
        flat = torch.tensor(list(image.tobytes()))
        return flat.reshape(image.height, image.width, 4)


def test_cells_become_blocks_of_pixels() -> None:
    cells = torch.rand(3, 5, 4, generator=torch.Generator().manual_seed(0))
    pixels = decode(pictures.data_uri(cells))
    assert pixels.shape == (3 * 192, 5 * 115, 4)
    assert pixels[::192, ::115].equal((cells * 255).round().long())
    assert pixels[191::192, 114::115].equal(pixels[::192, ::115])


def test_amounts_are_clear_at_zero_and_full_at_the_ends() -> None:
    values = torch.tensor([[[-2.0, 0.0, 1.0, math.nan]]])
    red, clear, blue, nothing = pictures.Scale.of_amounts(values).colour(values)[0, 0]
    assert "#" + bytes(red[:3].mul(255).round().byte().tolist()).hex() == pictures.FALL
    assert "#" + bytes(blue[:3].mul(255).round().byte().tolist()).hex() == pictures.RISE
    assert [c[3].item() for c in (red, clear, blue)] == [1.0, 0.0, 0.5]
    assert 0 < nothing[3] < 0.3


def test_values_close_to_one_another_have_more_digits() -> None:
    assert pictures._gradient(pictures.Scale((0.98, 0.99), 1.0)).to_dict()["format"] == ".4~g"
    assert pictures._gradient(pictures.Scale((0.0, 0.99), 1.0)).to_dict()["format"] == ".2~g"


def test_only_the_sides_that_there_are() -> None:
    assert pictures.Scale.of_amounts(torch.tensor([[[0.0, 3.0]]])).domain == (0.0, 3.0)
    assert pictures.Scale.of_amounts(torch.tensor([[[0.0, -3.0]]])).domain == (-3.0, 0.0)
    assert pictures.Scale.of_amounts(torch.zeros(1, 1, 2)).domain[0] == 0.0


def test_values_far_above_zero_are_told_apart() -> None:
    """Cosines from 0.98 to 1 on a scale from 0 would be one blue square."""
    scale = pictures.Scale.of_amounts(torch.tensor([[[0.98, 1.0, math.nan]]]))
    assert scale.domain == pytest.approx((0.98, 1.0))
    opacity = scale.colour(torch.tensor([0.98, 0.99, 1.0]))[:, 3].tolist()
    assert opacity == pytest.approx([0, 0.5, 1], abs=1e-4)
    assert scale.legend().to_dict()["domain"] == pytest.approx([0.98, 1.0])
    for wide in ([0.4, 1.0], [-1.0, -0.9], [1.0] * 3, [math.nan] * 3):
        assert not pictures.is_narrow(torch.tensor(wide))


def test_no_name_of_a_position_is_written_over_another() -> None:
    points = torch.zeros(16, 2)
    points[8] = torch.tensor([1.0, 0.0])
    trail = Trail(title="", note="", points=points, x_label="x", y_label="y")
    rows = pictures.draw_panel(trail)["vconcat"][0]["data"]["values"]
    assert [row["name"] for row in rows if row["name"]] == ["0", "8"]


def test_maps_of_very_different_sizes_share_a_root() -> None:
    scale = pictures.Scale.of_amounts(torch.tensor([[[16.0]], [[1.0]]]))
    assert scale.exponent == 0.5
    assert scale.colour(torch.tensor(1.0))[3] == pytest.approx(0.25)


def test_angles_have_hues_that_meet() -> None:
    scale = pictures.Scale.of_angles()
    ends = scale.colour(torch.tensor([-math.pi, math.pi]))
    assert ends[0] == pytest.approx(ends[1], abs=1e-5)
    quarter = scale.colour(torch.tensor([0.0, math.pi / 2]))
    assert (quarter[0] - quarter[1]).abs().max() > 0.3
    assert scale.colour(torch.tensor([1.0]))[0, 3] == 1


def test_files_of_every_kind(tmp_path: Path) -> None:
    profile = make_profile("shaw", length=12)
    for kind, start in ((".png", b"\x89PNG"), (".svg", b"<svg"), (".html", b"<!DOCTYPE html>")):
        path = tmp_path / f"shaw{kind}"
        pictures.save_picture(profile, path, summary="Adds vectors.")
        content = path.read_bytes()
        assert content.lstrip().startswith(start)
        assert len(content) < 3_000_000
    svg = (tmp_path / "shaw.svg").read_text()
    for words in ("shaw", "Adds vectors.", "Drawn with the initial values", "Buckets"):
        assert words in svg
    assert len(re.findall("data:image/png", svg)) == 2


def test_other_endings_and_places_are_refused(tmp_path: Path) -> None:
    profile = make_profile("nope", length=4)
    with pytest.raises(ArgumentError, match=r"\.png, \.svg, \.html"):
        pictures.save_picture(profile, tmp_path / "nope.gif")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        pictures.save_picture(profile, tmp_path / "file" / "nope.png")


def test_all_heads_are_drawn_on_one_scale() -> None:
    spec = pictures.draw(make_profile("alibi", length=8))
    maps = [row for rows in spec["concat"][0]["vconcat"] for row in rows["hconcat"]]
    assert [chart["title"]["text"] for chart in maps] == [f"head {n}" for n in (1, 2, 3, 4)]
    scales = [chart["layer"][1]["encoding"]["color"]["scale"] for chart in maps]
    assert all(scale == scales[0] for scale in scales)
