"""Training: seeded, resumable to the bit, stoppable."""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from posenc.errors import CheckpointError, Interrupted, OutputError
from posenc.lab.experiments.settings import ComparisonSettings
from posenc.lab.experiments.tasks.language import LanguageModelling
from posenc.lab.training import Trained, TrainingPlan, Watch, fit, interruptible, train
from posenc.lab.training import loop as training
from posenc.lab.training.checkpoint import warmup_cosine
from posenc.lab.training.loop import seeded_model
from posenc.lab.training.machine import available_memory
from posenc.storage import load_tensors
from tests.support.processes import forking

STEPS = 12

KILLED_STEPS = 70
"""Of a training that is killed twice."""


class Toy:
    """Regression with dropout and running statistics: generator and buffers are state, too."""

    fingerprint = "toy"
    tokens_per_step = 4

    def __init__(self, *, bad_step: int | None = None) -> None:
        self.bad_step = bad_step
        self.seen: list[tuple[int, int]] = []

    def build(self, encoding: str) -> nn.Module:
        model = nn.Sequential()
        if encoding != "nope":
            model.add_module("encoding", nn.Linear(8, 8))
        rest = (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        for name, layer in zip(("first", "norm", "dropout", "last"), rest, strict=True):
            model.add_module(name, layer)
        return model

    def batch(self, seed: int, step: int) -> Mapping[str, Tensor]:
        self.seen.append((seed, step))
        generator = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(4, 8, generator=generator)
        return {"x": x * float("nan") if step == self.bad_step else x}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return (model(batch["x"]) - batch["x"].sum(1, keepdim=True)).square().mean()


def plan_in(folder: Path, encoding: str = "nope", steps: int = STEPS) -> TrainingPlan:
    folder.mkdir(exist_ok=True)
    return TrainingPlan(encoding=encoding, seed=1, steps=steps, rate=0.01, folder=folder)


def stop_after(plan: TrainingPlan, steps: int) -> str:
    """Train so many steps of the plan; what is said then."""
    calls = iter(range(1, 10_000))
    with pytest.raises(Interrupted, match="settings and folder to continue") as stopped:
        train(Toy(), plan, Watch(stop=lambda: next(calls) >= steps))
    return str(stopped.value)


def continued(plan: TrainingPlan) -> tuple[int, Trained]:
    """The step from which a training of the plan goes on, and what comes of it."""
    started: list[int] = []
    task = Toy()
    trained = train(task, plan, Watch(started=started.append))
    assert task.seen == [(1, later) for later in range(started[0], STEPS)]
    return started[0], trained


def assert_same_tensors(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def assert_same_bits(first: Trained, second: Trained) -> None:
    assert torch.equal(first.losses, second.losses)
    assert_same_tensors(first.model.state_dict(), second.model.state_dict())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_training_lowers_the_loss(tmp_path: Path, precision: str) -> None:
    trained = train(Toy(), replace(plan_in(tmp_path, steps=200), precision=precision))
    assert trained.losses[-20:].mean() < trained.losses[:20].mean()
    assert trained.diverged is None
    assert trained.tokens_per_second > 0
    assert trained.peak_memory_bytes >= 0
    for parameter in trained.model.parameters():
        assert (parameter.requires_grad, parameter.dtype) == (False, torch.float32)


def test_data_order_is_that_of_the_seed_for_every_encoding(tmp_path: Path) -> None:
    seen = []
    for encoding in ("nope", "rope"):
        task = Toy()
        train(task, plan_in(tmp_path / encoding, encoding))
        seen.append(task.seen)
    assert seen[0] == seen[1] == [(1, step) for step in range(STEPS)]


def test_weights_agree_though_an_encoding_draws_some_of_its_own() -> None:
    plain, encoded = (
        dict(seeded_model(Toy(), encoding, 5).named_parameters()) for encoding in ("nope", "rope")
    )
    assert encoded.keys() - plain.keys() == {"encoding.weight", "encoding.bias"}
    for name, parameter in plain.items():
        assert torch.equal(encoded[name], parameter), name


@pytest.mark.parametrize("pauses", [[1], [5], [STEPS - 1], [1] * (STEPS - 1)], ids=str)
def test_stopped_run_ends_with_the_same_bits(tmp_path: Path, pauses: list[int]) -> None:
    whole = train(Toy(), plan_in(tmp_path / "whole", "rope"))
    plan = plan_in(tmp_path / "stopped", "rope")
    for place, steps in enumerate(pauses, 1):
        assert f"after step {sum(pauses[:place])}" in stop_after(plan, steps)
        torch.manual_seed(99)  # another process has another generator
    step, resumed = continued(plan)
    assert step == sum(pauses)
    assert_same_bits(resumed, whole)


def test_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first = train(Toy(), plan_in(tmp_path))
    task = Toy()
    again = train(task, plan_in(tmp_path))
    assert task.seen == []
    assert_same_bits(again, first)
    assert again.seconds == first.seconds


def train_and_tell(text: Path, folder: Path, connection: Connection) -> None:
    """Train with a save after nearly each step, and send each step that is done."""
    torch.set_num_threads(1)
    training.SAVE_SECONDS = 0.02
    settings = ComparisonSettings(
        out=folder, text=text, encodings=("t5",), train_length=16, width=16, batch=4
    )
    plan = TrainingPlan(encoding="t5", seed=0, steps=KILLED_STEPS, rate=0.01, folder=folder)
    watch = Watch(stepped=lambda step, loss, speed: connection.send(step))
    train(LanguageModelling(settings), plan, watch)


def run_until_killed(text: Path, folder: Path, at: int | None) -> list[int]:
    """Train in another process, and kill it a moment after step ``at``; None: let it finish."""
    folder.mkdir(exist_ok=True)
    context = forking()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=train_and_tell, args=(text, folder, theirs))
    process.start()
    theirs.close()
    steps: list[int] = []
    with suppress(EOFError):
        while True:
            steps.append(ours.recv())
            if steps[-1] == at:
                # Somewhere in the next steps, a save among them as likely as not.
                pause = random.Random(at).uniform(0.0, 0.02)
                threading.Event().wait(pause)
                process.kill()
    process.join()
    ours.close()
    assert process.exitcode == (0 if at is None else -signal.SIGKILL)
    return steps


def test_memory_left_on_apples_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 3)
    assert available_memory(torch.device("mps")) == 7


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9 is a thing of Unix")
def test_killed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(torch.randint(97, 123, (8000,)).tolist()))
    run_until_killed(text, tmp_path / "whole", None)
    for at in (20, 45):
        run_until_killed(text, tmp_path / "killed", at)
    steps = run_until_killed(text, tmp_path / "killed", None)
    assert steps[-1] == KILLED_STEPS
    assert 20 < steps[0] <= KILLED_STEPS, "the last run must have continued"
    names = [tmp_path / name / "checkpoint.safetensors" for name in ("whole", "killed")]
    assert_same_tensors(*(load_tensors(name)[0] for name in names))


