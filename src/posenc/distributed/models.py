"""Models whose tokens are spread over ranks."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from posenc.attention import Attention, LatentAttention
from posenc.distributed.api import ContextParallel
from posenc.distributed.group import Group, gather
from posenc.distributed.shards import Session, Shards
from posenc.encoding import EmbeddingEncoding
from posenc.errors import ArgumentError
from posenc.models import ImageEncoder, SavedModel, SequenceClassifier, Swin, TextClassifier
from posenc.models.block import BatchNorm
from posenc.models.complex_layers import ComplexAttention

UNSUPPORTED: dict[type[nn.Module], str] = {
    ComplexAttention: "attention of complex numbers, which knows one rank only",
    LatentAttention: "latent attention, which knows one rank only",
    BatchNorm: "batch norm, whose statistics are of one rank's tokens",
    TextClassifier: "a TextClassifier, whose mean is over one rank's tokens",
    SequenceClassifier: "a SequenceClassifier, whose mean is over one rank's tokens",
    ImageEncoder: "an ImageEncoder, which takes whole images",
    Swin: "a Swin, which takes whole images",
}


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    axis: str | int | None = None,
    form: str = "auto",
) -> None:
    """Let a model attend over sequences that are spread over ranks, in place.

    Each rank then passes its own tokens, with their layout, and gets the output of its own tokens.
    Gradients of the parameters are the part of this rank's loss; see ``sum_gradients``. Embedding
    parts that read other tokens (a convolution) are computed on the tokens of all ranks. Dropout of
    attention weights is as in ``attend``; that of features follows each rank's own random state,
    so seed the ranks differently. No KV cache.

    Args:
        model: of posenc, or any module with ``posenc.Attention`` in it.
        mesh, axis, form: see ``attend``.

    Raises:
        ArgumentError: for a model without ``Attention``, or with layers that join tokens in
            another way; in the calls of a model of posenc, without a layout.

    >>> import torch.distributed as dist
    >>> from posenc.models import Decoder, DecoderConfig
    >>> from posenc.distributed import parallelize
    >>> model = Decoder(DecoderConfig(vocabulary=256, dim=32, layers=2, heads=4, encoding="t5"))
    >>> if dist.is_initialized():
    ...     parallelize(model, dist.group.WORLD)
    """
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    others = [
        text for m in model.modules() for kind, text in UNSUPPORTED.items() if isinstance(m, kind)
    ]
    if not layers or others:
        raise ArgumentError(
            "model",
            expected="a module whose tokens meet in posenc.Attention only",
            got=others[0] if others else "one without it",
            remedy="Use another model, or call posenc.distributed.attend yourself.",
        )
    attend, group = ContextParallel(mesh, axis, form), Group.of(mesh, axis)
    for layer in layers:
        layer.attend = attend
    parts = [part for layer in layers for part in layer.encoding.parts()]
    for part in dict.fromkeys([*model.modules(), *parts]):
        if isinstance(part, EmbeddingEncoding) and not part.pairwise:
            hooks = _WholeSequence(group)
            part.register_forward_pre_hook(hooks.gather, with_kwargs=True)
            part.register_forward_hook(hooks.scatter, with_kwargs=True)
    if isinstance(model, SavedModel) and group.size > 1:
        model.register_forward_pre_hook(_require_layouts, with_kwargs=True)


def _require_layouts(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hook by which a model of posenc refuses tokens without a layout."""
    arguments = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    for name in inspect.signature(model.forward).parameters:
        if name.endswith("layout") and arguments.get(name) is None:
            raise ArgumentError(
                name,
                expected="the layout of this rank's tokens, of a model over ranks",
                got=None,
                remedy="Use posenc.distributed.take(layout of all tokens, index of this rank's).",
            )


@dataclass(eq=False)
class _WholeSequence:
    """Hooks by which an embedding part is called with the tokens of all ranks."""

    group: Group
    shards: Shards | None = None

    def gather(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of a call for the tokens of all ranks."""
        if "method" in kwargs:
            return None
        x, layout = args
        tokens: Tensor | None = kwargs.get("tokens")
        self.shards = shards = Session(self.group).shards(layout)
        (gathered,) = gather(self.group, shards.lengths, [x.transpose(0, 1)])
        if tokens is not None:
            tokens = shards.arrange(self.group.gather(tokens.mT, shards.lengths)).mT
        return (shards.arrange(gathered).transpose(0, 1), shards.sorted), {"tokens": tokens}

    def scatter(
        self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """This rank's tokens of the output."""
        if "method" in kwargs:
            return None
        shards = self.shards
        assert shards is not None  # the other hook ran before
        restored = shards.restore(output.transpose(0, 1)).transpose(0, 1)
        begin = sum(shards.lengths[: self.group.rank])
        return restored[:, begin : begin + shards.lengths[self.group.rank]]
