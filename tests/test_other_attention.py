"""The examples of the page on other forms of attention run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "other-attention.md"


def test_the_examples_run_as_they_stand() -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {}
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 8
    for example in examples:
        exec(compile(example, PAGE.name, "exec"), names)
