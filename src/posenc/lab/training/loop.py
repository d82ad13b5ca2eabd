"""Training loop: AdamW, seeded data, checkpoints that resume to the bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW

from posenc.errors import Interrupted
from posenc.lab.training.checkpoint import TrainingPlan, TrainingState
from posenc.lab.training.machine import PeakMemory
from posenc.lab.training.ranks import TrainingRanks
from posenc.lab.training.seeding import generator


class Objective(Protocol):
    """Batches and loss of a training.

    All random draws come from generators seeded by the arguments, so that a run can be repeated,
    and resumed, to the bit. If the loss is a mean over other things than rows, a method
    ``weight(batch)`` returns their number, by which the losses of parts of a batch are averaged.
    """

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides a training step besides encoding, seed and step."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a batch."""

    def batch(self, seed: int, step: int) -> Mapping[str, Any]:
        """Tensors and layouts of a training step, a pure function of its arguments."""

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """The scalar to minimise."""


class TrainingTask(Objective, Protocol):
    """An objective with a model for every encoding."""

    def build(self, encoding: str) -> nn.Module:
        """A new model with ``encoding``, its weights drawn from torch's global generator.

        Raises:
            ArgumentError: when the encoding does not suit this task.
        """


SAVE_SECONDS = 5.0
"""Time between checkpoints."""

BETAS = (0.9, 0.95)
LARGEST_NORM = 1.0

