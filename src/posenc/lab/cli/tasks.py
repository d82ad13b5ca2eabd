"""``posenc tasks``: all tasks of ``posenc compare``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from posenc.lab.cli.console import OUT, new_table, print_json
from posenc.lab.cli.options import Json

if TYPE_CHECKING:
    from posenc.lab.experiments.tasks import TaskEntry


def list_tasks(json: Json = False) -> None:
    """List all tasks with their data, metric, expected result and default size.

    Examples:

        posenc tasks

        posenc compare --task copy --encodings rope,t5
    """
    from posenc.lab.experiments.tasks import TASKS

    listed = [_describe(name, entry) for name, entry in TASKS.items()]
    if json:
        print_json(listed)
        return
    for task in listed:
        OUT.print(Text.assemble((task["name"], "bold cyan"), "  ", task["summary"]))
        facts = new_table(header=False)
        facts.add_column(style="dim", no_wrap=True)
        facts.add_column(overflow="fold")
        for label in ("data", "metric", "expected"):
            facts.add_row(f"  {label}", Text(task[label]))
        defaults = task["defaults"]
        facts.add_row("  encodings", ", ".join(defaults["encodings"] + defaults["references"]))
        tested = ", ".join(map(str, defaults["test_lengths"]))
        facts.add_row(
            "  size",
            f"{defaults['steps']} steps of {defaults['batch']} at {defaults['train_length']} "
            f"{task['length_unit']}, tested at {tested}; width {defaults['width']}, "
            f"{defaults['layers']} layers, {defaults['heads']} heads",
        )
        for option, value in task["options"].items():
            facts.add_row("  option", f"{option} = {value!r}")
        OUT.print(facts)
        OUT.print()
    OUT.print(f"{len(listed)} tasks. Run posenc compare --task NAME.", style="dim")


def _describe(name: str, entry: TaskEntry) -> dict[str, Any]:
    """A task entry as JSON values."""
    defaults = entry.defaults
    return {
        "name": name,
        "summary": entry.summary,
        "data": entry.data,
        "metric": entry.metric,
        "expected": entry.expectation,
        "length_unit": entry.length_unit,
        "options": dict(entry.options),
        "defaults": vars(defaults)
        | {
            "encodings": list(defaults.encodings),
            "references": list(defaults.references),
            "test_lengths": list(defaults.test_lengths(defaults.train_length)),
        },
    }