def test_periodic_saves_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(Toy(), plan_in(tmp_path / "whole"))
    monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
    assert_same_bits(train(Toy(), plan_in(tmp_path / "saved")), whole)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "text"])
def test_damaged_checkpoint_is_named(tmp_path: Path, damage: str) -> None:
    plan = plan_in(tmp_path)
    stop_after(plan, 3)
    whole = plan.checkpoint.read_bytes()
    flipped = whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:]
    contents = {"flip": flipped, "cut": whole[:-50], "empty": b"", "text": b"no " * 99}
    plan.checkpoint.write_bytes(contents[damage])
    with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors.*Delete it"):
        train(Toy(), plan)


def test_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    stop_after(plan, 3)
    for other in (replace(plan, seed=2), replace(plan, rate=0.1), replace(plan, steps=99)):
        with pytest.raises(CheckpointError, match="Use the settings"):
            train(Toy(), other)
    task = Toy()
    task.fingerprint = "another text"
    with pytest.raises(CheckpointError, match="another text"):
        train(task, plan)


def test_checkpoint_with_other_tensors_is_refused(tmp_path: Path) -> None:
    plan = plan_in(tmp_path, "rope")
    stop_after(plan, 3)

    class Changed(Toy):
        def build(self, encoding: str) -> nn.Module:
            return nn.Sequential(super().build(encoding), nn.Linear(1, 1))

    with pytest.raises(CheckpointError, match="another version"):
        train(Changed(), plan)


