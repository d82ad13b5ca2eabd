"""The page on stretching runs as it stands."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "stretch.md"


def test_every_example_of_the_page() -> None:
    source = "\n".join(re.findall(r"```pycon\n(.*?)```", PAGE.read_text(), re.DOTALL))
    examples = doctest.DocTestParser().get_doctest(source, {}, PAGE.name, str(PAGE), 0)
    assert len(examples.examples) > 10
    printed: list[str] = []
    doctest.DocTestRunner(verbose=False).run(examples, out=printed.append)
    assert "".join(printed) == ""
