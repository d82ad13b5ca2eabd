"""Accelerated models as ONNX, run by ONNX Runtime; all of them with ``make test-exhaustive``."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from tests.support.exhaustive import kept_in_suite
from tests.transformers.acceleration.case import Case
from tests.transformers.acceleration.cases import CASES
from tests.transformers.acceleration.test_laws import FIRST, put_under, require_near

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

# The graphs of transformers' own FalconModel have a product that ONNX Runtime lacks, and those of
# a router do not come about in the newer exporter.
SCRIPTED = [key for key in FIRST if not key.startswith("falcon")]
EXPORTED = [key for key in SCRIPTED if not key.startswith("switch")]
QUICK = ("bloom-padded", "deberta-padded", "deberta_v2-v3", "mpnet-model", "t5-eager")


class FirstOutput(nn.Module):
    """A model as a function of tensors."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model = case.model()
        self.names = list(case.inputs())
        put_under(self.model, check=False)
        for module in self.model.modules():
            if hasattr(module, "config"):
                module.config.use_cache = False

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Tensor = self.model(**dict(zip(self.names, inputs, strict=True)))[0]
        return output


def require_same_in_onnxruntime(case: Case, folder: Path, *, dynamo: bool) -> None:
    """The written graph gives what the model gives, for other padding too."""
    model, inputs, path = FirstOutput(case).eval(), case.inputs(), folder / "model.onnx"
    how = {"input_names": model.names, "opset_version": 18, "dynamo": dynamo}
    torch.onnx.export(model, tuple(inputs.values()), path, verbose=False, **how)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    others = dict(inputs)
    if "attention_mask" in others:
        others["attention_mask"] = torch.ones_like(others["attention_mask"])
        others["attention_mask"][0, :2] = 0
    for given in (inputs, others):
        expected = model(*given.values())
        got = torch.from_numpy(session.run(None, {name: x.numpy() for name, x in given.items()})[0])
        rows = None if case.compared is None else case.compared(given)
        both = (x if rows is None else x[rows] for x in (got, expected.detach()))
        require_near(*([x] for x in both))


@pytest.mark.parametrize("key", kept_in_suite(SCRIPTED, QUICK))
def test_the_older_exporter(key: str, tmp_path: Path) -> None:
    with torch.no_grad():
        require_same_in_onnxruntime(CASES[key], tmp_path, dynamo=False)


@pytest.mark.parametrize("key", kept_in_suite(EXPORTED, ()))
def test_the_newer_exporter(key: str, tmp_path: Path) -> None:
    with torch.no_grad():
        require_same_in_onnxruntime(CASES[key], tmp_path, dynamo=True)


@pytest.mark.parametrize("key", kept_in_suite(QUICK, ("mpnet-model",)))
def test_the_newer_exporter_with_gradients(key: str, tmp_path: Path) -> None:
    require_same_in_onnxruntime(CASES[key], tmp_path, dynamo=True)
