"""Another package adds one of each, as CONTRIBUTING.md shows it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from posenc import register
from posenc.encoding.entry import Entry
from posenc.errors import ArgumentError, UnknownNameError
from posenc.lab.experiments import tasks
from posenc.models import MODELS, SavedModel
from posenc.registration import Registry
from posenc.registry import ENCODINGS
from posenc.transformers.acceleration import families

ROOT = Path(__file__).parent.parent
ENTRIES = ("AcceleratedFamily", "TaskEntry")
"""What functions return that make an entry of a file of several."""
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
MODULES = re.findall(r"<!-- (outside/\w+\.py) -->\n```python\n(.*?)```", TEXT, re.DOTALL)
POINTS = """
[posenc.encodings]
distance = outside.distance:ENTRY
[posenc.extensions]
flatten = outside.flatten:ENTRY
[posenc.tasks]
swap_ends = outside.swap_ends:ENTRY
[posenc.backends]
undropped = outside.undropped:ENTRY
[posenc.models]
mean_of_words = outside.mean_of_words:MeanOfWords
[posenc.accelerated_families]
plain_attention = outside.plain_attention:ENTRY
"""

USES = {
    "encoding": """
encoding = posenc.create("distance+rope", heads=2, head_dim=8, slope=0.25)
assert posenc.create_layers("distance", layers=2, heads=6)[0].score.slope == 0.5
for law in ("cached_is_full", "causal_is_causal", "backends_agree"):
    LAWS[law](Subject.of_entry("distance", posenc.ENCODINGS["distance"]))
with pytest.raises(UnknownNameError, match="Did you mean 'distance'"):
    posenc.create("distanse")
assert "distance" in run("list") and "slope" in run("show", "distance")
""",
    "extension": """
encoding = posenc.create("distance", heads=2)
assert posenc.extension.extend(encoding, "flatten", factor=4).score.slope == 0.125
assert posenc.extension.flatten is posenc.extension.EXTENSIONS["flatten"].function
assert "flatten" in posenc.extension.applicable(encoding)
""",
    "task": """
from posenc.lab.experiments.settings import ComparisonSettings
assert "swap_ends" in run("tasks")
settings = ComparisonSettings(out=Path("out"), task="swap_ends", encodings=("distance",), width=16)
task = settings.entry.make(settings)
assert task.loss(task.build("distance"), task.batch(0, 0)).isfinite()
""",
    "backend": """
x = torch.randn(1, 2, 5, 8)
call = (x, x, x, posenc.Grid.of(posenc.Layout.sequence(5)), posenc.create("alibi", heads=2))
assert torch.equal(*(posenc.attend(*call, backend=name) for name in ("undropped", "reference")))
assert posenc.explain(*call, backend="undropped").how == "from each part's definition"
with pytest.raises(BackendRefusal, match="it has no dropout"):
    posenc.attend(*call, backend="undropped", dropout=0.5)
""",
    "model": """
from posenc.errors import CheckpointError
from posenc.models import MODELS, load
model = MODELS["mean_of_words"](MODELS["mean_of_words"].made_from(vocabulary=5, classes=2)).eval()
model.save("words")
words = torch.tensor([[1, 4, 2]])
assert torch.equal(load("words")(words), model(words))
assert list(MODELS) == sorted(MODELS) and {"decoder", "masked_lm", "swin"} <= set(MODELS)
config = Path("words/config.json")
config.write_text(config.read_text().replace("mean_of_words", "sum_of_words"))
with pytest.raises(CheckpointError, match="kind among .*decoder.*, got 'sum_of"):
    load("words")
""",
    "accelerated family": """
from outside.plain_attention import PlainAttention
from posenc.transformers.acceleration import accelerate, restore
plain = torch.nn.ModuleList([PlainAttention()])
expected = plain[0](x, x, x)
assert accelerate(plain, check=False).accelerated == 1
torch.testing.assert_close(plain[0](x, x, x), expected)
restore(plain)
assert type(plain[0]) is PlainAttention
""",
    "by hand": """
