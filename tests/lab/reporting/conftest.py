"""Reports of every kind as files, and open in a browser."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

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
from tests.lab.reporting.opened import DRAWN
from tests.support.samples import sample, stretched_sample
from tests.transformers.engines.released import RELEASED

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.support.browsing import Visit


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(sample(), tmp_path_factory.mktemp("browser") / "report")


@pytest.fixture(scope="module")
def undecided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample, but seeds disagree on what all find, whose intervals are as wide as can be."""
    base = sample()
    shares = cycle([1.0, 0.9, 0.8, 0.2, 0.9, 1.0, 0.7, 1.0, 1.0, 0.8, 0.9, 0.5])
    wild = tuple(
        replace(m, value=next(shares)) if m.metric == "recall" else m for m in base.measurements
    )
    comparison = replace(base, measurements=wild)
    return write_report(comparison, tmp_path_factory.mktemp("browser") / "undecided")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(stretched_sample(), tmp_path_factory.mktemp("browser") / "study")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study with 24 methods, some of which have long names."""
    study = stretched_sample()
    like = next(found for found in study.findings if found.role == "method")
    more = tuple(replace(like, key=f"method_{n}:base={n}00000") for n in range(15))
    study = replace(study, findings=(*study.findings, *more))
    return write_study(study, tmp_path_factory.mktemp("browser") / "many")


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study with 21 methods, most of which have long names."""
    study = stretched_sample()
    like = next(found for found in study.findings if found.role == "method")
    count = sum(found.role == "method" for found in study.findings)
    keys = (f"self_extend_{n}:group=8,window=512" for n in range(21 - count))
    more = tuple(replace(like, key=key) for key in keys)
    study = replace(study, findings=(*study.findings, *more))
    return write_study(study, tmp_path_factory.mktemp("browser") / "crowded")


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


@pytest.fixture(scope="module")
def shown(browser: Browser, comparison: Path) -> Visit:
    """The tab of ``view``."""
    from tests.support.browsing import Visit

    return Visit(browser, comparison, DRAWN)


@pytest.fixture(scope="module")
def view(request: pytest.FixtureRequest, shown: Visit) -> Visit:
    """A report, by its name and the width of the window, for tests that leave it as it is."""
    name, width = request.param
    shown.open(request.getfixturevalue(name), DRAWN, width=width)
    return shown


@pytest.fixture(scope="module")
def tab(browser: Browser, comparison: Path) -> Visit:
    """A tab in which a test opens a report anew, to change it."""
    from tests.support.browsing import Visit

    return Visit(browser, comparison, DRAWN)
