"""``posenc engines``: the engines whose rules are known, and test vectors for others."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from posenc.errors import ArgumentError, OutputError
from posenc.lab.cli.console import OUT, new_table, print_json
from posenc.lab.cli.options import Json

if TYPE_CHECKING:
    from posenc.transformers.engines.config import Engine


def engines(
    *,
    vectors: Annotated[
        Path | None, Parameter(help="Write test vectors to this file (.json).", show_default="none")
    ] = None,
    json: Json = False,
) -> None:
    """List the engines whose rules of RoPE are known, or write test vectors for other engines.

    The vectors are cosines, sines and gains at given positions, of every scaling and of released
    models, for engines written by hand: the same file on every machine.

    Examples:

        posenc engines

        posenc engines --vectors rotations.json
    """
    from posenc.transformers.engines import ENGINES, write_vectors

    if vectors is not None:
        if vectors.suffix != ".json":
            raise ArgumentError(
                "--vectors",
                expected="a file ending in .json",
                got=vectors.name,
                remedy="Write rotations.json, for example.",
            )
        try:
            cases = write_vectors(vectors)
        except OutputError as error:
            error.argument = "vectors"
            raise
        if json:
            print_json({"vectors": str(vectors), "cases": cases})
        else:
            OUT.print(f"Vectors: {vectors} ({cases} cases)", soft_wrap=True)
        return
    if json:
        print_json([_described(engine) for engine in ENGINES.values()])
        return
    from posenc.transformers.engines.runs import run_of

    table = new_table("engine", "option", "rules from", "run with")
    for column in table.columns:
        column.justify = "left"
    for engine in ENGINES.values():
        run = run_of(engine)
        ran = "—" if run is None else f"{run.release}, {run.date}"
        table.add_row(engine.name, engine.option, f"{engine.release}, {engine.read}", ran)
    OUT.print(table)


def _described(engine: Engine) -> dict[str, Any]:
    from posenc.transformers.engines.runs import run_of

    run, names = run_of(engine), ("name", "option", "source", "read")
    ran = {"run": None if run is None else asdict(run)}
    return {name: getattr(engine, name) for name in names} | ran
