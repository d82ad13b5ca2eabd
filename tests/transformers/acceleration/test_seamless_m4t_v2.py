"""SeamlessM4T v2 beyond the laws: eager attention, whose masks of chunks are added as numbers."""

from __future__ import annotations

from tests.transformers.acceleration.cases import seamless_m4t_v2
from tests.transformers.acceleration.test_laws import accelerated, put_under


def test_eager_attention_stays() -> None:
    model = seamless_m4t_v2.make(attn_implementation="eager").eval()
    report = put_under(model, check=False)
    assert report.accelerated == len(accelerated(model)) == 0
    assert any("adds 1" in module.reason for module in report.modules)
