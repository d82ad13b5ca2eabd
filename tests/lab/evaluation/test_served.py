"""Served models: how far they read, by a server whose sight is known, and by a local model."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from posenc.errors import ArgumentError, Interrupted
from posenc.lab.evaluation.choosing import require_learned
from posenc.lab.evaluation.endpoint import Endpoint, EndpointError
from posenc.lab.evaluation.examiner import ServedExaminer, answer_text, likeliest, thinks
from posenc.lab.evaluation.questions import Question
from posenc.lab.evaluation.report import write_study
from posenc.lab.evaluation.results import Study
from posenc.lab.evaluation.scoring import ByProbability
from posenc.lab.evaluation.served import evaluate_served
from posenc.lab.evaluation.settings import EvaluationSettings, ServedSettings
from posenc.lab.evaluation.summary import answer, headline
from tests.support.serving import PATTERN, Finder, LoopbackServer, Reply, reply, serving, tokens_of

TASK = "niah_single_2"

TRAINED = 1000


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
    lines = (" ".join(words[n % 9 :] + words[: n % 9]) + f" day {n}." for n in range(60))
    path.write_text("\n".join(lines))
    return path


def study_of(server: LoopbackServer, text: Path, **fields: Any) -> Study:
    """24 questions of one task, at most two of them at a time."""
    given = {"tasks": TASK, "questions": 24, "trained_length": TRAINED, "text": text} | fields
    endpoint = Endpoint(server.url, "finder", key="", sleep=lambda seconds: None)
    served = ServedSettings(concurrency=2)
    return evaluate_served(endpoint, EvaluationSettings(**given), served)


def asked_of(server: LoopbackServer) -> list[dict[str, Any]]:
    """The requests with questions."""
    bodies = (body for _, body, _ in server.requests if "Question:" in body.get("prompt", ""))
    return [body for body in bodies if body["max_tokens"] > 1]


def measured(finder: Finder, text: Path, **fields: Any) -> Study:
    with serving(finder) as server:
        return study_of(server, text, **fields)


@pytest.mark.parametrize(
    ("fields", "style"),
    [
        ({}, "written"),
        ({"echo": True}, "base"),
        ({"echo": True, "shifted": True}, "written"),
        ({"chat": True}, "chat"),
    ],
)
def test_the_effective_length_is_that_of_the_server(
    fields: dict[str, bool], style: str, text: Path
) -> None:
    """It sees the last 1,100 tokens: all of 1,000, half of the numbers in 2,000."""
    study = measured(Finder(1100, **fields), text)
    assert study.style == style
    effective = study.effective
    assert effective is not None
    assert effective.honest
    assert (effective.reference, effective.claimed) == (TRAINED, TRAINED)
    assert 1000 <= effective.low <= effective.length <= 1300
    assert effective.end is not None
    assert 1100 < effective.end <= 2000
    assert set(study.lengths) > {500, 1000, 2000}, "and between"
    reading = study.findings[0].untuned
    assert reading is not None
    assert reading.right[500] == reading.right[1000] == 1.0
    assert 0.25 < reading.right[2000] < 0.85
    assert f"reads up to {effective.length} tokens" in headline(study)


def test_a_length_that_is_not_read_is_overstated(text: Path) -> None:
    """Of contexts of 1,000 tokens it sees the last 400."""
    study = measured(Finder(400), text, lengths=(300, 500, 1000))
    assert study.effective is not None
    assert not study.effective.honest
    assert study.effective.reference == 300
    assert study.effective.end in (500, 1000)
    assert "not the 1000 that are stated" in headline(study)
    assert "surely loses more than 25% of the right answers at 300" in " ".join(answer(study))


def test_lengths_that_the_server_refuses_are_named(text: Path) -> None:
    study = measured(Finder(9000, limit=1100), text)
    assert max(study.lengths) == 1000
    assert study.effective is not None
    assert (study.effective.length, study.effective.end) == (1000, None)
    assert study.left_out.keys() == {"2000"}
    assert "maximum context length is 1100" in study.left_out["2000"]
    with pytest.raises(EndpointError, match="maximum context length is 300"):
        measured(Finder(9000, limit=300), text, lengths=(500, 1000))


def test_a_length_without_all_tasks_is_left_out(text: Path) -> None:
    finder = Finder(9000)

    def narrow(path: str, body: dict[str, Any]) -> Reply:
        """Of the second task, whose text has days, no long questions are taken."""
        prompt = body.get("prompt", "")
        if "day 7" in prompt and len(tokens_of(prompt)) > 600:
            return reply({"message": "too long"}, 413)
        return finder(path, body)

    with serving(narrow) as server:
        tasks = "niah_single_1,niah_single_2"
        study = study_of(server, text, tasks=tasks, lengths=(500, 1000), questions=8)
    assert study.lengths == study.asked_at == (500,)
    assert "413" in study.left_out["1000"]


def test_a_model_that_answers_nothing_is_refused_after_its_report(
    text: Path, tmp_path: Path
) -> None:
    with serving(Finder(1)) as server:
        study = study_of(server, text)
        prompts = [body["prompt"] for _, body, _ in server.requests if "prompt" in body]
    assert max(len(tokens_of(prompt)) for prompt in prompts) <= 500, "nothing longer is asked"
    assert study.effective is None
    assert headline(study) == "Nothing can be said of finder: it is no better than a guess"
    write_study(study, tmp_path / "out")
    with pytest.raises(Exception, match="better answers than 0%"):
        require_learned(study)


def test_lengths_by_the_servers_counts_are_near_and_never_longer(text: Path) -> None:
    """Tokens of the tasks differ: digits are one each, of letters there are four in one."""
    tasks = "niah_single_1,niah_single_2,niah_single_3,json_lookup,vt,fwe"
    with serving(Finder(9000)) as server:
        study = study_of(server, text, tasks=tasks, questions=3, lengths=(600, 1200))
    used: dict[int, list[int]] = {600: [], 1200: []}
    for body in asked_of(server):
        tokens = 1 + len(tokens_of(body["prompt"])) + body["max_tokens"]
        used[600 if tokens <= 600 else 1200].append(tokens)
    assert len(used[600]) == 18
    assert max(used[1200]) <= 1200
    assert min(used[600]) > 0.75 * 600
    assert set(study.answers) <= set(tasks.split(","))


def test_lengths_by_a_tokenizer_are_exact(text: Path, tmp_path: Path) -> None:
    """It has one word, and as many tokens as the server."""
    tokenizer = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = Split(Regex(PATTERN), "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    finder = Finder(9000, counts=False)
    with serving(finder) as server:
        endpoint = Endpoint(server.url, "finder", key="")
        settings = EvaluationSettings(
            tasks="niah_single_3", questions=6, lengths=(700,), trained_length=700, text=text
        )
        served = ServedSettings(tokenizer=tmp_path)
        evaluate_served(endpoint, settings, served)
        bodies = asked_of(server)
    used = [len(tokens_of(body["prompt"])) + body["max_tokens"] for body in bodies]
    assert len(used) == 6
    assert 0.95 * 700 <= min(used) <= max(used) <= 700


def test_the_trained_length_is_the_servers(text: Path) -> None:
    for described in ({"max_model_len": 600}, {"meta": {"n_ctx_train": 600}}):
        study = measured(Finder(9000, described=described), text, trained_length=None)
        assert study.length == 600
        assert study.lengths == (300, 600, 1200)
    for described in ({}, {"max_model_len": 10**30}, {"meta": 5}, {"max_model_len": "600"}):
        with pytest.raises(ArgumentError, match=r"^trained_length: expected the length that the"):
            measured(Finder(9000, described=described), text, trained_length=None)


def test_without_counts_a_tokenizer_is_asked_for(text: Path) -> None:
    with pytest.raises(ArgumentError, match=r"^tokenizer: expected a folder with its tokenizer"):
        measured(Finder(9000, counts=False), text)


@pytest.mark.parametrize("name", ["device", "dtype", "memory", "images"])
def test_settings_of_local_models_are_refused(name: str, text: Path) -> None:
    values = {"device": "cuda", "dtype": "float32", "memory": 1.0, "images": Path("a")}
    with pytest.raises(ArgumentError, match=f"^{name}: expected none, for a served model"):
        measured(Finder(9000), text, **{name: values[name]})


def test_a_chat_model_that_is_asked_as_a_base_model(text: Path) -> None:
    study = measured(Finder(9000, chat=True), text, style="base", lengths=(500,))
    assert study.style == "written"
    with pytest.raises(EndpointError, match="no chat template"):
        measured(Finder(9000), text, style="chat")


def test_requests_at_a_time_are_as_many_as_allowed(text: Path) -> None:
    finder, lock = Finder(9000), threading.Lock()
    two = threading.Barrier(2)
    now, most = [0], [0]

    def counted(path: str, body: dict[str, Any]) -> Reply:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        if body.get("max_tokens", 0) > 1 and "Question:" in body.get("prompt", ""):
            two.wait(30)
        with lock:
            now[0] -= 1
        return finder(path, body)

    with serving(counted) as server:
        study_of(server, text, lengths=(500,))
    assert most == [2]


def test_an_interrupted_measurement_asks_nothing_again(text: Path, tmp_path: Path) -> None:
    state = tmp_path / "out-measured.json"
    settings = EvaluationSettings(
        tasks="niah_single_1,niah_single_2", questions=12, lengths=(400, 800), text=text,
        trained_length=800,
    )  # fmt: skip
    finder = Finder(9000)
    calls = iter([False, False, False, True])
    with serving(finder) as server:
        endpoint = Endpoint(server.url, "finder", key="")
        with pytest.raises(Interrupted):
            evaluate_served(
                endpoint, settings, ServedSettings(), state=state, stop=lambda: next(calls)
            )
        before = [body["prompt"] for body in asked_of(server)]
        server.requests.clear()
        study = evaluate_served(endpoint, settings, ServedSettings(), state=state)
        after = [body["prompt"] for body in asked_of(server)]
        whole = evaluate_served(endpoint, settings, ServedSettings())
    assert (len(before), len(after)) == (36, 12)
    assert not set(before) & set(after)
    assert study.answers == whole.answers


class Letters(nn.Module):
    """A tiny Llama of printable characters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
        config = LlamaConfig(vocab_size=95, num_attention_heads=2, **sizes)
        self.model = LlamaForCausalLM(config).eval()
        self.model.lm_head.weight.data.mul_(30)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens).logits
        return logits

    @staticmethod
    def encode(text: str) -> list[int]:
        return [ord(character) - 32 for character in text]

    @torch.inference_mode()
    def write(self, text: str, count: int) -> str:
        for _ in range(count):
            last = self(torch.tensor([self.encode(text)]))[0, -1]
            text += chr(32 + int(last.argmax()))
        return text[-count:] if count else ""

    def reply(self, path: str, body: dict[str, Any]) -> Reply:
        """The protocol of completions."""
        if path != "completions":
            return reply({}, 404)
        prompt, written = body["prompt"], self.write(body["prompt"], body["max_tokens"])
        choice: dict[str, Any] = {"text": written}
        if body.get("echo"):
            text = prompt + written
            with torch.inference_mode():
                logs = self(torch.tensor([self.encode(text)]))[0].log_softmax(-1)
            ids = self.encode(text)
            values = [None, *(float(logs[n, ids[n + 1]]) for n in range(len(ids) - 1))]
            best = [None, *({chr(32 + int(row.argmax())): float(row.max())} for row in logs[:-1])]
            given = {"tokens": list(text), "token_logprobs": values, "top_logprobs": best}
            choice = {"text": text, "logprobs": given}
        return reply({"choices": [choice], "usage": {"prompt_tokens": len(prompt)}})


