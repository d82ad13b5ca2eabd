"""Model types of transformers with rotary frequencies: a share of the sweep over all."""

from __future__ import annotations

import pytest

from tests.integrations.stretching.sweep import check

TYPES = (
    *("apertus", "arcee", "cohere2", "diffllama", "ernie4_5", "exaone4", "glm4", "gemma3n_text"),
    *("gpt_neox", "granite", "helium", "minicpm3", "modernbert", "nanochat", "olmo2", "phi3"),
    *("qwen2_vl_text", "qwen3_next", "qwen3", "stablelm"),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TYPES)
def test_type(kind: str) -> None:
    verdicts = check(kind)
    assert verdicts is not None
    assert verdicts["restored"] == "equal"
    assert verdicts["yarn"].partition(",")[0] in ("equal", "alone"), verdicts
    assert verdicts["rerope"].startswith("equal"), verdicts