CONTROL = "nope"
"""The encoding whose model gives all others their shared initial weights."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained model, and the cost of its training.

    Args:
        model: frozen, on the device it was trained on.
        losses: ``[steps]``.
        diverged: the first step with a loss that is not finite, soon after which training ended; or
            the last if it left weights that are not.
        seconds: of training, over all calls.
        tokens_per_second: of training.
        peak_memory_bytes: of training, beyond the memory of the process before.
    """

    model: nn.Module
    losses: Tensor
    diverged: int | None
    seconds: float
    tokens_per_second: float
    peak_memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Callbacks of a training.

    Args:
        stop: asked after each step; True: save and raise ``Interrupted``.
        started: called once, with the number of steps that an earlier call has done.
        stepped: called after each step with (steps done, loss of the last, tokens a second).
    """

    stop: Callable[[], bool] = lambda: False
    started: Callable[[int], None] = lambda step: None
    stepped: Callable[[int, Tensor, float], None] = lambda step, loss, speed: None


def train(task: TrainingTask, plan: TrainingPlan, watch: Watch | None = None) -> Trained:
    """Train the model that the task builds for an encoding, from the weights of its seed.

    Raises:
        Interrupted, CheckpointError, OutputError: as ``fit``.
    """
    return fit(seeded_model(task, plan.encoding, plan.seed), task, plan, watch)


def fit(
    model: nn.Module,
    objective: Objective,
    plan: TrainingPlan,
    watch: Watch | None = None,
    *,
    mesh: DeviceMesh | None = None,
) -> Trained:
    """Train a model in place, or continue where the checkpoint in ``plan.folder`` ended.

    On the CPU a run that was stopped or killed at any moment, and continued, ends with the same
    bits as one that was not: data and rate of a step depend on the seed and the step alone, and
    the checkpoint holds all else. Torch's global generators are left as they were.

    Several ranks train one model by ``plan.strategy``, each on its rows of every batch, with the
    losses and gradients of one process on all rows. Each calls this with the same arguments, but
    for its device; the model of the first is where they start. Their dropout depends on seed, step
    and rank, so a run that is continued by as many ranks ends as an unbroken one.

    Args:
        model: on any device; moved to ``plan.device``. With ``"fsdp"`` its parameters stay sharded;
            see ``full_weights``.
        objective: batches and loss.
        plan: steps, rate, device, checkpoint.
        watch: callbacks; none by default.
        mesh: of one axis, over the ranks that train together; None: this process alone.

    Raises:
        ArgumentError: for a mesh of several axes, batches of fewer rows than ranks and parts, or
            ranks with different models, objectives or plans.
        Interrupted: after ``watch.stop`` returned True; the state is saved.
        CheckpointError: when the checkpoint is damaged or of another run.
        OutputError: when the checkpoint cannot be written, or ranks do not share ``plan.folder``.
        RankError: when a rank dies, or does not answer within the group's timeout.
    """
    device = torch.device(plan.device)
    ranks = TrainingRanks(mesh)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), ranks.failures_named():
        return _fit(model, objective, plan, watch or Watch(), device, ranks)


def _fit(
    bare: nn.Module,
    objective: Objective,
    plan: TrainingPlan,
    watch: Watch,
    device: torch.device,
    ranks: TrainingRanks,
) -> Trained:
    memory = PeakMemory(device)
    devices = 1 if device.index is None else [device.index]
    fabric = Fabric(
        accelerator=device.type,
        devices=devices,
        precision=plan.precision,  # type: ignore[arg-type]
        plugins=[LightningEnvironment()],  # not torchrun's: the mesh says who takes part
    )
    shapes = {name: (tuple(x.shape), x.dtype) for name, x in bare.named_parameters()}
    ranks.require_same(f"{objective.fingerprint} {plan.shared()} {shapes}")
    spread = ranks.spread(bare.to(device), plan.strategy)
    model = fabric.setup_module(spread)
    inner = AdamW(
        bare.parameters(), lr=plan.rate, betas=BETAS, weight_decay=plan.weight_decay, fused=True
    )
    optimizer = cast(AdamW, fabric.setup_optimizers(inner))
    torch.manual_seed(plan.seed)
    state = TrainingState(bare, inner, plan, objective.fingerprint, ranks)
    state.restore()
    watch.started(state.step)

    def save() -> None:
        state.peak_memory_bytes = max(state.peak_memory_bytes, memory.used())
        state.save()

    model.train()
    earlier, first = state.seconds, state.step
    began = saved = time.perf_counter()
    while state.step < plan.steps:
        for group in inner.param_groups:
            group["lr"] = plan.rate * plan.schedule(state.step, plan.steps)
        if ranks.mesh is not None:
            torch.manual_seed(generator(plan.seed, state.step, ranks.rank).initial_seed())
        batch = objective.batch(plan.seed, state.step)
        microbatches = ranks.microbatches(batch, objective, plan.accumulate)
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for number, (microbatch, share) in enumerate(microbatches, start=1):
            with ranks.gradient_sync(spread, last=number == len(microbatches)):
                rows = {name: x.to(device) for name, x in microbatch.items()}
                losses.append(share * objective.loss(model, rows))
                fabric.backward(ranks.size * losses[-1])
        nn.utils.clip_grad_norm_(bare.parameters(), LARGEST_NORM)
        optimizer.step()
        state.losses[state.step] = ranks.sum(torch.stack(losses).detach().sum())
        state.step += 1
        now = time.perf_counter()
        state.seconds = earlier + now - began
        speed = objective.tokens_per_step * (state.step - first) / (now - began)
        watch.stepped(state.step, state.losses[state.step - 1], speed)
        stop, due = ranks.any(state.step < plan.steps and watch.stop(), now - saved > SAVE_SECONDS)
        if stop:
            save()
            raise Interrupted(
                "training",
                expected=f"{plan.steps} steps of {plan.encoding}, seed {plan.seed}",
                got=f"a stop after step {state.step}",
                remedy="It is saved: train it again with the same settings and folder to continue.",
            )
        if due:
            if state.diverged() is not None:
                break
            save()
            saved = time.perf_counter()
    save()
    bare.requires_grad_(requires_grad=False).eval()
    return Trained(
        model=bare,
        losses=state.losses.cpu(),
        diverged=state.diverged(),
        seconds=state.seconds,
        tokens_per_second=objective.tokens_per_step * state.step / max(state.seconds, 1e-9),
        peak_memory_bytes=state.peak_memory_bytes,
    )


def seeded_model(task: TrainingTask, encoding: str, seed: int) -> nn.Module:
    """A new model whose weights are the same for every encoding, but for the encoding's own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        control = dict(task.build(CONTROL).named_parameters())
        torch.manual_seed(seed)
        model = task.build(encoding)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in control and control[name].shape == parameter.shape:
                parameter.copy_(control[name])
    return model
