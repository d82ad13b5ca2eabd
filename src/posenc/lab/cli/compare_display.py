"""Progress of ``posenc compare``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import BarColumn, TaskID

from posenc.lab.cli.console import Countdown, Display, PlainTextColumn

if TYPE_CHECKING:
    from posenc.lab.experiments.progress import Event, RunEvent, RunFinished


TRAINING = 0.8
"""Assumed share of training in a run's time; the rest is measuring."""


FIRST_LINE = 10.0
"""Seconds after which the time left is printed for the first time without a terminal."""


class CompareDisplay(Display):
    """Prints the events of a comparison: bars on a terminal, else lines.

    Without a terminal there is a line for each finished run, and one on the time that is left after
    10 seconds, after four times as many, and so on.
    """

    def __init__(self, *, shown: bool) -> None:
        super().__init__(
            PlainTextColumn("{task.description}"),
            BarColumn(bar_width=24),
            PlainTextColumn("{task.percentage:>3.0f}%"),
            PlainTextColumn("{task.fields[note]}", style="dim"),
            shown=shown,
        )
        self.resume: str | None = None
        self.tasks: dict[tuple[str, int], TaskID] = {}
        self.shares: dict[tuple[str, int], float] = {}
        self.finished = self.runs = 0
        self.countdown = Countdown()
        self.next_line = FIRST_LINE
        self.total: TaskID | None = None

    def __call__(self, event: Event) -> None:
        from posenc.lab.experiments import progress

        match event:
            case progress.RunsPrepared():
                self.emit(f"{event.title}: {event.data}")
                again = f", {event.finished} finished before" if event.finished else ""
                runs = f"{len(event.runs)} runs{again}, {event.workers} at a time, into {event.out}"
                self.emit(runs, "dim")
                total = len(event.runs)
                self.total = self.bars.add_task("all runs", total=total, note="")
                self.finished, self.runs = event.finished, total
                self.countdown.restart(event.finished)
                self._advance()
            case progress.Paced():
                fit = f"{event.steps} steps per run fit the budget"
                self.emit(f"{fit}, about {event.seconds / 60:.1f} minutes.")
            case progress.RunStarted():
                key = (event.encoding, event.seed)
                name = f"{event.encoding}, seed {event.seed}"
                before = TRAINING * event.step / event.steps
                self.shares[key] = before
                self.countdown.start += before
                self.countdown.done += before
                self.tasks[key] = self.bars.add_task(name, total=1.0, note="starting")
            case progress.Stepped():
                note = f"loss {event.loss:.3f}  {event.tokens_per_second / 1000:.0f} k tokens/s"
                self._move(event, TRAINING * event.step / event.steps, note)
            case progress.Measuring():
                share = TRAINING + (1 - TRAINING) * event.done / event.total
                self._move(event, share, f"measuring {event.subject}")
            case progress.RunFinished():
                self._finish(event)
            case progress.Stopping():
                self.resume = event.resume
                why = "The budget is over" if event.over_budget else "Stopping"
                self.emit(f"{why}: each worker finishes its step and saves.", "yellow")
            case progress.Finished():
                self.resume = event.resume or self.resume
                self.emit(f"{event.finished} of {event.runs} runs in {event.seconds:.0f} s", "dim")

    def _move(self, event: RunEvent, share: float, note: str) -> None:
        key = (event.encoding, event.seed)
        if key in self.tasks:
            self.bars.update(self.tasks[key], completed=share, note=note)
            self.shares[key] = share
            left = self._advance()
            if left and not self.live and self.countdown.elapsed() >= self.next_line:
                self.emit(f"{left[0].upper()}{left[1:]}", "dim")
                self.next_line = 4 * self.countdown.elapsed()

    def _advance(self) -> str:
        """Update the bar of all runs; returns the time left."""
        done = self.finished + sum(self.shares.values())
        left = self.countdown.left(done, self.runs)
        if self.total is not None:
            self.bars.update(self.total, completed=done, note=left)
        return left

    def _finish(self, event: RunFinished) -> None:
        key = (event.encoding, event.seed)
        if key in self.tasks:
            self.bars.remove_task(self.tasks.pop(key))
        self.shares.pop(key, None)
        self.finished = event.finished
        left = self._advance()
        done = f"[{event.finished:>{len(str(event.runs))}}/{event.runs}]"
        ending = f", {left}" if left else ""
        self.emit(f"{done} {event.encoding}, seed {event.seed}: {event.seconds:.1f} s{ending}")
