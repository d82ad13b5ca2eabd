"""A model stretched by several methods: what is measured, chosen, fine-tuned and reported."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posenc.errors import ArgumentError, CheckpointError, DataError, Interrupted, UnknownNameError
from posenc.extension import NotApplicable
from posenc.lab.evaluation.candidates import Method, methods_for
from posenc.lab.evaluation.checkpoint import Checkpoint, as_llama
from posenc.lab.evaluation.evaluate import evaluate
from posenc.lab.evaluation.extend import require_search, searched
from posenc.lab.evaluation.report import write_study
from posenc.lab.evaluation.results import StudyReading
from posenc.lab.evaluation.settings import EvaluationSettings, ExtensionSettings, Tuning
from posenc.lab.evaluation.study import ExtensionResult, finetuned, measure_extensions
from posenc.lab.evaluation.suites.next_token import POSITION, NextTokenSuite, lengths_to
from posenc.lab.evaluation.texts import Text, read_ids
from posenc.models import Decoder, DecoderConfig
from posenc.transformers.live import LiveDecoder, LiveModel

LENGTH = 16


def tiny(seed: int = 0) -> LiveModel:
    torch.manual_seed(seed)
    config = DecoderConfig(vocabulary=256, dim=16, layers=1, heads=2, max_length=LENGTH)
    return LiveDecoder(as_llama(Decoder(config)).requires_grad_(requires_grad=False))


@pytest.fixture(scope="module")
def model() -> LiveModel:
    return tiny()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    return read_ids(path, encode=None, training=True)


@pytest.fixture(scope="module")
def outcome(model: LiveModel, text: Text) -> ExtensionResult:
    names = ("yarn", "rerope+log_n", "segments", "string")
    return measure(model, text, *names, factor=3, tuning=Tuning(steps=2), always=True)


class Uniform(nn.Module):
    """Every byte as likely as another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(256))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight.expand(*tokens.shape, 256)


def test_lengths_double_from_the_trained_one_to_the_goal() -> None:
    assert lengths_to(64, 4) == (32, 64, 128, 256)
    assert lengths_to(64, 3) == (32, 64, 128, 192)
    assert lengths_to(64, 1) == (32, 64)


def test_every_byte_costs_eight_bits_where_all_are_alike(text: Text) -> None:
    suite = NextTokenSuite.of(text, (8, 16, 32), seed=0)
    reading = suite.measure(Uniform())
    assert all(math.isclose(value, 8, abs_tol=1e-5) for value in reading.loss.values())
    assert all(math.isclose(value, 8, abs_tol=1e-5) for _, value in reading.by_position)
    assert reading.found(32) == 0
    assert reading.copied[32] == 0


def test_the_loss_by_position_is_a_mean_over_the_text(model: LiveModel, text: Text) -> None:
    reading = NextTokenSuite.of(text, (8, 16, 32), seed=0).measure(model)
    of_windows = [list(values) for values in reading.pieces[POSITION].values()]
    assert max(map(max, of_windows)) > 1.1 * min(map(min, of_windows))
    means = [sum(values) / len(values) for values in of_windows]
    assert [value for _, value in reading.by_position] == pytest.approx(means, rel=1e-3)


def test_a_short_text_is_refused(text: Text) -> None:
    with pytest.raises(DataError, match="at least 4096 bytes"):
        NextTokenSuite.of(text, (8, 1024), seed=0)


def test_baselines_come_first_and_what_does_not_fit_says_so(outcome: ExtensionResult) -> None:
    keys = [each.key for each in outcome.study.findings]
    assert keys == ["direct", "window", "yarn", "rerope+log_n", "segments", "string"]
    string = outcome.study.of("string")
    assert string.refusal.endswith("with local=2, got 3"), "what is expected leaves out what came"
    assert string.untuned is None
    for each in outcome.study.findings[:5]:
        assert each.untuned is not None
        assert (each.tuned is None) == (each.key == "segments")
    advice = outcome.study.of("yarn").advice
    assert any("turn" in sentence for sentence in advice), "short lengths mislead YaRN"