from outside.distance import ENTRY
from outside.swap_ends import ENTRY as TASK
posenc.register("my_distance", ENTRY)
posenc.register("my_distance", ENTRY)
posenc.register("my_task", TASK)
assert posenc.create("my_distance", heads=2).score.slope == 0.5
assert "my_distance" in run("list") and "my_task" in run("tasks")
assert list(posenc.ENCODINGS) == sorted(posenc.ENCODINGS)
""",
}
BEGIN = """
import sys
from pathlib import Path
import pytest, torch
import posenc
from posenc.errors import BackendRefusal, UnknownNameError
from posenc.testing import LAWS, Subject
from tests.support.commands import run_command

def run(*arguments):
    done = run_command(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout
"""


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an installed package with one of each."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "outside").mkdir()
    for name, code in MODULES:
        (folder / name).write_text(code)
    about = folder / "outside-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(POINTS)
    return folder


def test_files_it_names_are_there() -> None:
    named = set(re.findall(r"`([\w/]+\.(?:py|h|jinja|md|toml))`", TEXT))
    assert "registry.py" in named
    folders = (ROOT / name for name in ("src", "tests", "scripts", "benchmarks", "docs"))
    paths = [*ROOT.iterdir(), *(path for folder in folders for path in folder.rglob("*"))]
    files = [f"/{path.relative_to(ROOT).as_posix()}" for path in paths]
    assert not {name for name in named if not any(file.endswith(f"/{name}") for file in files)}


def test_every_entry_point_is_shown() -> None:
    assert sorted(name for name, _ in MODULES) == sorted(
        f"{module.replace('.', '/')}.py" for module in re.findall(r"= ([\w.]+):", POINTS)
    )


@pytest.mark.long
def test_what_another_package_adds_is_used(outside: Path, tmp_path: Path) -> None:
    """In a process of its own, in which it is installed."""
    command = [sys.executable, "-W", "error", "-c", "".join([BEGIN, *USES.values()])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(outside), *sys.path])}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_bad_registrations_are_refused() -> None:
    rope = ENCODINGS["rope"]
    with pytest.raises(ArgumentError, match="encoding alibi: expected a name that is not taken"):
        register("alibi", rope)
    with pytest.raises(ArgumentError, match="letters, digits and underscores"):
        register("a+b", rope)
    with pytest.raises(ArgumentError, match=r"entry: expected one of .*Entry.*, got int"):
        register("seven", 7)
    register("rope", rope)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ("rope = posenc.encodings.score.alibi:ENTRY", "a name that is not taken"),
        ("broken = nowhere.at_all:ENTRY", "an entry at nowhere.at_all:ENTRY.*Correct or uninstall"),
        ("odd = math:pi", "encoding odd: expected Entry, got float"),
    ],
)
def test_bad_entry_points_are_named(
    points: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd-1.0.dist-info").mkdir()
    (tmp_path / "odd-1.0.dist-info/METADATA").write_text("Name: odd\nVersion: 1.0\n")
    (tmp_path / "odd-1.0.dist-info/entry_points.txt").write_text(f"[some.group]\n{points}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("posenc.registration.REGISTRIES", [])
    entries: Registry[Entry] = Registry(
        Entry, "encoding", "posenc.encodings.query_key", group="some.group"
    )
    with pytest.raises(ArgumentError, match=message):
        dict(entries)


def test_a_class_of_models_may_be_defined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODELS, "_read", {})

    def define(name: str) -> type[SavedModel]:
        return type(name, (SavedModel,), {"kind": "odd"})

    first, again = define("Odd"), define("Odd")
    assert MODELS["odd"] is again is not first
    with pytest.raises(ArgumentError, match="model odd: expected a name that is not taken"):
        define("Other")


@pytest.mark.parametrize("package", [families, tasks], ids=lambda package: package.__name__)
def test_files_of_several_entries_are_listed_with_all_of_them(package: ModuleType) -> None:
    for file, names in package.SEVERAL.items():
        module = import_module(f"{package.__name__}.{file}")
        entries = {
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__ and name[0] != "_"
            if getattr(value, "__annotations__", {}).get("return") in ENTRIES
        }
        assert entries == set(names)


def test_unknown_names_are_refused() -> None:
    assert ENCODINGS.require("rope") is ENCODINGS["rope"]
    with pytest.raises(UnknownNameError, match="Did you mean 'rope'"):
        ENCODINGS.require("RoPe")
    with pytest.raises(KeyError):
        ENCODINGS["RoPE"]
