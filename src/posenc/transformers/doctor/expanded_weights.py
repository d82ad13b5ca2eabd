"""Models of transformers at their real size, built without storing weights.

A weight of more than ``LARGE`` numbers is a single number, expanded. The product of activations
with such a weight is a fixed random choice of features, each with a random sign, so that a forward
pass costs little and every feature of the result is that of some input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.integrations.moe import ExpertsInterface

INTERFACE = "posenc-inspection"
"""Attention, masks and experts of this name record their inputs."""

LARGE, LARGEST_ZERO, LARGEST_TABLE = 2**14, 2**20, 2**25
"""Numbers above which is not stored: a weight, one that starts at zero, and a computed table."""

SEEDS = 31
"""Number of seeds of products: weights of a layer have different ones, later layers reuse them."""

UNINITIALIZED = (torch.empty, torch.rand, torch.randn)
PRODUCTS = (
    *(torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.bmm),
    torch.Tensor.__matmul__,
)
SCALED_IN_PLACE = (torch.Tensor.div_, torch.Tensor.mul_)
FEED_FORWARD = ("mlp", "moe", "expert", "feedforward", "ffn")

ExpertsInterface.register(INTERFACE, lambda module, x, *rest, **options: torch.zeros_like(x))


class _Unstored(TorchFunctionMode):
    """Creates large tensors on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.normal_ and args[0].numel() > LARGEST_ZERO:
            return args[0]
        creates = func in (*UNINITIALIZED, torch.zeros, torch.ones)
        if creates and kwargs.get("device") is None:
            size = args[0] if args and not isinstance(args[0], int) else args
            limit = LARGE if func in UNINITIALIZED else LARGEST_TABLE
            if prod(size or kwargs.get("size", ())) > limit:
                kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


class ExpandedProducts(TorchFunctionMode):
    """Computes products with expanded weights, and rows of expanded tables.

    Args:
        seeds: as from ``build``.
        silent: products are zero, so that attention logits are bias and mask alone.
    """

    def __init__(self, seeds: Mapping[int, int], *, silent: bool = False) -> None:
        super().__init__()
        self.seeds, self.silent = seeds, silent

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.linear, torch.addmm):
            x, weight, bias = _linear_inputs(func, args, kwargs)
            if weight.dim() == 2 and (is_expanded(weight) or self.silent):
                y = self._product(x, weight, weight.shape[0 if func is F.linear else 1])
                return y if bias is None or self.silent else y + bias
        elif func in PRODUCTS and isinstance(args[1], Tensor) and is_expanded(args[1]):
            x, weight = args[:2]  # [..., tokens, in], [..., in, out]
            y = self._product(x, weight, weight.shape[-1])
            batch = torch.broadcast_shapes(y.shape[:-2], weight.shape[:-2])  # type: ignore[no-untyped-call]
            return y.expand(*batch, *y.shape[-2:])
        elif func is F.embedding and is_expanded(args[1]):
            rows = torch.randn(61, args[1].shape[1], generator=self._seeded(args[1]))
            return rows.to(args[1].dtype)[args[0] % 61]
        elif func is F.layer_norm and is_expanded(args[0]):
            # Expanded rows less their mean would be zero.
            rows = torch.randn(args[0].shape, generator=self._seeded(args[0])).to(args[0].dtype)
            args = rows, *args[1:]
        elif func in SCALED_IN_PLACE and is_expanded(args[0]):
            return args[0]
        return func(*args, **kwargs)

    def _product(self, x: Tensor, weight: Tensor, features: int) -> Tensor:
        if self.silent:
            return x.new_zeros(*x.shape[:-1], features)
        seed = self.seeds.get(weight.data_ptr(), 0)
        chosen, signs = _choice(seed, x.shape[-1], features, x.dtype)
        return x[..., chosen] * signs

    def _seeded(self, weight: Tensor) -> torch.Generator:
        return torch.Generator().manual_seed(self.seeds.get(weight.data_ptr(), 0))