def test_all_agree_below_the_trained_length_where_nothing_changed(outcome: ExtensionResult) -> None:
    readings = {each.key: each.untuned for each in outcome.study.findings if each.untuned}
    direct = readings["direct"]
    for key in ("window", "segments"):
        assert readings[key].loss[LENGTH] == pytest.approx(direct.loss[LENGTH], abs=1e-5)
    assert readings["yarn"].loss[48] != pytest.approx(direct.loss[48], abs=1e-5)


def test_the_chosen_can_be_written_and_is_fine_tuned(
    outcome: ExtensionResult, model: LiveModel
) -> None:
    assert outcome.study.chosen in {"yarn", "rerope+log_n"}
    served = {each.key: each.served for each in outcome.study.findings}
    assert {key: how for key, how in served.items() if how} == {"yarn": "yarn"}
    assert outcome.method.spec == outcome.study.chosen
    tuned, before = (m.model.get_input_embeddings().weight for m in (outcome.model, model))
    assert not torch.equal(tuned, before)


def measure(model: LiveModel, text: Text, *names: str, **options: Any) -> ExtensionResult:
    methods = [Method.parse(name) for name in names]
    given = {"factor": 2, "tuning": Tuning(steps=0)} | options
    return measure_extensions(Checkpoint("tiny", "llama", model, LENGTH), text, methods, **given)


def test_one_method_that_does_not_fit_is_an_error(model: LiveModel, text: Text) -> None:
    with pytest.raises(NotApplicable, match="hierarchical") as caught:
        measure(model, text, "hierarchical")
    assert "yarn" in caught.value.remedy
    with pytest.raises(ArgumentError, match="factor"):
        measure(model, text, "yarn", factor=0.5)


def test_all_is_every_method_that_fits(model: LiveModel) -> None:
    specs = [each.spec for each in methods_for("all", model, length=LENGTH)]
    assert {"yarn", "segments", "rerope", "yarn@alpha=0.5@beta=4"} <= set(specs)
    assert "direct" not in specs
    assert "hierarchical" not in specs
    long = [each.spec for each in methods_for("all", model, length=4096)]
    assert "yarn@alpha=0.5@beta=4" not in long


def test_names_that_do_not_exist() -> None:
    for spec in ("yarm", "yarn@gamma=1", "yarn@gamma", "yarn+no"):
        with pytest.raises(UnknownNameError):
            Method.parse(spec)
    with pytest.raises(ArgumentError, match="alpha: expected NAME=VALUE"):
        Method.parse("yarn@alpha")


def test_commas_in_brackets_part_no_methods(model: LiveModel) -> None:
    found = methods_for("yarn, longrope@long_factors=[1,2.5,3,4]", model, length=LENGTH)
    assert [each.name for each in found] == ["yarn", "longrope"]
    assert found[1].options == {"long_factors": (1, 2.5, 3, 4)}


@pytest.mark.parametrize("positions", ["plain", "randomized", "skipped"])
def test_fine_tuning_leaves_the_model_and_is_the_same_twice(
    model: LiveModel, text: Text, positions: str
) -> None:
    tuning = Tuning(steps=3, positions=positions)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    one, two = (finetuned(model, text, tuning, length=LENGTH, goal=48)[0] for _ in range(2))
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, two.state_dict()[name])
        assert torch.equal(model.state_dict()[name], before[name])
    changed = [n for n, t in one.state_dict().items() if not torch.equal(t, before[n])]
    assert changed
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_fine_tuning_learns(model: LiveModel, text: Text) -> None:
    losses: list[float] = []
    given = {"length": LENGTH, "goal": 32, "stepped": lambda step, loss: losses.append(loss)}
    finetuned(model, text, Tuning(steps=30), **given)
    assert losses[-1] < losses[0] - 0.5