def test_log_probabilities_score_as_a_local_base_model() -> None:
    """Answers are what the model itself writes, some with a letter changed."""
    letters = Letters()
    questions = []
    for number in range(12):
        head, tail = f"Text {number}. ", "Question?"
        right = letters.write(head + tail, 3)
        wrong = right[:2] + ("?" if right[2] != "?" else "!")
        answers = ((right,), (wrong,), (right, right))[number % 3]
        questions.append(Question(head=head, tail=tail, lead="", answers=answers, gap=""))
    local = ByProbability(letters.encode).scores(letters, questions)
    with serving(letters.reply) as server:
        examiner = ServedExaminer(Endpoint(server.url, "letters", key=""), "base", None)
        assert examiner.style == "base"
        shares = [examiner.ask(question)[0] for question in questions]
    assert shares == local
    assert set(shares) == {0.0, 0.5, 1.0}


ASKED = Question(head="H", tail="Q", lead=":", answers=("ab", "cd"))


def echoed(tokens: list[Any], values: list[Any], tops: list[Any]) -> dict[str, Any]:
    given = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}
    return {"choices": [{"logprobs": given}]}


def test_every_token_that_an_answer_touches_counts() -> None:
    tokens = ["HQ:", " a", "b, c", "d", "!"]
    values = [None, -1.0, -3.0, -1.0, -9.0]
    best = [None, {"x": -2.0}, {"b, c": -3.0}, {" d": -0.5}, {"": 0.0}]
    assert likeliest(echoed(tokens, values, best), ASKED) == [True, False]
    best[2] = {"x": -2.9}
    assert likeliest(echoed(tokens, values, best), ASKED) == [False, False]


