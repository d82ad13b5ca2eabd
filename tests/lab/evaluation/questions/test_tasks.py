"""Questions of every task: their answers are right, they fit, and are the same again."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from posenc.errors import UnknownNameError
from posenc.lab.evaluation import questions
from posenc.lab.evaluation.questions.question import NAMES, Source, name, names
from posenc.lab.evaluation.questions.tasks import FACTS, PEOPLE

RULER = {
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2"),
    *("niah_multikey_3", "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
}
DRAW = random.Random(0)
TEXT = " ".join(
    f"{word.capitalize()} number {n} walked slowly towards another remarkable place."
    for n, word in enumerate(names(DRAW, 400))
)


def cost(question: questions.Question) -> int:
    """Words and signs."""
    return len(re.findall(r"\w+|\W", question.head + question.answered(len(question.answers))))


MAKER = questions.QuestionMaker(Source(TEXT), cost)


def asked(
    task: str, length: int = 2000, maker: questions.QuestionMaker = MAKER
) -> questions.Question:
    (question,) = maker.questions(task, length=length, count=1)
    return question


def test_the_thirteen_of_ruler_and_two_more() -> None:
    assert set(questions.TASKS) == RULER | {"other_words", "json_lookup"}
    assert questions.task_names("all") == tuple(questions.TASKS)
    assert questions.task_names("none") == ()
    assert questions.task_names("vt, cwe,vt") == ("vt", "cwe")
    with pytest.raises(UnknownNameError, match="niah_single_1"):
        questions.task_names("niah_single_4")


@pytest.mark.parametrize("task", questions.TASKS)
@pytest.mark.parametrize("length", [1500, 8000])
def test_questions_fill_the_length_and_never_more(task: str, length: int) -> None:
    for question in MAKER.questions(task, length=length, count=3):
        assert 0.9 * length <= cost(question) <= length
        assert question.head.endswith("\n")


@pytest.mark.parametrize("task", questions.TASKS)
def test_the_same_is_asked_at_every_length_and_each_time(task: str) -> None:
    short, long = (MAKER.questions(task, length=n, count=4) for n in (1500, 4000))
    assert [q.answers for q in short] == [q.answers for q in long]
    assert [q.tail for q in short] == [q.tail for q in long]
    assert len({q.answers for q in short}) > 1, "four different questions"
    assert short == questions.QuestionMaker(Source(TEXT), cost).questions(
        task, length=1500, count=4
    )
    other = questions.QuestionMaker(Source(TEXT), cost, seed=1)
    assert short != other.questions(task, length=1500, count=4)


@pytest.mark.parametrize("task", [task for task in questions.TASKS if task.startswith("niah")])
def test_needles_are_told_once_in_the_form_of_their_task(task: str) -> None:
    question = asked(task)
    told = re.findall(r"The secret (number|identifier) of ([\w-]+) is ([\w-]+)\.", question.head)
    keys = Counter(key for _, key, _ in told)
    values = {value: key for _, key, value in told}
    expected = {"niah_multivalue": 4, "niah_multiquery": 4}.get(task, 1)
    assert len(question.answers) == expected
    assert all(question.head.count(value) == 1 for value in question.answers)
    named = [values[value] for value in question.answers]
    places = [question.tail.index(key) for key in named]
    assert places == sorted(places)
    if task == "niah_multivalue":
        assert len(set(named)) == 1
        order = [question.head.index(value) for value in question.answers]
        assert order == sorted(order)
        assert len(told) == 4
    elif task in ("niah_multikey_1", "niah_multiquery"):
        assert sorted(keys.values()) == [1, 1, 1, 1]
    elif task in ("niah_multikey_2", "niah_multikey_3"):
        assert len(told) > 20
        assert max(keys.values()) == 1
    else:
        assert len(told) == 1
    uuids = task in ("niah_single_3", "niah_multikey_3")
    assert all((len(value) == 36) == uuids for value in question.answers)
    assert ("The field is quiet" in question.head) == (task == "niah_single_1")


def test_needles_stand_everywhere() -> None:
    asked = MAKER.questions("niah_single_1", length=2000, count=40)
    places = [q.head.index(q.answers[0]) / len(q.head) for q in asked]
    assert min(places) < 0.2
    assert max(places) > 0.8


def test_other_words_share_none_with_their_question() -> None:
    for fact, question in FACTS:
        said, sought = (set(re.findall(r"[a-z]+", text.lower())) for text in (fact, question))
        assert not said & sought, (fact, question)
    question = asked("other_words")
    assert question.answers[0] in PEOPLE
    assert question.head.count(question.answers[0]) == 1
    assert question.answers[0] not in question.tail


def test_variables_follow_from_one_another() -> None:
    question = asked("vt")
    text = question.head.rpartition("Follow the assignments")[2]
    lines = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text))
    value = re.findall(r"\d{5}", question.tail)[0]
    held = {name for name in lines if _resolved(lines, name) == value}
    assert held == set(question.answers)
    assert len(held) == 5
    assert [lines[name] for name in question.answers] == [value, *question.answers[:-1]]


def _resolved(lines: dict[str, str], name: str) -> str:
    while name in lines:
        name = lines[name]
    return name


@pytest.mark.parametrize(("length", "times"), [(1500, (6, 1)), (20_000, (30, 3))])
def test_common_words_are_the_most_frequent(length: int, times: tuple[int, int]) -> None:
    question = asked("cwe", length)
    listed = question.head.splitlines()[-1]
    counts = Counter(re.findall(r"\d+\. (\S+)", listed))
    assert {word for word, _ in counts.most_common(10)} == set(question.answers)
    assert list(question.answers) == sorted(question.answers)
    assert set(counts.values()) == set(times)


def test_frequent_words_are_in_their_order_after_the_dots() -> None:
    question = asked("fwe", 4000)
    counts = Counter(question.head.splitlines()[-1].split())
    (dots, _), *others = counts.most_common(5)
    assert dots == "..."
    assert tuple(word for word, _ in others[:3]) == question.answers
    assert others[2][1] > others[3][1], "the third is sure"
    # frequencies fall by the square
    counts = Counter(asked("fwe", 8000).head.splitlines()[-1].split())
    (_, most), (_, second), (_, third), *_ = counts.most_common(4)
    assert most / second == pytest.approx(4, rel=0.05)
    assert most / third == pytest.approx(9, rel=0.05)


def test_the_missing_word_makes_a_sentence_of_one_document() -> None:
    question = asked("qa_1")
    gapped = re.findall("“(.*)”", question.tail)[0]
    assert gapped.count("____") == 1
    assert question.head.count(gapped.replace("____", question.answers[0])) == 1
    assert question.head.count("Document ") > 5


def test_the_second_document_is_found_by_way_of_the_first() -> None:
    question = asked("qa_2")
    documents = dict(re.findall(r"Document ([\w-]+):\n(.*)", question.head))
    quoted = re.findall("“(.*)”", question.tail)[0]
    (first,) = (text for text in documents.values() if quoted in text)
    title = re.findall(r"This goes on in ([\w-]+)\.", first)[0]
    assert documents[title].startswith(question.answers[0])
    assert len(documents) > 5


def test_the_object_is_json_and_holds_the_answer() -> None:
    question = asked("json_lookup")
    held = json.loads(question.head[question.head.index("{") :])
    key = re.findall(r'"([\w-]+)"', question.tail)[0]
    assert held[key] == question.answers[0]
    assert question.answered(1).endswith(f'"{key}": "{held[key]}')


def numbered(draw: random.Random, count: int) -> list[str]:
    """Names of which few differ, so that those drawn again meet those drawn before."""
    return [f"name-{n}" for n in draw.sample(range(max(count, 12)), count)]


@pytest.mark.parametrize("seed", range(5))
def test_names_that_are_drawn_again_are_not_used_twice(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions.tasks, "names", numbered)
    maker = questions.QuestionMaker(Source(TEXT), cost, seed)
    needle, common, second = (
        asked(task, 1500, maker).head for task in ("niah_multikey_2", "cwe", "qa_2")
    )
    keys = re.findall(r"The secret number of ([\w-]+) is", needle)
    assert len(set(keys)) == len(keys) > 12
    counts = Counter(re.findall(r"\d+\. (\S+)", common.splitlines()[-1]))
    assert sorted(set(counts.values())) == [1, 6]
    titles = re.findall(r"Document ([\w-]+):", second)
    assert len(set(titles)) == len(titles)


def test_each_task_draws_for_itself() -> None:
    keys = {
        re.findall(r"of ([\w-]+)\?", asked(task).tail)[0]
        for task in ("niah_single_1", "niah_single_2", "niah_multikey_1")
    }
    assert len(keys) == 3


def test_a_question_may_fill_the_length_to_the_last_token() -> None:
    maker = questions.QuestionMaker(
        Source(TEXT), lambda question: question.head.count("The field is quiet")
    )
    (question,) = maker.questions("niah_single_1", length=10, count=1)
    assert question.head.count("The field is quiet") == 10


def test_a_missing_word_is_missing_once() -> None:
    text = " ".join(
        f"Gardens {number} behind other gardens hold {name(7 * number)} flowers here."
        for number in range(40)
    )
    maker = questions.QuestionMaker(Source(text.replace("Gardens", "gardens")), cost)
    for question in maker.questions("qa_1", length=400, count=20):
        assert question.answers != ("gardens",)


def test_what_does_not_fit_says_so() -> None:
    with pytest.raises(questions.Unfit, match="no question fits 50 tokens"):
        asked("cwe", 50)
    few = questions.QuestionMaker(Source("One two three four five six seven."), cost)
    with pytest.raises(questions.Unfit, match="0 documents of 4"):
        few.questions("qa_1", length=500, count=1)


def test_names_differ_however_many() -> None:
    assert len(set(names(random.Random(0), 3 * NAMES))) == 3 * NAMES
    assert name(0) != name(NAMES)


def test_a_text_without_sentences_is_cut_into_pieces() -> None:
    assert len(Source("x = 1 " * 40).sentences) > 0
    assert all(
        len(piece.split()) <= 12 for piece in Source(" ".join(map(str, range(99)))).sentences
    )


def test_questions_are_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = questions.QuestionMaker(Source(TEXT), cost, 0, "a tokenizer")
    made = kept.questions("vt", length=800, count=2)
    (path,) = (tmp_path / "posenc" / "questions").iterdir()

    def refuse(question: questions.Question) -> int:
        raise AssertionError("nothing is made again")

    again = questions.QuestionMaker(Source(TEXT), refuse, 0, "a tokenizer")
    assert again.questions("vt", length=800, count=2) == made
    for seed, tokenizer, length, count, version in (
        (0, "another", 800, 2, 0),
        (1, "a tokenizer", 800, 2, 0),
        (0, "a tokenizer", 801, 2, 0),
        (0, "a tokenizer", 800, 3, 0),
        (0, "a tokenizer", 800, 2, 1),
    ):
        other = questions.QuestionMaker(Source(TEXT), refuse, seed, tokenizer)
        with monkeypatch.context() as patch:
            patch.setattr(questions, "VERSION", questions.VERSION + version)
            with pytest.raises(AssertionError, match="made again"):
                other.questions("vt", length=length, count=count)
    path.write_bytes(path.read_bytes()[:-9])
    assert kept.questions("vt", length=800, count=2) == made, "a damaged file is made anew"
    assert again.questions("vt", length=800, count=2) == made
