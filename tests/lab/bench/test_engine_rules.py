"""Verdicts on engines, with transformers in place of an engine that follows its rules, or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("transformers")

from benchmarks.engine_rules import verdicts
from benchmarks.engine_rules.checkpoints import METHODS, Checkpoint, written
from benchmarks.engine_rules.verdicts import Result, Verdict, rows, verdict

from posenc.transformers.checkpoints import TRAINED
from posenc.transformers.engines import ENGINES, EngineRotation, ModelConfig
from posenc.transformers.engines.config import Engine, NotServedError, UnreadError
from posenc.transformers.engines.rotation import RopeParameters

VLLM = ENGINES["vLLM"]


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """A Llama extended by every method, by name."""
    made = written("llama", METHODS, tmp_path_factory.mktemp("checkpoints"))
    return {one.name: one for one in made}


def computed(checkpoint: Checkpoint, engine: Engine) -> Result:
    """The result of an engine that rotates by these rules."""
    config = ModelConfig.of(checkpoint.fields)
    try:
        rotations = {n: engine.rotations(config, n) for n in checkpoint.tokens()}
    except NotServedError as error:
        return Result({}, str(error))
    logits = checkpoint.log_probabilities(rotations)
    assert logits is not None
    return Result({str(n): found.numpy() for n, found in logits.items()})


def judged(checkpoint: Checkpoint, result: Result, engine: str = "vLLM") -> Verdict:
    right = checkpoint.log_probabilities()
    assert right is not None
    return verdict(checkpoint, result, engine, right)


def test_every_method_is_written_twice_and_the_original_once(llamas: dict[str, Checkpoint]) -> None:
    assert len(llamas) == 2 * len(METHODS) - 1
    plain = llamas["llama/yarn/plain"].fields
    assert "rope_theta" not in plain
    assert "rope_scaling" not in plain
    assert plain["rope_parameters"]["rope_type"] == "yarn"
    assert llamas["llama/yarn/extended"].fields["rope_scaling"]["factor"] == 4


@pytest.mark.parametrize(
    ("method", "symbol"),
    [("original", "="), ("yarn", "="), ("llama3", "="), ("longrope", "l"), ("dynamic_ntk", "u")],
)
def test_an_engine_that_follows_its_rules(
    llamas: dict[str, Checkpoint], method: str, symbol: str
) -> None:
    one = llamas[f"llama/{method}/plain"]
    assert judged(one, computed(one, VLLM)) == Verdict(symbol)


def rule(change: Callable[[EngineRotation], EngineRotation], kind: str) -> Engine:
    """vLLM with another rotation of a scaling."""
    own = VLLM.kinds[kind]

    def changed(rope: RopeParameters, length: int) -> EngineRotation:
        return change(own(rope, length))

    return replace(VLLM, kinds={**VLLM.kinds, kind: changed})


def stretched(rotation: EngineRotation, by: float) -> EngineRotation:
    return replace(rotation, frequencies=tuple(by * theta for theta in rotation.frequencies))


def without_scaling(kind: str) -> Engine:
    """vLLM with a scaling that it does not read."""
    kinds = VLLM.kinds | {kind: lambda rope, length: rope.plain()}
    return replace(VLLM, kinds=kinds)


def refusing(kind: str) -> Engine:
    """vLLM without a scaling."""
    return replace(VLLM, kinds={k: v for k, v in VLLM.kinds.items() if k != kind})


def of_length(length: int) -> Engine:
    """vLLM with another trained length."""

    def ropes(config: ModelConfig) -> dict[str, RopeParameters]:
        return {k: replace(v, trained=length) for k, v in VLLM.ropes(config).items()}

    return replace(VLLM, ropes=ropes)


BROKEN: dict[str, tuple[str, Engine]] = {
    "a scaling ignored": ("yarn", without_scaling("yarn")),
    "a factor ignored": ("interpolate", without_scaling("linear")),
    "a ramp ignored": ("llama3", without_scaling("llama3")),
    "a base of one part in a hundred": ("ntk", rule(lambda r: stretched(r, 1.01), "default")),
    "a gain of one part in fifty": ("yarn", rule(lambda r: replace(r, gain=1.02 * r.gain), "yarn")),
    "a gain lost": ("yarn@temperature=1.4", rule(lambda r: replace(r, gain=1.0), "yarn")),
    "a trained length": ("yarn", of_length(96)),
    "the other side of longrope": (
        "longrope",
        replace(VLLM, kinds={**VLLM.kinds, "longrope": lambda r, n: r.longrope("short", 1.0)}),
    ),
    "dynamic by the length": (
        "dynamic_ntk",
        replace(VLLM, kinds={**VLLM.kinds, "dynamic": RopeParameters.dynamic}),
    ),
    "a refusal of what runs": ("llama3", refusing("llama3")),
    "a ramp in whole pairs": (
        "yarn@truncate=False",
        replace(VLLM, kinds={**VLLM.kinds, "yarn": lambda r, n: r.yarn(1.1386, truncate=True)}),
    ),
}
"""Methods, and rules for them that are not those of the engine."""


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_found(
    monkeypatch: pytest.MonkeyPatch, llamas: dict[str, Checkpoint], name: str
) -> None:
    method, broken = BROKEN[name]
    one = llamas[f"llama/{method}/extended"]
    result = computed(one, VLLM)
    assert judged(one, result).symbol != "!"
    monkeypatch.setattr(verdicts, "ENGINES", {**ENGINES, "vLLM": broken})
    assert judged(one, result).symbol == "!"


def test_an_engine_that_runs_what_it_was_to_refuse(
    monkeypatch: pytest.MonkeyPatch, llamas: dict[str, Checkpoint]
) -> None:
    one = llamas["llama/yarn/plain"]
    broken = {**ENGINES, "vLLM": refusing("yarn")}
    result = computed(one, VLLM)
    monkeypatch.setattr(verdicts, "ENGINES", broken)
    assert judged(one, result).symbol == "!"
    assert judged(one, Result({}, "ValueError: unknown")) == Verdict("r")


def test_a_refusal_that_no_rule_predicts(llamas: dict[str, Checkpoint]) -> None:
    found = judged(llamas["llama/yarn/plain"], Result({}, "KeyError: rope_theta"))
    assert found.symbol == "!"
    assert "rope_theta" in found.message


def test_numbers_that_are_not_finite(llamas: dict[str, Checkpoint]) -> None:
    one = llamas["llama/yarn/plain"]
    result = computed(one, VLLM)
    arrays = {**result.arrays, "500": np.full_like(result.arrays["500"], math.nan)}
    assert judged(one, Result(arrays)).symbol == "!"


def test_an_engine_without_a_rule(
    monkeypatch: pytest.MonkeyPatch, llamas: dict[str, Checkpoint]
) -> None:
    def ropes(config: ModelConfig) -> dict[str, RopeParameters]:
        raise UnreadError("it counts otherwise")

    monkeypatch.setattr(verdicts, "ENGINES", {**ENGINES, "vLLM": replace(VLLM, ropes=ropes)})
    one = llamas["llama/yarn/plain"]
    assert judged(one, Result({}, "anything")) == Verdict("u")


@pytest.mark.parametrize("wrong", ["", "sin", "pairs"])
def test_rotations_alone(llamas: dict[str, Checkpoint], wrong: str) -> None:
    one = llamas["llama/yarn/extended"]
    assert one.fields["rope_parameters"][TRAINED] == 128
    arrays = {}
    for n in one.tokens():
        [rotation] = VLLM.rotations(ModelConfig.of(one.fields), n).values()
        angles = np.outer(np.arange(n), rotation.frequencies)
        for name, function in (("cos", np.cos), ("sin", np.sin)):
            table = rotation.gain * function(angles)
            arrays[f"{n}/{name}"] = 1.01 * table if name == wrong else table
            if wrong == "pairs":
                arrays[f"{n}/{name}"] = table[:, :-1]
    assert judged(one, Result(arrays)).symbol == ("!" if wrong else "=")


def test_rows_keep_the_order_of_methods() -> None:
    found = {
        "llama/yarn/plain": Verdict("="),
        "llama/ntk/plain": Verdict("s"),
        "llama/yarn/extended": Verdict("r"),
    }
    assert rows(found, ("ntk", "original", "yarn")) == {
        "llama": {"plain": "s =", "extended": "  r"}
    }
