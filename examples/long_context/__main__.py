"""Train a T5-bias decoder on texts whose tokens are spread over all ranks.

torchrun --nproc-per-node 2 -m examples.long_context --tokens 2048 --steps 5
torchrun --nnodes 8 --nproc-per-node 8 -m examples.long_context --tokens 1048576 --dim 4096 \
    --layers 32 --heads 32 --kv-heads 8 --bfloat16 --checkpoint
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from posenc import Layout, distributed
from posenc.models import Decoder, DecoderConfig
from posenc.models.block import Block

VOCABULARY = 256


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"tokens": 2048, "steps": 5, "dim": 64, "layers": 2, "heads": 4, "kv-heads": 2}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--form", default="auto")
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--checkpoint", action="store_true", help="compute blocks again backward")
    return parser.parse_args(arguments)


def text_of(step: int, tokens: int) -> torch.Tensor:
    """One text, ``[1, tokens + 1]``: bytes of a random walk, in place of a corpus."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(-2, 3, (1, tokens + 1), generator=generator).cumsum(1) % VOCABULARY


def train(mesh: Any, settings: argparse.Namespace, device: str = "cpu") -> list[float]:
    """Loss of every step, the same on all ranks.

    Args:
        mesh: one axis: its ranks share each text, and the model's parameters.
    """
    torch.manual_seed(0)
    config = DecoderConfig(
        vocabulary=VOCABULARY,
        dim=settings.dim,
        layers=settings.layers,
        heads=settings.heads,
        kv_heads=settings.kv_heads,
        encoding="t5",
    )
    model = Decoder(config).to(device)
    distributed.parallelize(model, mesh, form=settings.form)
    narrow = torch.bfloat16 if settings.bfloat16 else None
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        if settings.checkpoint:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rank, ranks, length = mesh.get_local_rank(), mesh.size(), settings.tokens
    index = distributed.balanced(length, ranks, rank)
    layout = distributed.take(Layout.sequence(length), index).to(device)
    losses = []
    for step in range(settings.steps):
        text = text_of(step, length)
        tokens, targets = (part[:, index].to(device) for part in (text[:, :-1], text[:, 1:]))
        logits = model(tokens, layout).float()
        summed = nn.functional.cross_entropy(logits.flatten(0, 1), targets[0], reduction="sum")
        # FSDP averages gradients over the ranks; the loss is a mean over all ranks' tokens.
        (summed * ranks / length).backward()
        optimizer.step()
        optimizer.zero_grad()
        total = summed.detach()
        dist.all_reduce(total, group=mesh.get_group())
        losses.append(float(total) / length)
    return losses


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for step, loss in enumerate(train(mesh, options(), device)):
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