@pytest.mark.parametrize(
    "logprobs",
    [
        *(None, [], {}, {"content": []}, {"tokens": None}),
        {"tokens": [" "], "token_logprobs": [-1.0], "top_logprobs": [{" ": -1.0}]},
        {"tokens": ["HQ: ab, cd"], "token_logprobs": [None], "top_logprobs": [None]},
        {"tokens": ["HQ: ab, cd"], "token_logprobs": [-1.0], "top_logprobs": []},
        {"tokens": ["HQ: ab, cd"], "token_logprobs": [-1.0], "top_logprobs": [{}]},
        {"tokens": [5], "token_logprobs": [-1.0], "top_logprobs": [{}]},
        {"tokens": ["HQ: ab, cd"], "token_logprobs": [-1.0], "top_logprobs": [{"a": None}]},
        {"tokens": ["HQ: ab, cd"], "token_logprobs": ["a"], "top_logprobs": [{"a": "b"}]},
    ],
)
def test_log_probabilities_that_are_not_of_the_prompt(logprobs: object) -> None:
    """llama.cpp and transformers give none of it."""
    assert likeliest({"choices": [{"logprobs": logprobs}]}, ASKED) is None


@pytest.mark.parametrize(
    ("apart", "thinking"), [("reasoning_content", None), ("reasoning", None), ("", None)]
)
def test_a_model_that_thinks_is_given_the_tokens_for_it(
    apart: str, thinking: int | None, text: Path
) -> None:
    """Its first answer shows a thought; one of 1,024 tokens stands in the context too."""
    finder = Finder(9000, chat=True, thought=900, apart=apart)
    with serving(finder) as server:
        study = study_of(server, text, lengths=(1500, 3000), questions=8)
        asked = [b for _, b, _ in server.requests if "Question:" in str(b.get("messages"))]
    reading = study.findings[0].untuned
    assert reading is not None
    assert reading.right == {1500: 1.0, 3000: 1.0}
    assert study.style == "chat"
    for body in asked:
        prompt = tokens_of(body["messages"][0]["content"])
        assert len(prompt) + body["max_tokens"] <= 3000
        assert body["max_tokens"] == 1 or body["max_tokens"] > 1024


