"""Encodings as ONNX, run by ONNX Runtime; all of them with ``make test-exhaustive``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from posenc.registry import ENCODINGS
from posenc.testing import Subject
from posenc.testing.tracing_laws import exports_to_onnx
from tests.support.exhaustive import kept_in_suite

INEXPRESSIBLE = {
    "abacus": "aten.cummax",
    "floater": "posenc.flow",
    "gaussian_fourier": "aten.view",
    "grape_multiplicative": "aten._linalg_solve_ex",
    "lierope": "aten.linalg_matrix_exp",
    "path": "aten.linalg_solve_triangular",
    "recursive": "aten._linalg_solve_ex",
}
"""Encodings with an operator that ONNX does not have."""

GUIDE = Path(__file__).parents[2] / "docs/guides/own-model.md"

QUICK = ("rope", "shaw")
"""With a rotation, and with rows gathered by bucket."""

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of onnxscript's own modules
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.mark.parametrize("name", kept_in_suite(ENCODINGS, QUICK))
def test_runs_in_onnxruntime(name: str) -> None:
    subject = Subject.of_entry(name, ENCODINGS[name])
    if name not in INEXPRESSIBLE:
        exports_to_onnx(subject)
        return
    with pytest.raises(torch.onnx.errors.OnnxExporterError) as caught:
        exports_to_onnx(subject)
    assert INEXPRESSIBLE[name] in f"{caught.value} {caught.value.__cause__}"


def test_the_guide_names_those_that_it_cannot_express() -> None:
    section = GUIDE.read_text().partition("## Export to ONNX")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([a-z_]+)`", section)) == set(INEXPRESSIBLE)
