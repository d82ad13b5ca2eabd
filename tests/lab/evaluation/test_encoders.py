"""Encoders with a learned table: masked tokens restored, and documents found."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from posenc.errors import ArgumentError, DataError
from posenc.extension import NotApplicable
from posenc.lab.evaluation.candidates import Method, methods_for
from posenc.lab.evaluation.checkpoint import Checkpoint
from posenc.lab.evaluation.evaluate import evaluate
from posenc.lab.evaluation.extend import extend_checkpoint
from posenc.lab.evaluation.images import ImageSource
from posenc.lab.evaluation.report import study_page, write_study
from posenc.lab.evaluation.settings import Tuning
from posenc.lab.evaluation.study import ExtensionResult, measure_extensions
from posenc.lab.evaluation.suites.encoders import MaskedSuite, RetrievalSuite
from posenc.lab.evaluation.summary import answer
from posenc.lab.evaluation.texts import SpecialTokens, Text, read_ids
from posenc.lab.experiments.corpus import Pieces
from posenc.lab.experiments.text_loss import restored
from posenc.transformers.live import LiveEncoder, LiveMaskedLM, LiveModel
from tests.support.tiny_models import build, word_tokenizer

LENGTH, MASK = 16, 256
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"max_position_embeddings": LENGTH}
MARKS = SpecialTokens(begin=(1,), end=(2,), mask=MASK)
TUNING = Tuning(steps=0)


def subject(kind: type[LiveModel]) -> Checkpoint:
    torch.manual_seed(0)
    name = "BertForMaskedLM" if kind is LiveMaskedLM else "BertModel"
    model = build(name, SIZES, vocab_size=257, intermediate_size=64, initializer_range=0.25)
    return Checkpoint("tiny", "bert", kind(model.eval().requires_grad_(False)), LENGTH)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    generator = torch.Generator().manual_seed(0)
    path.write_bytes(bytes(torch.randint(97, 123, (8000,), generator=generator).tolist()))
    return read_ids(path, encode=None, training=False, special=MARKS)


class Recording(nn.Module):
    """Says which tokens it was given; every one is as likely as another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(257))
        self.seen: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen.append(tokens)
        return self.weight.expand(*tokens.shape, 257)


