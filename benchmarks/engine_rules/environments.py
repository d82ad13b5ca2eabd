"""Environments of engines, and their runners in them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine_rules.checkpoints import Checkpoint

HERE = Path(__file__).parent
ATTEMPTS = 40
"""Processes of an engine that may end before their jobs do."""

SETTINGS = (
    "PIP_CONSTRAINT",
    "PIP_FIND_LINKS",
    "PIP_EXTRA_INDEX_URL",
    "UV_CONSTRAINT",
    "PYTHONPATH",
)
"""Variables of the machine that environments and runners do not see."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment with one engine.

    Args:
        name: of its runner and folder.
        engine: its name in posenc's rules.
        packages: pinned requirements.
        families: that it has.
        index: a further package index, of builds for processors alone; "": none.
        excluded: requirements of the engine that running it does not need.
        overrides: versions in place of those that the engine asks for.
        sources: pinned packages whose source distributions are unpacked, not built, in ``sources``.
        folder: of the environment.
    """

    name: str
    engine: str
    packages: tuple[str, ...]
    families: tuple[str, ...]
    index: str = ""
    excluded: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    folder: Path = Path()

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    def install(self) -> None:
        """Make it, unless it has these packages already."""
        stamp = self.folder / "installed.json"
        wanted = json.dumps(
            [self.packages, self.index, self.excluded, self.overrides, self.sources]
        )
        if stamp.exists() and stamp.read_text() == wanted:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.folder], check=True)
        command = [sys.executable, "-m", "uv", "pip", "install", "--no-config", "--quiet"]
        command += ["--python", str(self.python)]
        if self.index:
            command += ["--extra-index-url", self.index, "--index-strategy", "unsafe-best-match"]
        for option, lines in (("--excludes", self.excluded), ("--overrides", self.overrides)):
            file = self.folder / f"{option.strip('-')}.txt"
            file.write_text("\n".join(lines))
            command += [option, str(file)]
        subprocess.run([*command, *self.packages], check=True, env=_without_settings())
        for source in self.sources:
            self._unpack(source)
        stamp.write_text(wanted)

    def _unpack(self, source: str) -> None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        with tempfile.TemporaryDirectory() as work:
            command += ["--no-binary", ":all:", "--dest", work, source]
            subprocess.run(command, check=True, env=_without_settings())
            [archive] = Path(work).iterdir()
            with tarfile.open(archive) as file:
                file.extractall(self.folder / "sources", filter="data")

    def release(self) -> str:
        """The engine's version."""
        command = [self.python, HERE / f"runners/{self.name}.py", "--release"]
        ran = subprocess.run(command, check=True, env=_offline(), stdout=subprocess.PIPE, text=True)
        return ran.stdout.split()[-1]

    def run(self, checkpoints: Sequence[Checkpoint], out: Path) -> None:
        """Run checkpoints, in as many processes as it takes; results as ``runners/loop.py`` says.

        Raises:
            RuntimeError: if processes end without a result.
        """
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        jobs = [{"name": one.name, "folder": str(one.folder.resolve())} for one in checkpoints]
        listed = out / "jobs.jsonl"
        listed.write_text("".join(json.dumps(job) + "\n" for job in jobs))
        command = [self.python, HERE / f"runners/{self.name}.py", listed, out]
        with (out / "log.txt").open("w") as log:
            for _ in range(ATTEMPTS):
                ended = subprocess.run(command, env=_offline(), stdout=log, stderr=log)
                if not ended.returncode:
                    return
        raise RuntimeError(f"{self.engine} ended {ATTEMPTS} times: see {out / 'log.txt'}")


def environments(work: Path) -> dict[str, Environment]:
    """Every environment by name, in folders of ``work``."""
    tables = tomllib.loads((HERE / "environments.toml").read_text())
    return {
        name: Environment(
            name=name,
            engine=table["engine"],
            packages=tuple(table["packages"]),
            families=tuple(table["families"]),
            index=table.get("index", ""),
            excluded=tuple(table.get("excluded", ())),
            overrides=tuple(table.get("overrides", ())),
            sources=tuple(table.get("sources", ())),
            folder=work / name,
        )
        for name, table in tables.items()
    }


def _without_settings() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    return kept | {"PIP_CONFIG_FILE": os.devnull}


def _offline() -> dict[str, str]:
    """Nothing is fetched while engines run."""
    return _without_settings() | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