def test_full_disk_loses_nothing_that_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(Toy(), plan_in(tmp_path / "whole"))
    plan = plan_in(tmp_path / "full")
    stop_after(plan, 3)

    def no_space(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(OutputError, match=r"No space left.*Free some space"):
            stop_after(plan, 2)
    assert [path.name for path in plan.folder.iterdir()] == ["checkpoint.safetensors"]
    step, trained = continued(plan)
    assert step == 3
    assert_same_bits(trained, whole)


def test_interrupt_finishes_the_step_and_saves(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    before = signal.getsignal(signal.SIGINT)

    def press(step: int, loss: Tensor, speed: float) -> None:
        if step == 4:
            signal.raise_signal(signal.SIGINT)

    with interruptible() as stop, pytest.raises(Interrupted, match="after step 4"):
        train(Toy(), plan, Watch(stop=stop, stepped=press))
    assert signal.getsignal(signal.SIGINT) is before
    assert plan.checkpoint.exists()


def test_second_interrupt_is_not_held_back() -> None:
    with interruptible() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_other_threads_leave_signals_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    found = []

    def work() -> None:
        with interruptible() as stop:
            found.append((stop(), signal.getsignal(signal.SIGINT) is before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(False, True)]


def test_loss_that_is_no_number_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(Toy(bad_step=7), plan_in(tmp_path / "late")).diverged == 7
    monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
    task = Toy(bad_step=2)
    assert train(task, plan_in(tmp_path / "early")).diverged == 2
    assert len(task.seen) < STEPS
    last = replace(plan_in(tmp_path / "last"), rate=float("inf"), steps=1)
    assert train(Toy(), last).diverged == 0, "its weights are not finite"


def test_rate_rises_then_falls() -> None:
    rates = [0.01 * warmup_cosine(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.002)
    assert max(rates) == rates[4] == rates[5] == pytest.approx(0.01)
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0.0005, rel=0.1)
    assert warmup_cosine(0, 1) == 1.0


def test_fit_follows_its_schedule_and_leaves_the_generator_alone() -> None:
    """A model of one's own, without a checkpoint."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = Toy().build("nope")
    torch.set_rng_state(before)
    frozen = {name: x.clone() for name, x in model.named_parameters()}
    plan = TrainingPlan(encoding="", seed=0, steps=3, rate=1.0, weight_decay=0.0)
    assert fit(model, Toy(), replace(plan, schedule=lambda *_: 0.0)).model is model
    assert_same_tensors(dict(model.named_parameters()), frozen)
    assert torch.equal(torch.get_rng_state(), before)


def test_random_numbers_are_those_of_the_plans_seed() -> None:
    """Dropout draws the same wherever the caller's generator is, and others for another seed."""
    losses = []
    for seed, elsewhere in ((1, 7), (1, 8), (2, 7)):
        torch.manual_seed(5)
        model, task = Toy().build("nope"), Toy()
        torch.manual_seed(elsewhere)
        batch = task.batch(1, 0)
        task.batch = lambda *_, batch=batch: batch
        plan = TrainingPlan(encoding="", seed=seed, steps=3, rate=0.01)
        losses.append(fit(model, task, plan).losses)
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])


def test_weights_decay_as_the_plan_says() -> None:
    """Of AdamW: by rate times decay at every step."""
    norms = []
    for decay in (0.0, 5.0):
        torch.manual_seed(5)
        model = Toy().build("nope")
        plan = TrainingPlan(encoding="", seed=0, steps=3, rate=0.01, weight_decay=decay)
        fit(model, Toy(), plan)
        norms.append(sum(x.norm().item() for x in model.parameters()))
    assert norms[1] < 0.97 * norms[0]
