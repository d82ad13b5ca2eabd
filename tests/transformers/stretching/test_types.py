"""Model types of transformers with rotary frequencies: a share of the sweep over all."""

from __future__ import annotations

import pytest

from tests.support.exhaustive import kept_in_suite
from tests.transformers.stretching.sweep import check

KEPT = (
    *("diffllama", "gemma3n_text", "gpt_neox", "minicpm3", "modernbert", "phi3", "qwen2_vl_text"),
    "qwen3_next",
)
"""With two softmaxes, norms without scale, a rotated part, latent attention, both sides, factors by
length, three axes, and layers without attention."""

OTHERS = (
    *("apertus", "arcee", "cohere2", "ernie4_5", "exaone4", "glm4", "granite", "helium"),
    *("nanochat", "olmo2", "qwen3", "stablelm"),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", kept_in_suite((*KEPT, *OTHERS), KEPT))
def test_type(kind: str) -> None:
    verdicts = check(kind)
    assert verdicts is not None
    assert verdicts["restored"] == "equal"
    assert verdicts["yarn"].partition(",")[0] in ("equal", "alone"), verdicts
    assert verdicts["rerope"].startswith("equal"), verdicts