def test_a_thought_that_the_template_begins_needs_its_tokens_given(text: Path) -> None:
    finder = Finder(9000, chat=True, thought=300, apart="template")
    with serving(finder) as server:
        alone = study_of(server, text, lengths=(1000,), questions=8)
    assert alone.effective is None
    assert "--thinking" in alone.gate
    with serving(finder) as server:
        endpoint = Endpoint(server.url, "finder", key="")
        fields = {"tasks": TASK, "questions": 8, "trained_length": TRAINED, "lengths": (1000,)}
        settings = EvaluationSettings(text=text, **fields)
        study = evaluate_served(endpoint, settings, ServedSettings(concurrency=2, thinking=400))
    reading = study.findings[0].untuned
    assert reading is not None
    assert reading.right == {1000: 1.0}


def message(content: str | None, end: str = "stop", **fields: str) -> dict[str, Any]:
    return {"choices": [{"message": {"content": content, **fields}, "finish_reason": end}]}


@pytest.mark.parametrize(
    ("given", "thinking", "expected"),
    [
        (message(" 42."), False, " 42."),
        (message(" 42."), True, " 42."),
        (message("<think>41? No.</think> 42."), False, " 42."),
        (message("41? No.</think> 42."), False, " 42."),
        (message("<think>a</think>41?<think>b</think> 42"), False, " 42"),
        (message("\n<think>41? No", "length"), False, ""),
        (message("41? No", "length"), True, ""),
        (message("41? No", "length"), False, "41? No"),
        (message("42 is", "length", reasoning_content="41?"), True, "42 is"),
        (message(None, "length", reasoning="42"), True, ""),
        ({"choices": [{}]}, True, ""),
    ],
)
def test_answers_are_read_behind_the_thought(
    given: dict[str, Any], thinking: bool, expected: str
) -> None:
    assert answer_text(given, thinking=thinking) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (message("Hello"), False),
        (message("<"), False),
        (message(""), False),
        (message(None), False),
        (message("<b>"), False),
        (message("a <think> in the middle"), False),
        (message("Hello", reasoning_content=""), False),
        (message(None, reasoning_content="Okay"), True),
        (message("", reasoning="Okay"), True),
        (message("<think>"), True),
        (message("<think"), False),
        (message("\n<think>hm"), True),
        (message("a</think>"), True),
        ({"choices": [{"message": "a"}]}, False),
    ],
)
def test_a_thought_is_told_from_an_answer(given: dict[str, Any], expected: bool) -> None:
    assert thinks(given) is expected
