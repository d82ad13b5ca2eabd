"""lm-evaluation-harness on stretched models: one of its tasks, on data made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from posenc.errors import ArgumentError, UnknownNameError
from posenc.lab.evaluation.extend import extend_checkpoint
from posenc.transformers import stretch
from posenc.transformers.acceleration.api import is_switched
from tests.support.tiny_models import tiny_model, word_tokenizer

harness = pytest.importorskip(
    "lm_eval", reason="the package lm_eval is not installed (pip install 'posenc[lm-eval]')"
)
pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = [f"w{n}" for n in range(60)]
TRAINED, TEXTS = 16, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 16 positions, whose answers depend on where words stand."""
    path = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 64, "max_position_embeddings": TRAINED, "initializer_range": 0.5}
    tiny_model("qwen3", **sizes).save_pretrained(path)
    words = word_tokenizer(["<eos>", "<unk>", *WORDS], "<unk>")
    special = {"eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Log-probabilities of the last of 49 words, of which the model is trained for 16."""
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    docs = [
        {"text": " ".join(WORDS[(7 * n + i * i) % 60] for i in range(48)), "target": f" {WORDS[n]}"}
        for n in range(TEXTS)
    ]
    path.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    files = {"data_files": {"test": str(path)}, "cache_dir": str(path.parent)}
    data = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
    asked = {"doc_to_text": "{{text}}", "doc_to_target": "{{target}}", "target_delimiter": ""}
    scored = {"output_type": "loglikelihood", "metric_list": [{"metric": "acc"}]}
    return {"task": "last_word", **data, **asked, **scored}


def measured(task: dict[str, Any], pretrained: Any, **options: Any) -> list[float]:
    """Log-probabilities by the harness, of its model ``posenc``."""
    import posenc.lab.lm_eval  # noqa: F401  registers it

    model = {"pretrained": str(pretrained), **options}
    how = {"device": "cpu", "batch_size": 2, "bootstrap_iters": 0}
    found = harness.simple_evaluate("posenc", model_args=model, tasks=[task], **how)
    samples = sorted(found["samples"]["last_word"], key=lambda sample: sample["doc_id"])
    return [float(sample["filtered_resps"][0][0]) for sample in samples]


def direct(task: dict[str, Any], folder: Path, method: str | None, **options: Any) -> list[float]:
    """The same by a loop over the texts, without the harness."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if method is not None:
        stretch(model, method, **options)
    found = []
    for line in Path(task["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines():
        doc = json.loads(line)
        ids = tokenizer(doc["text"] + doc["target"], return_tensors="pt").input_ids
        assert ids.shape == (1, 49)
        with torch.no_grad():
            logits = model(input_ids=ids[:, :-1]).logits[0, -1]
        found.append(float(logits.log_softmax(-1)[ids[0, -1]]))
    return found


def test_rerope_runs_under_a_task(folder: Path, task: dict[str, Any]) -> None:
    found = measured(task, folder, method="rerope", factor=4)
    assert found == pytest.approx(direct(task, folder, "rerope", factor=4), abs=1e-3)
    plain = direct(task, folder, None)
    assert all(abs(a - b) > 0.02 for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize(("method", "switched"), [("yarn", True), ("rerope", False), (None, True)])
def test_attention_by_posenc(method: str | None, switched: bool, folder: Path) -> None:
    """Once: methods that move positions compute it anyway."""
    from posenc.lab.lm_eval import PosencLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    options = {"tokenizer": PreTrainedTokenizerFast.from_pretrained(folder)}
    given = {} if method is None else {"method": method, "factor": 4}
    made = PosencLM(model, **given, accelerate=True, **options)
    assert made.model is model
    assert is_switched(model) is switched
    ids = torch.arange(2, 50).unsqueeze(0)
    other = AutoModelForCausalLM.from_pretrained(folder)
    if method is not None:
        stretch(other, **given)
    with torch.no_grad():
        assert torch.allclose(made._model_call(ids), other(ids).logits, atol=1e-3)
    assert made.max_length == (TRAINED if method is None else 4 * TRAINED)


def test_options_of_a_method(folder: Path, task: dict[str, Any]) -> None:
    spec = {"factor": 4, "length": TRAINED}
    found = measured(task, folder, method="self_extend@group=4@window=8", **spec)
    expected = direct(task, folder, "self_extend", group=4, window=8, **spec)
    assert found == pytest.approx(expected, abs=1e-3)
    with pytest.raises(UnknownNameError):
        measured(task, folder, method="rerop", factor=4)


def test_an_extended_checkpoint_runs_as_it_says(
    folder: Path, task: dict[str, Any], tmp_path: Path
) -> None:
    extend_checkpoint(folder, tmp_path / "out", methods="rerope", factor=4.0, report=False)
    found = measured(task, tmp_path / "out")
    assert found == pytest.approx(direct(task, folder, "rerope", factor=4), abs=1e-3)


def test_longer_texts_are_cut_at_the_new_length(folder: Path, task: dict[str, Any]) -> None:
    """At the trained length times the factor."""
    found = measured(task, folder, method="rerope", factor=2)
    assert found != pytest.approx(direct(task, folder, "rerope", factor=2), abs=1e-3)


def made(folder: Path, **options: Any) -> Any:
    """The harness's model."""
    from posenc.lab.lm_eval import PosencLM

    return PosencLM(str(folder), **{"device": "cpu", "dtype": "float32"} | options)


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


CONTEXTS = [" ".join(WORDS[(5 * n + i * i) % 60] for i in range(n)) for n in (12, 30, 45, 20, 50)]
"""Of other lengths, which batches pad."""


def likelihoods(model: Any) -> list[float]:
    """Log-probabilities of one and of three words after each context."""
    asked = [(text, answer) for text in CONTEXTS for answer in (" w3", " w9 w4 w3")]
    return [value for value, _ in model.loglikelihood(requests("loglikelihood", asked), True)]


@pytest.mark.parametrize("method", [None, "yarn", "rerope", "dynamic_ntk", "longrope"])
def test_log_probabilities_are_those_of_each_text_alone(method: str | None, folder: Path) -> None:
    """In batches, too, whose shorter rows are padded."""
    given = {"max_length": 64} if method is None else {"method": method, "factor": 4}
    found = likelihoods(made(folder, batch_size=4, **given))
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if method is not None:
        stretch(model, method, factor=4)
    expected = []
    for text in CONTEXTS:
        for answer in (" w3", " w9 w4 w3"):
            ids = tokenizer(text + answer, return_tensors="pt").input_ids
            with torch.no_grad():
                values = model(input_ids=ids[:, :-1]).logits[0].log_softmax(-1)
            of_tokens = values.gather(1, ids[0, 1:, None])
            expected.append(float(of_tokens[-len(answer.split()) :].sum()))
    assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_log_probabilities_of_transformers_dynamic_frequencies(
    batch_size: int, folder: Path
) -> None:
    """Those of the longest text so far, if the shortest is not read first."""

    def loaded() -> Any:
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
        model = AutoModelForCausalLM.from_pretrained(folder, rope_parameters=rope)
        options = {"tokenizer": PreTrainedTokenizerFast.from_pretrained(folder), "max_length": 64}
        return PosencLM(model, batch_size=batch_size, **options)

    from posenc.lab.lm_eval import PosencLM

    expected = []
    for text in CONTEXTS:
        asked = requests("loglikelihood", [(text, " w3"), (text, " w9 w4 w3")])
        expected += [loaded().loglikelihood([each], True)[0][0] for each in asked]
    assert likelihoods(loaded()) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("batch_size", "padded"), [(1, 0), (4, 40)])
