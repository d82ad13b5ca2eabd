"""Reports of every kind as files."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

from posenc.lab.bench import METHODS
from posenc.lab.bench.report import write_bench
from posenc.lab.doctor.report import write_diagnosis
from posenc.lab.doctor.words import Engines
from posenc.lab.evaluation.report import write_study
from posenc.lab.experiments.report import write_report
from posenc.transformers.doctor.costs import LayerCost
from posenc.transformers.doctor.diagnosis import diagnose
from tests.lab.bench.test_report import report as benched_sample
from tests.support.samples import altered, sample, stretched_sample
from tests.transformers.engines.released import RELEASED


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(sample(), tmp_path_factory.mktemp("browser") / "report")


@pytest.fixture(scope="module")
def undecided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample, but seeds disagree on what all find, whose intervals are as wide as can be."""
    shares = cycle([1.0, 0.9, 0.8, 0.2, 0.9, 1.0, 0.7, 1.0, 1.0, 0.8, 0.9, 0.5])
    wild = altered(sample(), lambda m: next(shares), metric="recall")
    return write_report(wild, tmp_path_factory.mktemp("browser") / "undecided")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(stretched_sample(), tmp_path_factory.mktemp("browser") / "study")


def written_study(folder: Path, name: str, count: int) -> Path:
    """The report of the study with further methods, up to so many; ``{n}`` numbers their names."""
    study = stretched_sample()
    methods = [found for found in study.findings if found.role == "method"]
    numbers = range(count - len(methods))
    more = tuple(replace(methods[0], key=name.format(n=n)) for n in numbers)
    return write_study(replace(study, findings=(*study.findings, *more)), folder / "study")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study with 24 methods, some of which have long names."""
    return written_study(tmp_path_factory.mktemp("many"), "method_{n}:base={n}00000", 24)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study with 21 methods, most of which have long names."""
    name = "self_extend_{n}:group=8,window=512"
    return written_study(tmp_path_factory.mktemp("crowded"), name, 21)


@pytest.fixture(scope="module")
def benched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All encodings that are timed by default, some of whose times are not known."""
    folder = tmp_path_factory.mktemp("browser")
    times = {name: (1.0 + 0.15 * n, 1.0 if n == 3 else 0.02) for n, name in enumerate(METHODS)}
    write_bench(benched_sample(**times), folder, command="posenc bench --quick")
    return folder / "index.html"


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that engines rotate differently, with costs."""
    model, folder = (tmp_path_factory.mktemp(name) for name in ("qwen", "browser"))
    fields = RELEASED["Qwen3-8B, YaRN of its card"]
    scaling = fields["rope_scaling"] | {"attention_factor": 1.0}
    (model / "config.json").write_text(json.dumps(fields | {"rope_scaling": scaling}))
    costs = tuple(
        LayerCost(n, 1e-9 * n * n, 4e3 * n, 5e-10 * n * n, 1e3 * n, measured=n < 9000)
        for n in (128, 2048, 32768)
    )
    found = replace(diagnose(model, budget=0, run_seconds=0), costs=costs)
    engines = Engines.of(model, "all")
    write_diagnosis(found, model, folder, engines=engines, command="posenc doctor qwen")
    return folder / "index.html"


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two kinds of layers, in engines that rotate alike."""
    model, folder = (tmp_path_factory.mktemp(name) for name in ("gemma", "browser"))
    fields = RELEASED["Gemma-3-1B"] | {"num_hidden_layers": 12, "sliding_window": 512}
    (model / "config.json").write_text(json.dumps(fields))
    found = diagnose(model, budget=0, run_seconds=0)
    write_diagnosis(found, model, folder, engines=Engines.of(model, "all"))
    return folder / "index.html"