@lru_cache(maxsize=8 * SEEDS)
def _choice(seed: int, inputs: int, features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random indices of ``features`` of the inputs, and a sign for each."""
    seeded = torch.Generator().manual_seed(seed)
    chosen = torch.randint(inputs, (features,), generator=seeded)
    return chosen, (torch.randint(2, (features,), generator=seeded) * 2 - 1).to(dtype)


def is_expanded(tensor: Tensor) -> bool:
    """True if a matrix, or each of a batch of them, is a single expanded number."""
    return tensor.dim() > 1 and tensor.stride()[-2:] == (0, 0)


def build(config: Any, dtype: torch.dtype) -> tuple[nn.Module, dict[int, int]]:
    """The model of a config with expanded weights; and seeds of products by weight address."""
    for part in _configs(config):
        part._experts_implementation = INTERFACE
    classes = [transformers.AutoModelForCausalLM, transformers.AutoModel]
    if getattr(config, "is_encoder_decoder", False):
        classes.reverse()
    model = _unstored(config, dtype, classes)
    for module in model.modules():
        module_config: Any = getattr(module, "config", None)
        if hasattr(module_config, "_attn_implementation_internal"):
            module_config._attn_implementation_internal = INTERFACE  # even of models without
    _compute_tables(model)
    _run_scans_once(model)
    return model.eval(), _fill(model, dtype)


def without_feed_forward(model: nn.Module) -> None:
    """Replace feed-forward parts, which do not matter to attention, by zeros."""
    for module in model.modules():
        name = type(module).__name__.lower()
        attends = any("attention" in type(part).__name__.lower() for part in module.modules())
        if any(word in name for word in FEED_FORWARD) and not attends:
            module.forward = lambda x, *rest, **options: torch.zeros_like(x)


def _unstored(config: Any, dtype: torch.dtype, classes: list[Any]) -> nn.Module:
    """The model of the first class and attention that can be built."""
    reasons: list[Exception] = []
    for auto, attention in product(classes, (INTERFACE, "eager", None)):
        try:
            with _Unstored():
                model: nn.Module = auto.from_config(
                    config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
                )
            return model
        except Exception as error:  # whatever the code of a model raises
            reasons.append(error)
    raise reasons[0]


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", {}):
        if getattr(config, name, None) is not None:
            yield getattr(config, name)


def _compute_tables(model: nn.Module) -> None:
    """Give tables of positions of subclasses storage: they may be computed, such as sinusoids."""
    words = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)  # type: ignore[operator,union-attr]
    derived = [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        and type(module) is not nn.Embedding
        and module.weight.is_meta
        and module.num_embeddings != words
        and module.weight.numel() <= LARGEST_TABLE
    ]
    for module in derived:
        table = torch.randn(module.weight.shape, dtype=module.weight.dtype)
        module.weight = nn.Parameter(table, requires_grad=False)
    for owner in model.modules() if derived else ():
        if isinstance(owner, transformers.PreTrainedModel):
            for module in derived:
                owner._init_weights(module)


def _fill(model: nn.Module, dtype: torch.dtype) -> dict[int, int]:
    """Expand a number for each large tensor; randomize small weights of zeros; the seeds."""
    seeded = torch.Generator().manual_seed(0)
    seeds: dict[int, int] = {}
    for module in model.modules():
        both: Any = (module._parameters, module._buffers)
        for tensors in both:
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                learned = isinstance(tensor, nn.Parameter)
                zero = learned and "bias" not in name and not tensor.is_meta and not tensor.any()
                if tensor.is_meta or (zero and tensor.numel() > LARGEST_ZERO):
                    count = len(seeds) + 1
                    number = torch.full((1,), 1.0 if tensor.dim() == 1 else 0.01 * (1 + count % 7))
                    filled = number.to(dtype).expand(tensor.shape)
                    seeds[filled.data_ptr()] = count % SEEDS
                    tensors[name] = nn.Parameter(filled, requires_grad=False) if learned else filled
                elif zero:
                    tensor.data = torch.randn(tensor.shape, generator=seeded).to(tensor.dtype)
    return seeds


def _run_scans_once(model: nn.Module) -> None:
    """Let state-space modules, whose scans are slow, answer as the first of their class did."""
    answers: dict[Any, Any] = {}

    def remembered(module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def answer(*args: Any, **options: Any) -> Any:
            tensors = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
            key = type(module), *(x.shape for x in tensors)
            if key not in answers:
                answers[key] = forward(*args, **options)
            return answers[key]

        return answer

    modules = dict(model.named_modules())
    for name in [name for name, module in modules.items() if hasattr(module, "A_log")]:
        part = re.match(r".*?\.\d+\.[^.]+", name)  # of a layer
        module = modules[part[0] if part else name]
        if "forward" not in vars(module):
            module.forward = remembered(module)


def _linear_inputs(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    if func is F.linear:
        return args[0], args[1], kwargs.get("bias", args[2] if len(args) > 2 else None)
    return args[1], args[2], args[0]
