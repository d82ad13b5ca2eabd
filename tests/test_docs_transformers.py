"""The table of transformers' models with a bias, window, sink or cap is true."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import transformers

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reference" / "transformers-models.md").read_text()


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    path = ROOT / "scripts" / "transformers_models.py"
    spec = importlib.util.spec_from_file_location("transformers_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_table_is_current(maker: ModuleType) -> None:
    (version,) = re.findall(r"^transformers (\S+): ", PAGE, re.MULTILINE)
    if version != transformers.__version__:
        pytest.skip(f"the table is of transformers {version}, not of {transformers.__version__}")
    assert maker.page(maker.scan(), version) == PAGE, "Remedy: make docs"


LAYER = """
attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", eager)
mask = create_sliding_window_causal_mask(config)
output = attention_interface(
    self, q, k, v, mask,
    scaling=max(1, (2)),
    {given},
)
"""


@pytest.mark.parametrize(
    ("name", "given", "served"),
    [
        ("new", "sliding_window=5", "yes, by the interface"),
        ("new", "s_aux=self.sinks", "yes, by the interface"),
        ("new", "softcap=30.0", "yes, by the interface"),
        ("new", "cu_seq_lens_q=lengths", "yes, by the interface"),
        ("new", "sinks=of_queries", "no: `sinks`"),
        ("new", "indices=chosen", "no: `indices`"),
        ("new", "position_bias=bias", "no: its bias"),
        ("inkling", "position_bias=bias", "yes, by modules of its own"),
    ],
)
def test_served_by_what_a_layer_hands_on(
    maker: ModuleType, name: str, given: str, served: str
) -> None:
    model = maker.Model.of(name, LAYER.format(given=given))
    assert "window" in model.has
    assert maker.served(model) == served


def test_attention_off_the_interface_is_not_served(maker: ModuleType) -> None:
    source = "mask = create_sliding_window_causal_mask(config)\nclass OwnAttention(nn.Module):\n"
    assert maker.served(maker.Model.of("new", source)) == "no: not on the interface"


def test_models_that_hold_others_are_served_as_these(maker: ModuleType) -> None:
    model = maker.Model.of("new", "mask = create_sliding_window_causal_mask(config)")
    assert maker.served(model) == "yes, by the interface"


def test_a_bias_beside_the_interface_is_not_served(maker: ModuleType) -> None:
    model = maker.Model.of("new", LAYER.format(given="scaling=1") + "bias = rel_shift(bias)")
    assert model.has == {"bias", "window"}
    assert maker.served(model) == "in part: layers without a bias"


def test_plain_attention_is_left_out(maker: ModuleType) -> None:
    assert not maker.Model.of("new", "attention_interface(self, q, k, v, mask)").has
