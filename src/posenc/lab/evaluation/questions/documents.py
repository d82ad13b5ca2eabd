"""Tasks on a collection: two forms of question answering on documents, and lookup in JSON."""

from __future__ import annotations

import random
import re

from posenc.lab.evaluation.questions.question import Question, QuestionTask, Unfit
from posenc.lab.evaluation.questions.source import Source, identifier, names

PASSAGE = 4
"""Sentences of a document."""

SHORTEST = 5
"""Letters of a word that is left out."""

GAP = "____"

INSTRUCTIONS = "Answer the question by the following documents. Give the answer alone."


def missing_word(source: Source, draw: random.Random, size: int) -> Question:
    """The word left out of a sentence of one document; see ``QuestionTask.make``."""
    passage, others = _passages(source, draw, 1, size)
    sentences = [text for text in passage[0] if _words(text)]
    if not sentences:
        raise Unfit("the text has no long words")
    sentence = draw.choice(sentences)
    word = draw.choice(_words(sentence))
    gapped = re.sub(rf"\b{word}\b", GAP, sentence)
    texts = [" ".join(passage[0]), *others]
    draw.shuffle(texts)
    titles = names(draw, len(texts))
    return _asked(
        list(zip(titles, texts, strict=True)), f"Which word is missing in “{gapped}”?", (word,)
    )


def second_document(source: Source, draw: random.Random, size: int) -> Question:
    """The beginning of a document that another one refers to; see ``QuestionTask.make``."""
    passages, others = _passages(source, draw, 2, size)
    title = names(draw, 1)[0]
    quoted = draw.choice(passages[0])
    answer = " ".join(passages[1][0].split()[:3])
    first = " ".join([*passages[0], f"This goes on in {title}."])
    texts = [first, " ".join(passages[1]), *others]
    titles = names(draw, len(texts) + 1)
    titles = [other for other in titles if other != title][: len(texts)]
    titles[1] = title
    documents = list(zip(titles, texts, strict=True))
    draw.shuffle(documents)
    return _asked(
        documents,
        "What are the first three words of the document that continues the one which says "
        f"“{quoted}”?",
        (answer,),
    )


def _passages(
    source: Source, draw: random.Random, count: int, size: int
) -> tuple[list[list[str]], list[str]]:
    """Sentences of the documents that are asked about, and the others, ``size`` in all."""
    total = len(source.sentences) // PASSAGE
    if total < count + 1:
        raise Unfit(f"the text has {total} documents of {PASSAGE} different sentences")
    chosen = draw.sample(range(total), count)
    rest = [number for number in range(total) if number not in chosen]
    begin = draw.randrange(len(rest))
    numbers = [rest[(begin + n) % len(rest)] for n in range(max(0, size - count))]
    read = {n: source.run(n * PASSAGE, PASSAGE) for n in {*chosen, *numbers}}
    return [read[n] for n in chosen], [" ".join(read[n]) for n in numbers]


def _words(sentence: str) -> list[str]:
    """Long words of a sentence that occur in it once."""
    words = re.findall(rf"\b[A-Za-z]{{{SHORTEST},}}\b", sentence)
    return [word for word in words if len(re.findall(rf"\b{word}\b", sentence)) == 1]


def _asked(documents: list[tuple[str, str]], question: str, answers: tuple[str, ...]) -> Question:
    listed = "\n\n".join(f"Document {title}:\n{text}" for title, text in documents)
    return Question(
        head=f"{INSTRUCTIONS}\n\n{listed}\n\n{INSTRUCTIONS}\n\n",
        tail=f"Question: {question}",
        lead=" Answer:",
        answers=answers,
    )


def json_lookup(source: Source, draw: random.Random, size: int) -> Question:
    """The value of a key in a JSON object of UUIDs (Liu et al. 2024); see ``QuestionTask.make``."""
    key, value = identifier(draw), identifier(draw)
    depth = draw.random()
    pairs = [(identifier(draw), identifier(draw)) for _ in range(size - 1)]
    pairs.insert(round(depth * len(pairs)), (key, value))
    listed = ",\n".join(f'  "{name}": "{held}"' for name, held in pairs)
    return Question(
        head=f"Look up the value of a key in this JSON object.\n\n{{\n{listed}\n}}\n\n",
        tail=f'Question: What is the value of the key "{key}"?',
        lead=f' Answer: "{key}": "',
        answers=(value,),
        gap="",
    )


DOCUMENT_TASKS = (
    QuestionTask(name="qa_1", summary="a word missing in one of the documents", make=missing_word),
    QuestionTask(
        name="qa_2", summary="a document that another one names", make=second_document, fewest=2
    ),
    QuestionTask(name="json_lookup", summary="a value in a JSON object of UUIDs", make=json_lookup),
)
