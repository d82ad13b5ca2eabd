"""Records from JSON values and options from text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from posenc.arguments import Count, Interval
from posenc.errors import ArgumentError
from posenc.lab.codec import from_plain, to_plain
from posenc.registration import parse_option


@dataclass(frozen=True, kw_only=True)
class Inner:
    number: int
    share: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: tuple[Inner, ...]
    names: Sequence[str]
    table: Mapping[str, float]
    path: Path | None
    pair: tuple[int, str] = (1, "one")
    kind: Literal["a", "b"] = "a"
    flag: bool = False
    rest: Any = None
    count: Count = 1

    def __post_init__(self) -> None:
        if self.flag and not self.names:
            raise ArgumentError("names", expected="some", got="none", remedy="Add one.")


RECORD = Outer(
    inner=(Inner(number=3), Inner(number=4, share=1.0)),
    names=("x", "y"),
    table={"k": 2.0},
    path=Path("here"),
    rest=[{"any": 1}],
)
PLAIN = to_plain(RECORD)


def test_records_survive_json() -> None:
    again = from_plain(Outer, json.loads(json.dumps(PLAIN)))
    assert again == RECORD
    assert isinstance(again.names, tuple)
    assert from_plain(Outer, PLAIN | {"table": {"k": 2}}).table == {"k": 2.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flag": 1}, "expected bool, got '1' @ Outer.flag"),
        ({"inner": [{"number": "3"}]}, r"expected int, got '3' @ Outer.inner"),
        ({"inner": [{"number": True}]}, "expected int, got 'True'"),
        ({"inner": [{"number": 3.0}]}, "expected int, got '3.0'"),
        ({"inner": [{}]}, "required field missing @ Outer.inner"),
        ({"inner": [{"number": 3, "share": True}]}, "expected float"),
        ({"inner": {"number": 3}}, "expected any number of items"),
        ({"names": "xy"}, "expected any number of items, got 'xy'"),
        ({"names": [1]}, "expected str"),
        ({"table": []}, "Outer.table"),
        ({"path": 3}, "Outer.path"),
        ({"pair": [1]}, "expected 2 items"),
        ({"kind": "c"}, "Outer.kind"),
        ({"colour": "red"}, "extra fields found"),
        ({"flag": True, "names": []}, "names: expected some, got none"),
    ],
)
def test_other_values_are_refused_with_their_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        from_plain(Outer, PLAIN | change)


@pytest.mark.parametrize("plain", [None, 3, "text", [], [PLAIN], {}])
def test_what_is_no_object_of_the_fields_is_refused(plain: object) -> None:
    with pytest.raises(TypeError):
        from_plain(Outer, plain)


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (bool, "false", False),
        (bool, "On", True),
        (bool | None, "none", None),
        (int | None, "7", 7),
        (str, "none", "none"),
        (Annotated[float, Interval(0, 1)], " 0.5 ", 0.5),
        (Literal["half", "adjacent"], "half", "half"),
        (tuple[int, ...], "[1, 2,3]", (1, 2, 3)),
        (tuple[float, float], "(1,2)", (1.0, 2.0)),
        (Sequence[bool] | None, "yes,no", (True, False)),
        (Sequence[int] | None, "None", None),
    ],
)
def test_options_are_read_by_their_type(annotation: Any, text: str, value: object) -> None:
    parameter = Parameter("option", Parameter.KEYWORD_ONLY, annotation=annotation)
    read = parse_option("option", parameter, text)
    assert read == value
    assert type(read) is type(value)
