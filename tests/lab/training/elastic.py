"""A training under torchrun's agent, one of whose ranks is killed by a signal."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from posenc.lab.training import Watch, fit, full_weights, loop
from tests.lab.training.spread import Learning, build, plan

RANKS = 2

STEPS = 6


def train(kind: str, folder: str, at: int) -> tuple[int, list[float], dict[str, list[float]]]:
    """A rank: the last is killed after step ``at``, in its first life.

    Returns:
        the first step of its last life, and losses and weights as ``spread.trained``.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    loop.SAVE_SECONDS = 0.0
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    begun: list[int] = []

    def stepped(step: int, loss: Tensor, speed: float) -> None:
        if first_life and step == at and dist.get_rank() == RANKS - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    mesh, watch = init_device_mesh("cpu", (RANKS,)), Watch(started=begun.append, stepped=stepped)
    planned = plan(kind, STEPS, folder, strategy="fsdp")
    result = fit(build(kind), Learning(kind), planned, watch, mesh=mesh)
    weights = {name: x.flatten().tolist() for name, x in full_weights(result.model).items()}
    dist.destroy_process_group()
    return begun[0], result.losses.tolist(), weights


def launch(kind: str, folder: str, at: int, results: Any) -> None:
    """Run ``train`` as torchrun does, with one restart; send what each rank returns."""
    # A store shared by both lives has addresses of killed ranks, which others may connect to.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    nodes = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": RANKS, "run_id": "killed"}
    meeting = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    how = {"max_restarts": 1, "monitor_interval": 0.05, "start_method": "fork"}
    config = LaunchConfig(**nodes, **meeting, **how)
    results.put(elastic_launch(config, train)(kind, folder, at))