class Bag(nn.Module):
    """A vector for each token, so that a mean is a bag of them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Embedding(9000, 512, _weight=torch.randn(9000, 512, generator=generator))

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.table(tokens)
        return found


def test_only_chosen_tokens_cost_something() -> None:
    wanted = torch.tensor([[3, 4, 5], [6, 7, 8]])
    chosen = torch.tensor([[True, False, False], [False, False, True]])
    logits = torch.full((2, 3, 9), 0.0)
    logits[0, 0, 3] = 50.0
    bits, right = restored(lambda tokens: logits, wanted, wanted, chosen)
    assert bits.isnan().sum() == right.isnan().sum() == 4
    assert bits[0, 0] == pytest.approx(0, abs=1e-5)
    assert bits[1, 2] == pytest.approx(math.log2(9))
    assert (right[0, 0], right[1, 2]) == (1, 0)


def test_the_same_masked_tokens_are_scored_at_every_length(text: Text) -> None:
    ruler = MaskedSuite.of(text, (8, 16, 64), seed=0)
    model = Recording()
    reading = ruler.measure(model)
    assert all(value == pytest.approx(math.log2(257)) for value in reading.loss.values())
    assert all(value == pytest.approx(math.log2(257)) for _, value in reading.by_position)
    inputs = model.seen[0]
    assert inputs[:, 0].eq(1).all()
    assert inputs[:, -1].eq(2).all()
    middles = [ruler._middle(n) for n in ruler.lengths]
    scored = [sorted(rows[chosen].tolist()) for rows, chosen in middles]
    assert scored[0] == scored[1] == scored[2]
    assert ruler.facts("byte")["targets"] == len(scored[0])
    rows, _ = ruler._middle(64)
    assert len(rows.flatten().unique()) == rows.numel(), "windows share nothing"
    masked = inputs.eq(MASK).float().mean()
    assert 0.08 < masked < 0.22


def test_with_a_limit_no_context_is_longer(text: Text) -> None:
    ruler = MaskedSuite.of(text, (8, 16, 64), seed=0)
    model = Recording()
    reading = ruler.measure(model, limit=16)
    assert max(tokens.shape[1] for tokens in model.seen) == 16
    assert reading.loss[64] == reading.loss[16]
    assert max(place for place, _ in reading.by_position) < 16


def documents(count: int, size: int) -> Text:
    """A text in which no token comes twice."""
    ids = torch.randperm(8900, generator=torch.Generator().manual_seed(1))[: count * size] + 10
    pieces = Pieces((len(ids),))
    return Text(ids, ids[:0], pieces, pieces, "token", None, ids, "words", "", MARKS)


def test_a_passage_is_found_where_its_tokens_are_left_and_at_no_other_length() -> None:
    ruler = RetrievalSuite.of(documents(10, 80), (16, 32, 64))
    assert ruler.passage == 4
    assert ruler.documents.shape == (10, 64 - 2 + 4 * 4)
    for length in ruler.lengths:
        rest = ruler._cut(ruler._rest(length), None)
        assert rest.shape == (10, length)
        passages = torch.cat(ruler._passages(length), dim=1)
        assert not torch.isin(passages, rest).any(), "the passages are cut out"
        assert torch.isin(passages, ruler.documents).all()
    reading = ruler.measure(Bag())
    assert reading.found(64) < 0.5, "words that are not there tell nothing"


def test_what_is_cut_is_not_found() -> None:
    ruler = RetrievalSuite.of(documents(10, 80), (16, 32, 64))
    last = ruler._places(64)[1][-1]
    repeated = ruler.documents.clone()
    repeated[:, last - 4 : last] = repeated[:, last : last + 4]  # told once more, just before
    ruler = replace(ruler, documents=repeated)
    whole, cut = ruler.measure(Bag()), ruler.measure(Bag(), limit=32)
    assert whole.needles[64][3] == 1
    assert cut.needles[64][3] < 0.5
    assert len(whole.windows) == 10
    assert sum(whole.windows) / 10 == pytest.approx(whole.found(64))


def test_short_texts_are_refused(text: Text) -> None:
    short = replace(text, measured=text.measured[:200])
    with pytest.raises(DataError, match=r"at least 256 bytes, to test contexts of 64"):
        MaskedSuite.of(short, (8, 64), seed=0)
    with pytest.raises(DataError, match=r"at least 560 bytes, for 8 documents of 64"):
        RetrievalSuite.of(short, (8, 64))
    with pytest.raises(ArgumentError, match="a token that hides others"):
        MaskedSuite.of(replace(text, special=SpecialTokens()), (8, 64), seed=0)


@pytest.fixture(scope="module", params=[LiveMaskedLM, LiveEncoder])
def outcome(request: pytest.FixtureRequest, text: Text) -> ExtensionResult:
    tiny = subject(request.param)
    methods = methods_for("all,log_n", tiny.model, length=LENGTH)
    return measure_extensions(tiny, text, methods, factor=3, tuning=TUNING, always=True)


def test_every_method_that_fits_is_measured_beside_the_cut_original(
    outcome: ExtensionResult,
) -> None:
    study = outcome.study
    tables = [f"{name}@prefix=1" for name in ("hierarchical", "interpolate", "random_tail")]
    assert [each.key for each in study.findings] == ["cut", *tables, "segments", "log_n"]
    assert "one that changes the table alone" in study.findings[-1].refusal
    assert study.lengths == (8, 16, 32, 48)
    served = {each.key: each.served for each in study.findings}
    assert served["hierarchical@prefix=1"] == "table"
    assert not next(each for each in study.findings if each.key == "segments").writable
    readings = {each.key: reading for each, reading in study.ranked()}
    metric = study.deciding
    for key in ("hierarchical@prefix=1", "random_tail@prefix=1", "segments"):
        for length in (8, 16):
            before = readings["cut"].of(metric)[length]
            assert readings[key].of(metric)[length] == pytest.approx(before, abs=1e-5)
    assert outcome.method.spec == study.chosen


def test_what_is_said_of_it(outcome: ExtensionResult, tmp_path: Path) -> None:
    study = replace(outcome.study, gate="")  # nothing was trained
    assert any(str(study.chosen) in text for text in answer(study))
    page = write_study(study, tmp_path / "report").read_text()
    for each, reading in study.ranked():
        assert f"<b>{each.key}</b>" in page
        assert study.deciding.shown(reading.of(study.deciding)[48]) in page
    assert "given 16 tokens and no more" in page
    masked = study.deciding.key == "loss"
    assert ("by depth and length</h2>" in page) != masked
    assert (tmp_path / "report/position.png").exists() == masked


def test_evaluate_cuts_what_is_longer_than_the_table(text: Text) -> None:
    study = evaluate(subject(LiveEncoder), text)
    assert study.lengths == (8, 16, 32)
    (found,) = study.findings
    assert found.key == "cut"
    assert "Given 16 bytes of longer texts" in study_page(study).render()
    study = evaluate(subject(LiveMaskedLM), text, lengths=[8, 16])
    assert study.deciding.unit == "bits per masked byte"
    assert "of longer texts" not in study_page(study).render()


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("yarn", {}, "rope, which yarn stretches"),
        ("log_n", {}, "the table alone"),
        ("hierarchical", {"factor": 99.0}, "factor"),
        ("random_tail", {"tuning": Tuning(steps=3)}, "0 for a bert"),
        ("random_tail", {"source": ImageSource(Path("photos"))}, "which reads text"),
    ],
)
def test_bad_input(text: Text, method: str, changes: dict[str, Any], message: str) -> None:
    given = {"factor": 2.0, "tuning": TUNING} | changes
    source = given.pop("source", text)
    with pytest.raises((ArgumentError, NotApplicable), match=message):
        measure_extensions(subject(LiveEncoder), source, [Method.parse(method)], **given)


# sentence-transformers

FACTOR = 4
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{number}" for number in range(27)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of words that answers its class token, projected and normalised, of short texts."""
    library = pytest.importorskip("sentence_transformers")
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    words = SPECIAL + WORDS
    sizes = {"vocab_size": len(words), "intermediate_size": 16, "initializer_range": 0.5}
    build("BertModel", SIZES, **sizes).save_pretrained(folder / "bert")
    tokenizer = word_tokenizer(words)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    named = {f"{token[1:-1].lower()}_token": token for token in SPECIAL}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=LENGTH, **named)
    wrapped.save_pretrained(folder / "bert")
    modules = library.sentence_transformer.modules
    transformer = modules.Transformer(str(folder / "bert"))
    parts = [transformer, modules.Pooling(16, pooling_mode="cls"), modules.Dense(16, 8)]
    made = library.SentenceTransformer(modules=[*parts, modules.Normalize()], device="cpu")
    made.save(str(folder / "sentences"))
    beside = {"max_seq_length": LENGTH, "do_lower_case": False}  # as older versions wrote it
    path = folder / "sentences/sentence_bert_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | beside))
    return folder / "sentences"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_sentence_transformers_reads_all_of_longer_texts(encoder: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    given = {"methods": "interpolate", "factor": float(FACTOR), "report": False}
    extend_checkpoint(encoder, tmp_path / "out", **given)
    folders = (str(folder) for folder in (encoder, tmp_path / "out"))
    before, after = (library.SentenceTransformer(folder, device="cpu") for folder in folders)
    assert list(map(type, after)) == list(map(type, before))
    assert after[1].get_config_dict() == before[1].get_config_dict()
    assert torch.equal(after[2].linear.weight, before[2].linear.weight)
    assert (before.max_seq_length, after.max_seq_length) == (LENGTH, FACTOR * LENGTH)
    start, *ends = (" ".join(words) for words in (WORDS[:20], WORDS[20:23], WORDS[23:]))
    texts = [f"{start} {end}" for end in ends]  # alike up to the old length, and past it
    cut, whole = (model.encode(texts, convert_to_tensor=True) for model in (before, after))
    assert torch.equal(cut[0], cut[1])
    assert (whole[0] - whole[1]).abs().max() > 1e-3
    torch.testing.assert_close(whole.norm(dim=1), torch.ones(2))
