"""The page on attention that is not posenc's runs as it stands."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "own-attention.md"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_every_example_of_the_page() -> None:
    source = "\n".join(re.findall(r"```pycon\n(.*?)```", PAGE.read_text(), re.DOTALL))
    examples = doctest.DocTestParser().get_doctest(source, {}, PAGE.name, str(PAGE), 0)
    assert len(examples.examples) > 20
    told: list[str] = []
    doctest.DocTestRunner(verbose=False).run(examples, out=told.append)
    assert "".join(told) == ""
