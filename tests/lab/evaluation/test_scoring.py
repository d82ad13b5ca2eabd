"""Answers of base models by log-probability, of chat models by what they generate."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from posenc.errors import ArgumentError, CheckpointError
from posenc.lab.evaluation.questions import Question
from posenc.lab.evaluation.scoring import ByGeneration, ByProbability, Examination
from posenc.lab.evaluation.settings import EvaluationSettings
from posenc.lab.evaluation.texts import SpecialTokens, TokenizerFile, read_ids, read_template
from posenc.transformers.live import LiveDecoder


def encode(text: str) -> list[int]:
    """Bytes, a pair of equal digits as one."""
    ids: list[int] = []
    for byte in text.encode():
        if ids and ids[-1] == byte and chr(byte).isdigit():
            ids[-1] = byte + 128
        else:
            ids.append(byte)
    return ids


def question(*answers: str, head: str = "Once upon a time.\n") -> Question:
    return Question(head=head, tail="Question?", lead=" Answer:", answers=answers)


class Reciting(nn.Module):
    """Knows some texts by heart, and goes on with a zero where it knows none."""

    def __init__(self, *texts: str, begin: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.known = [[*begin, *encode(text)] for text in texts]

    def forward(self, tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, 256)
        for row, ids in enumerate(tokens.tolist()):
            for end in range(1, len(ids) + 1):
                for known in self.known:
                    if known[:end] == ids[:end] and len(known) > end:
                        logits[row, end - 1, known[end]] = 1
        return logits


def test_all_tokens_of_an_answer_must_be_the_likeliest() -> None:
    right, wrong = question("1234", "9876", "4411"), question("1234", "9875", "4411")
    base = ByProbability(encode)
    model = Reciting(right.head + right.answered(3))
    assert base.scores(model, [right]) == [1.0]
    # it says 9876 where 9875 is asked for, and knows nothing of what follows that
    assert base.scores(model, [wrong]) == [pytest.approx(1 / 3)]
    assert base.scores(Reciting("nothing"), [right]) == [0.0]


def test_an_answer_begins_with_its_gap() -> None:
    asked = question("12", "34")
    assert asked.answered(0) == "Question? Answer:"
    assert asked.answered(2) == "Question? Answer: 12, 34"


def test_questions_of_other_lengths_are_asked_together() -> None:
    asked = [question("77"), question("12", head="A longer text is here.\n")]
    asked.append(question("345", head="A third.\n"))
    model = Reciting(*(each.head + each.answered(1) for each in asked[:2]))
    assert ByProbability(encode).scores(model, asked) == [1.0, 1.0, 0.0]
    begun = ByProbability(encode, (250,))
    assert begun.scores(model, asked) == [0.0, 0.0, 0.0]
    model = Reciting(*(each.head + each.answered(1) for each in asked), begin=(250,))
    assert begun.scores(model, asked) == [1.0, 1.0, 1.0]
    assert begun.cost(asked[0]) == 1 + len(encode(asked[0].head + asked[0].answered(1)))


class Writing(LiveDecoder):
    """Writes the same after every prompt."""

    def __init__(self, text: str) -> None:
        nn.Module.__init__(self)
        self.weight, self.text = nn.Parameter(torch.zeros(1)), text
        self.prompts: list[str] = []
        self.calls = 0

    def generate(self, tokens: Tensor, most: int, sampling: object) -> Tensor:
        self.calls += 1
        self.prompts += [bytes(row).decode() for row in tokens.tolist()]
        new = torch.tensor([list(self.text.encode())[:most]]).expand(len(tokens), -1)
        return torch.cat([tokens, new], 1)


def chat(message: str) -> str:
    return f"<user>{message}<model>"


def by_generation() -> ByGeneration:
    return ByGeneration(lambda text: list(text.encode()), lambda ids: bytes(ids).decode(), chat)


def test_what_is_generated_after_the_template_is_searched_for_the_answers() -> None:
    model, asked = Writing(" Abc and def."), question("abc", "xyz")
    assert by_generation().scores(model, [asked]) == [0.5]
    assert model.prompts == ["<user>Once upon a time.\nQuestion?<model> Answer:"]
    assert by_generation().cost(asked) > len(model.prompts[0]) + len(" abc, xyz")


def test_equal_lengths_are_generated_in_one_call_and_keep_their_places() -> None:
    model = Writing(" abc")
    asked = [question("q", head="Another head, longer.\n"), question("abc"), question("nop")]
    assert by_generation().scores(model, asked) == [0.0, 1.0, 0.0]
    assert model.calls == 2


def test_answers_count_in_any_case_and_not_those_of_the_prompt() -> None:
    asked = question("Abc", "once")
    assert by_generation().scores(Writing(" aBC"), [asked]) == [0.5]
    # the longest answers of a call may be written
    numbers = ("one", "two", "three", "four", "five", "six")
    asked = [question("one"), question(*numbers)]
    assert by_generation().scores(Writing(f" {', '.join(numbers)}"), asked) == [1.0, 1.0]


@pytest.mark.parametrize("place", ["config", "list", "file", "both"])
def test_a_template_is_read_wherever_it_is_kept(place: str, tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}[model]{% endif %}"
    fields: dict[str, object] = {"bos_token": {"content": "<s>"}}
    if place == "config":
        fields["chat_template"] = template
    elif place == "list":
        fields["chat_template"] = [{"name": "tool", "template": "no"}]
        fields["chat_template"] += [{"name": "default", "template": template}]
    else:
        (tmp_path / "chat_template.jinja").write_text(template)
    if place == "both":  # the file comes first
        fields["chat_template"] = "an older one"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    assert read_template(tmp_path)("Hello") == "<s>[user] Hello[model]"


def test_a_template_that_fails_is_named(tmp_path: Path) -> None:
    assert read_template(tmp_path) is None
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system') }}")
    rendered = read_template(tmp_path)
    with pytest.raises(CheckpointError, match="no system") as caught:
        rendered("Hello")
    assert "--style base" in caught.value.remedy


def test_a_template_that_runs_for_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posenc.lab.evaluation.texts.SECONDS", 0.2)
    loops = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc")
    (tmp_path / "chat_template.jinja").write_text(loops + 3 * "{% endfor %}")
    rendered = read_template(tmp_path)
    before = sys.gettrace()
    with pytest.raises(CheckpointError, match=r"more than 0\.2 s"):
        rendered("Hello")
    assert sys.gettrace() is before


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("One two three four five six seven. " * 99)
    return path


def test_a_template_decides_the_style_unless_it_is_given(plain: Path) -> None:
    text = read_ids(plain, encode=None, training=False)
    for style, chats, expected in (
        ("auto", False, "base"),
        ("auto", True, "chat"),
        ("base", True, "base"),
        ("chat", True, "chat"),
    ):
        tokenizer = TokenizerFile(None, str, SpecialTokens(), chat=chat if chats else None)
        settings = EvaluationSettings(tasks="all", style=style)
        asked = Examination.of(replace(text, tokenizer=tokenizer), settings, goal=256)
        assert asked.style == expected


def test_what_cannot_be_asked(plain: Path) -> None:
    text = read_ids(plain, encode=None, training=False)
    with pytest.raises(ArgumentError, match="without a chat template"):
        Examination.of(text, EvaluationSettings(tasks="all", style="chat"), goal=64)
    blind = read_ids(plain, encode=lambda told: [1] * len(told), training=False)
    refused = Examination.of(blind, EvaluationSettings(tasks="all"), goal=64)
    assert not refused.names
    assert "does not tell words or numbers apart" in refused.refusal
    assert Examination.of(text, EvaluationSettings(tasks="none"), goal=64).names == ()
    for settings, goal, count in (({}, 64, 64), ({}, 1 << 20, 8), ({"questions": 3}, 64, 3)):
        asked = EvaluationSettings(tasks="all", **settings)
        assert Examination.of(text, asked, goal=goal).count == count
