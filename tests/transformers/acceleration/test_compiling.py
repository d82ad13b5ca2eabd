"""Compiled models on transformers' attention interface."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils._pytree import tree_leaves
from transformers import AutoModel, CompileConfig

from posenc.transformers.acceleration import accelerate
from tests.support.versions import fault_before
from tests.testing.tiny_models import inputs_of, tiny_config
from tests.transformers.acceleration.test_switching import causal, served


def gradients(model: Any, inputs: Any, real: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits of real tokens, and the gradients of all parameters."""
    model.zero_grad()
    logits = model(**inputs).logits[real]
    logits.square().mean().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


UNCOMPILED_EXPERTS = fault_before(
    "transformers", "5.23", "no graph is made of the backward pass of its experts on CPUs"
)

WIDE = 400
"""Tokens of a row, more than posenc leaves to others, with many pairs beside any other size."""


@pytest.mark.parametrize("way", ["cached", "padded", "packed"])
@pytest.mark.parametrize(
    "kind",
    [
        "mistral",
        pytest.param("gpt_oss", marks=[pytest.mark.exhaustive, UNCOMPILED_EXPERTS]),
        pytest.param("olmo3", marks=pytest.mark.exhaustive),
    ],
)
def test_compiled_windows_make_nothing_of_all_pairs(kind: str, way: str) -> None:
    """Nor do packed documents, which a graph is made for where no cache and no mask is given."""
    model = causal(kind)
    model.config.max_position_embeddings = WIDE
    ids, shown = torch.randint(3, 100, (2, WIDE)), torch.ones(2, WIDE, dtype=torch.bool)
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": way == "cached"}
    if way == "padded":
        shown[0, :5] = shown[0, 20:23] = shown[1, -7:] = False
        inputs["attention_mask"] = shown.long()
    if way == "packed":
        places = torch.cat([torch.arange(110), torch.arange(WIDE - 110)])
        inputs["position_ids"] = places.expand(2, -1)
    expected = gradients(model, inputs, shown)
    accelerate(model, check=False)
    sizes: list[int] = []

    def watched(graph: Any, examples: Any) -> Any:
        found = (tree_leaves(node.meta.get("val")) for node in graph.graph.nodes)
        sizes.extend(x.numel() for leaves in found for x in leaves if isinstance(x, Tensor))
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=watched), fullgraph=True)
    found = gradients(compiled, inputs, shown)
    full = kind != "mistral" and way == "padded"
    assert sizes
    assert full or max(sizes) < WIDE * WIDE
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "kind",
    [
        "modernbert",
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("gemma2", "llama4_text")),
    ],
)
def test_compiled_models_give_the_same(kind: str) -> None:
    model: Any = AutoModel.from_config(tiny_config(kind), attn_implementation="eager").eval()
    inputs = inputs_of(model, padding="right")
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**inputs)[0]
        torch.compiler.reset()
        compiled: Any = torch.compile(served(model), backend="eager")
        found = compiled(**inputs)[0]
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["gpt_oss", pytest.param("mistral", marks=pytest.mark.exhaustive)])
def test_generate_compiles_what_follows_a_static_cache(kind: str) -> None:
    """Masks come into the graph from outside."""
    model: Any = causal(kind)
    ids = torch.randint(3, 100, (2, 23), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options)
    compiling = CompileConfig(backend="eager", fullgraph=True, mode=None)
    compiling._compile_all_devices = True  # on CPUs generate does not compile by itself
    torch.compiler.reset()
    compiled: Any = served(model)
    options |= {"cache_implementation": "static", "compile_config": compiling}
    assert torch.equal(compiled.generate(ids, **options), expected)
