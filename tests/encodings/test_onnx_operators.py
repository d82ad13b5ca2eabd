"""Operators of ONNX for positions, by onnx and ONNX Runtime, against posenc's recipes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend

LENGTH, CACHED = 50, 40
TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.int64: TensorProto.INT64,
    torch.bool: TensorProto.BOOL,
}

generator = torch.Generator().manual_seed(0)
q = torch.randn(2, 4, LENGTH, 16, generator=generator)
k, v = torch.randn(2, 2, 2, LENGTH, 16, generator=generator)
CAUSAL = Grid.of(Layout.sequence(LENGTH), causal=True)


def run(by: str, operator: str, *inputs: Tensor | None, outputs: int = 1, **options: Any) -> Tensor:
    """The operator's first output, in version 23 of the operators."""
    named = {f"input{n}": x.contiguous() for n, x in enumerate(inputs) if x is not None}
    names = ["" if x is None else f"input{n}" for n, x in enumerate(inputs)]
    results = [f"output{n}" for n in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(operator, names, results, **options)],
        operator,
        [helper.make_tensor_value_info(n, TYPES[x.dtype], x.shape) for n, x in named.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    arrays: dict[str, np.ndarray[Any, Any]] = {name: x.numpy() for name, x in named.items()}
    if by == "onnx":
        return torch.tensor(ReferenceEvaluator(model).run(None, arrays)[0])
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=providers)
    return torch.tensor(session.run(None, arrays)[0])


by = pytest.mark.parametrize("by", ["onnx", "onnxruntime"])


@by
@pytest.mark.parametrize(("interleaved", "pairing"), [(0, "half"), (1, "adjacent")])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rotary_embedding(by: str, interleaved: int, pairing: str, fraction: float) -> None:
    rope = posenc.create("rope", head_dim=16, pairing=pairing, fraction=fraction)
    angles = rope.query_key.angles(Layout.sequence(60))[0]
    ids = torch.arange(3, 3 + LENGTH).expand(2, -1)
    partial = {} if fraction == 1 else {"rotary_embedding_dim": 8}
    inputs = q, angles.cos(), angles.sin(), ids
    got = run(by, "RotaryEmbedding", *inputs, interleaved=interleaved, **partial)
    expected, _ = rope.query_key(q, q, Grid.of(Layout.sequence(LENGTH, start=3)))
    torch.testing.assert_close(got, expected)


@by
@pytest.mark.parametrize("name", ["nope", "alibi", "t5"])
def test_attention_with_a_bias(by: str, name: str) -> None:
    encoding = posenc.create(name, heads=4, causal=True).requires_grad_(False)
    bias = None if name == "nope" else encoding.bias(CAUSAL)[0].float()
    got = run(by, "Attention", q, k, v, bias, is_causal=1)
    torch.testing.assert_close(got, attend(q, k, v, CAUSAL, encoding, scale=0.25))


@by
def test_queries_begin_after_the_past_and_at_the_first_key_without_one(by: str) -> None:
    inputs = q[:, :, CACHED:], k[:, :, CACHED:], v[:, :, CACHED:]
    past = k[:, :, :CACHED], v[:, :, :CACHED]
    got = run(by, "Attention", *inputs, None, *past, outputs=3, is_causal=1)
    keys, few = Layout.sequence(LENGTH), LENGTH - CACHED
    later = Grid(Layout.sequence(few, start=CACHED), keys, causal=True)
    torch.testing.assert_close(got, attend(inputs[0], k, v, later, Encoding()))
    first = Grid(Layout.sequence(few), keys, causal=True)
    got = run(by, "Attention", inputs[0], k, v, is_causal=1)
    torch.testing.assert_close(got, attend(inputs[0], k, v, first, Encoding()))


@by
def test_biases_are_not_capped(by: str) -> None:
    """``attend`` caps the whole logit, the operator the product alone."""
    got = run(by, "Attention", q, k, v, is_causal=1, softcap=2.0)
    torch.testing.assert_close(got, attend(q, k, v, CAUSAL, Encoding(), softcap=2.0))
    alibi = posenc.create("alibi", heads=4)
    bias = alibi.bias(CAUSAL)[0].float()
    got = run(by, "Attention", q, k, v, bias, is_causal=1, softcap=2.0)
    capped = 2 * torch.tanh(q @ k.repeat_interleave(2, 1).mT / 8) + bias
    expected = capped.masked_fill(~CAUSAL.visible, -torch.inf).softmax(-1)
    torch.testing.assert_close(got, expected @ v.repeat_interleave(2, 1))
    assert (got - attend(q, k, v, CAUSAL, alibi, softcap=2.0)).abs().max() > 0.1


@by
def test_rows_that_see_nothing_are_zero_in_both(by: str) -> None:
    valid = torch.ones(1, LENGTH, dtype=torch.bool)
    valid[:, 30:] = False
    padded = Grid.of(Layout.padded([30], LENGTH))
    got = run(by, "Attention", q, k, v, (valid[..., None] & valid[:, None]).expand(2, 1, -1, -1))
    assert not got[:, :, 30:].any()
    torch.testing.assert_close(got, attend(q, k, v, padded, Encoding()))