def test_positions_of_fine_tuning_reach_the_goal(
    model: LiveModel, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    plain = LiveDecoder.forward

    def forward(self: LiveDecoder, tokens: Tensor, layout: object = None) -> Tensor:
        seen.append(float(layout.positions.max()))
        assert tokens.shape[1] == LENGTH
        return plain(self, tokens, layout)

    monkeypatch.setattr(LiveDecoder, "forward", forward)
    for positions in ("randomized", "skipped"):
        seen.clear()
        tuning = Tuning(steps=12, positions=positions)
        finetuned(model, text, tuning, length=LENGTH, goal=64)
        assert max(seen) > 2 * LENGTH
        assert max(seen) < 64


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        (Tuning, {"steps": -1}, "finetune_steps: .* 0 or more"),
        (Tuning, {"positions": "no"}, "positions"),
        (Tuning, {"rate": 0.0}, "finetune_rate"),
        (ExtensionSettings, {"search": -1}, "search: .* 0 or more"),
        (ExtensionSettings, {"factor": 0.5}, "factor: .* 1 or more"),
        (EvaluationSettings, {"lengths": (16, 7)}, "lengths: .* 8 or more"),
    ],
)
def test_settings_out_of_their_domain(kind: Any, fields: dict[str, object], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        kind(**fields)


def test_the_report_holds_every_number(outcome: ExtensionResult, tmp_path: Path) -> None:
    page = write_study(outcome.study, tmp_path / "report").read_text()
    for each, reading in outcome.study.ranked(tuned=True):
        assert f"<b>{each.key}</b>" in page
        assert f"{reading.loss[48]:.3f}" in page
    assert "does not go" in page
    assert "fine-tuning rate" in page
    plain = json.loads((tmp_path / "report/study.json").read_text())
    assert plain["length"] == LENGTH
    rows = list(csv.DictReader((tmp_path / "report/measurements.csv").read_text().splitlines()))
    found = {
        (row["method"], row["length"]): row
        for row in rows
        if (row["model"], row["metric"]) == ("tiny", "loss")
    }
    direct = found["direct", "48"]
    assert float(direct["value"]) == outcome.study.of("direct").untuned.loss[48]
    assert float(direct["low"]) < float(direct["value"]) < float(direct["high"])
    assert ("yarn, fine-tuned", "48") in found
    assert len([row for row in rows if row["metric"] == "needles_by_depth"]) == 9 * 4 * 5


def test_evaluate_measures_one_model(model: LiveModel, text: Text, tmp_path: Path) -> None:
    study = evaluate(Checkpoint("tiny", "llama", model, LENGTH), text, lengths=[32, 8])
    assert study.lengths == (8, 32)
    assert [each.key for each in study.findings] == ["direct", "window"]
    assert study.deciding.unit == "bits per byte"
    assert (write_study(study, tmp_path / "report")).exists()


def test_a_stopped_study_goes_on_without_measuring_again(
    model: LiveModel, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[nn.Module] = []
    plain = NextTokenSuite.measure

    def count(self: NextTokenSuite, model: nn.Module, *, limit: int | None = None) -> StudyReading:
        measured.append(model)
        return plain(self, model, limit=limit)

    monkeypatch.setattr(NextTokenSuite, "measure", count)

    def run(steps: int = 2, **options: Any) -> ExtensionResult:
        given = {"tuning": Tuning(steps=steps), "always": True} | options
        return measure(model, text, "yarn", "rerope", **given)

    state = tmp_path / "state.json"
    with pytest.raises(Interrupted, match="a stop after 3"):
        run(state=state, stop=lambda: len(measured) == 6)
    resumed = run(state=state)
    assert len(measured) == 8, "the last of four, before and after fine-tuning"
    whole = run()
    for one, other in zip(resumed.study.findings, whole.study.findings, strict=True):
        for tuned in (False, True):
            first, second = one.reading(tuned), other.reading(tuned)
            for name in ("loss", "needles", "by_position", "windows"):
                assert getattr(first, name) == getattr(second, name)
        assert one.claims == other.claims
    assert resumed.study.chosen == whole.study.chosen
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), "trained again alike"
    measured.clear()
    run(steps=1, state=state)
    assert len(measured) == 8, "other conditions are measured anew"


def test_a_damaged_state_is_named(model: LiveModel, text: Text, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    measure(model, text, "yarn", state=state)
    plain = json.loads(state.read_text())
    del plain["readings"]["direct"]["untuned"]["per_second"]
    state.write_text(json.dumps(plain))
    with pytest.raises(CheckpointError, match="the readings of a study"):
        measure(model, text, "yarn", state=state)


# LongRoPE's factors, searched on the text

LONGROPE = Method.parse("longrope")


def search(text: Text, state: Path, seed: int = 0, **changes: Any) -> list[Method]:
    chosen = {"methods": [LONGROPE], "factor": 2.0, "budget": 6} | changes
    return searched(Checkpoint("tiny", "llama", tiny(seed), LENGTH), text, state=state, **chosen)


def test_the_best_factors_are_used_and_told(text: Text, tmp_path: Path) -> None:
    state = tmp_path / "search.json"
    told: list[tuple[str, int, int]] = []
    plain = Method.parse("yarn")
    both = [plain, LONGROPE]
    yarn, found = search(text, state, methods=both, progress=lambda *each: told.append(each))
    assert yarn is plain
    assert found.spec == "longrope"
    factors = found.options["long_factors"]
    assert factors == sorted(factors)
    assert len(factors) == 4
    assert [done for _, done, _ in told] == [1, 2, 3, 4, 5, 6]
    assert told[-1][0].startswith("longrope: searching factors, step 6 of 6, least loss ")
    subject, none = Checkpoint("tiny", "llama", tiny(), LENGTH), Tuning(steps=0)
    outcome = measure_extensions(subject, text, [found], factor=2, tuning=none, always=True)
    advice = outcome.study.findings[-1].advice
    assert "best of 6" in advice[0]
    assert all(f"{each:g}" in advice[0] for each in factors)
    assert outcome.model.model.config.rope_parameters["long_factor"] == factors


def test_stopped_it_goes_on_from_where_it_was(text: Text, tmp_path: Path) -> None:
    state = tmp_path / "search.json"
    with pytest.raises(Interrupted, match="a stop after 1") as stopped:
        search(text, state, stop=lambda: True)
    assert "same command again" in stopped.value.remedy
    told: list[int] = []
    (resumed,) = search(text, state, progress=lambda stage, done, total: told.append(done))
    assert told == [2, 3, 4, 5, 6]
    assert resumed == search(text, tmp_path / "other.json")[0]


def test_another_models_search_is_refused(text: Text, tmp_path: Path) -> None:
    state = tmp_path / "search.json"
    search(text, state, budget=2)
    with pytest.raises(CheckpointError, match="same model and text"):
        search(text, state, seed=1)


def test_given_factors_are_left_alone(text: Text, tmp_path: Path) -> None:
    given, joined = map(Method.parse, ("longrope@long_factors=[1,1,2,2]", "longrope+log_n"))
    methods = [given, LONGROPE, joined]
    one, two, three = search(text, tmp_path / "search.json", methods=methods, budget=2)
    assert one is given
    assert two.options["long_factors"]
    assert three.options["long_factors"]
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["search-longrope+log_n.json", "search.json"]


def test_searches_that_cannot_be(text: Text, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="longrope among the methods"):
        require_search(5, [Method.parse("yarn")])
    require_search(0, [Method.parse("yarn")])
    require_search(5, [Method.parse("longrope+log_n")])
    state = tmp_path / "search.json"
    with pytest.raises(DataError, match="at least 64000 tokens"):
        search(text, state, factor=1000.0)
    assert not state.exists()