def test_logits_of_scored_tokens_alone(batch_size: int, padded: int, folder: Path) -> None:
    model, shapes = made(folder, max_length=64, batch_size=batch_size), []
    head = model.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda *call: shapes.append(call[2].shape[1]))
    likelihoods(model)
    assert max(shapes) <= 3 + padded
    shapes.clear()
    model.loglikelihood_rolling(requests("loglikelihood_rolling", [(CONTEXTS[0],)]), True)
    assert shapes == [12]  # all are scored
    hook.remove()


GENERATED = {"max_gen_toks": 6, "do_sample": False, "temperature": 0.0}


def answers(model: Any, until: list[str]) -> list[str]:
    asked = [(text, {**GENERATED, "until": until}) for text in CONTEXTS]
    found: list[str] = model.generate_until(requests("generate_until", asked), True)
    return found


@pytest.mark.parametrize("method", ["yarn", "rerope", "self_extend", "dynamic_ntk", "longrope"])
def test_answers_in_batches_and_their_ends(method: str, folder: Path) -> None:
    """A context keeps its last tokens, those that the answer leaves of the length."""
    given = {"method": method, "factor": 4}
    alone = answers(made(folder, **given), [])
    batched = made(folder, batch_size=5, **given)
    assert answers(batched, []) == alone
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    stretch(model, method, factor=4)
    for text, answer in zip(CONTEXTS, alone, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        written = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert answer == tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
    words = alone[2].split()
    ended = answers(batched, [words[2]])
    assert ended[2] == alone[2].partition(words[2])[0]
    cut = made(folder, max_length=30, **given)
    last = [" ".join(text.split()[-24:]) for text in CONTEXTS]
    asked = [(text, {**GENERATED, "until": []}) for text in last]
    assert answers(cut, []) == cut.generate_until(requests("generate_until", asked), True)


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        ({"factor": 4}, "factor"),
        ({"length": 64}, "length"),
        ({"method": "yarn"}, "factor"),
        ({"method": "yarn", "factor": 0.5}, "factor"),
        ({"method": "yarn", "factor": "long"}, "factor"),
        ({"method": "yarn", "factor": 2, "length": 0}, "length"),
        ({"method": 1, "factor": 2}, "method"),
        ({"method": "yarn@alpha=x", "factor": 2}, "alpha"),
        ({"accelerate": "maybe"}, "accelerate"),
        ({"max_length": 0}, "max_length"),
        ({"max_length": "long"}, "max_length"),
    ],
)
def test_wrong_arguments_of_the_model(given: dict[str, Any], argument: str, folder: Path) -> None:
    with pytest.raises(ArgumentError) as caught:
        made(folder, **given)
    assert caught.value.argument == argument


def test_arguments_beside_those_that_the_checkpoint_says(folder: Path, tmp_path: Path) -> None:
    extend_checkpoint(folder, tmp_path / "out", methods="rerope", factor=4.0, report=False)
    for given in ({"method": "yarn", "factor": 2}, {"factor": 8}, {"length": 8}):
        with pytest.raises(ArgumentError) as caught:
            made(tmp_path / "out", **given)
        assert caught.value.argument == next(iter(given))
