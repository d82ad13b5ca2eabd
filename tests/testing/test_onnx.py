"""Encodings as ONNX, run by ONNX Runtime; all of them with ``make test-exhaustive``."""

from __future__ import annotations

import re
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor

import posenc
from posenc import Grid, Layout, attend
from posenc.registry import ENCODINGS
from posenc.testing import Subject
from posenc.testing.laws import SIZES, Model, exported, model_inputs
from posenc.testing.subject import agree
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


def check_onnx(subject: Subject, file: Path) -> None:
    """Compare the exported program in ONNX Runtime with the model, to 1e-4.

    Raises:
        torch.onnx.ConversionError: if the program has an operator that ONNX lacks.
    """
    model = Model(subject)
    with torch.no_grad():
        program = torch.onnx.export(exported(model), dynamo=True, optimize=False, verbose=False)
        assert program is not None
        program.save(file)
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        names = [argument.name for argument in session.get_inputs()]
        for rows, length in SIZES:
            arguments = model_inputs(rows, length)
            arrays = {name: x.numpy() for name, x in zip(names, arguments, strict=False)}
            got = torch.from_numpy(session.run(None, arrays)[0])
            agree(f"{rows} × {length}", got, model(*arguments), tolerance=1e-4)


@pytest.mark.parametrize("name", kept_in_suite(ENCODINGS, QUICK))
def test_runs_in_onnxruntime(name: str, tmp_path: Path) -> None:
    subject = Subject.of_entry(name, ENCODINGS[name])
    if name not in INEXPRESSIBLE:
        check_onnx(subject, tmp_path / "model.onnx")
        return
    with pytest.raises(torch.onnx.errors.OnnxExporterError) as caught:
        check_onnx(subject, tmp_path / "model.onnx")
    assert INEXPRESSIBLE[name] in f"{caught.value} {caught.value.__cause__}"


class Padded(torch.nn.Module):
    """RoPE in causal attention over rows that a tokenizer has padded."""

    def __init__(self) -> None:
        super().__init__()
        self.encoding = posenc.create("rope", head_dim=16)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        grid = Grid.of(Layout.from_attention_mask(mask), causal=True)
        return attend(q, k, v, grid, self.encoding)


@pytest.mark.parametrize("opset", [18, 22])
def test_rows_that_see_nothing_are_zero_in_onnxruntime(opset: int, tmp_path: Path) -> None:
    q, k, v = torch.randn(3, 2, 2, 6, 16).unbind()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()  # padded on the left
    given, file = (q, k, v, mask), tmp_path / "padded.onnx"
    names = ["q", "k", "v", "mask"]
    options = {"dynamo": True, "verbose": False, "opset_version": opset, "input_names": names}
    torch.onnx.export(Padded(), given, file, **options)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    fed = {name: x.numpy() for name, x in zip(names, given, strict=True)}
    found = torch.from_numpy(session.run(None, fed)[0])
    assert not found[0, :, :2].any()
    torch.testing.assert_close(found, Padded()(*given))


def test_the_guide_names_those_that_it_cannot_express() -> None:
    section = GUIDE.read_text().partition("## Export to ONNX")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([a-z_]+)`", section)) == set(INEXPRESSIBLE)
