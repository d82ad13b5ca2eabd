"""posenc extend and posenc evaluate on models with a learned table: BERT, RoBERTa, ViT."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from posenc.transformers.checkpoints import Fields
from posenc.transformers.live import LiveEncoder, LiveMaskedLM
from tests.support.commands import printed, printed_json, refusal, run_command
from tests.support.tiny_models import build, word_tokenizer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "brown", "fox", "jumps"]
WORDS += ["over", "lazy", "dog", "."]
BERTS = word_tokenizer(WORDS)
BERTS.enable_truncation(9)
BERTS.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
TOKENIZER = BERTS.to_str()
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 32}
OF_WORDS = SIZES | {"vocab_size": len(WORDS), "max_position_embeddings": 16}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(5, len(WORDS), (1200,), generator=generator)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(WORDS[number] for number in drawn))
    return path


VIT = SIZES | {"image_size": 8, "patch_size": 4, "num_channels": 1}
VIT |= {"id2label": {0: "cat", 1: "dog", 2: "fox"}, "label2id": {"cat": 0, "dog": 1, "fox": 2}}
T5 = {"vocab_size": 14, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1}
MODELS = {
    "masked": ("BertForMaskedLM", OF_WORDS),
    "sentence": ("BertModel", OF_WORDS),
    "roberta": (
        "RobertaForMaskedLM",
        OF_WORDS | {"max_position_embeddings": 18, "pad_token_id": 1},
    ),
    "vit": ("ViTForImageClassification", VIT),
    "t5": ("T5ForConditionalGeneration", T5),
}


def made(folder: Path, kind: str) -> Path:
    """A random checkpoint as transformers writes it."""
    torch.manual_seed(0)
    model = build(*MODELS[kind])
    for name, weight in model.named_parameters():
        if "query" in name or "key" in name or "embeddings.position" in name:
            torch.nn.init.normal_(weight)  # else attention sees no difference
    if kind == "vit":
        torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(folder / kind)
    if kind != "vit":
        (folder / kind / "tokenizer.json").write_text(TOKENIZER)
    return folder / kind


def extend(folder: Path, methods: str, text: Path | None = None) -> tuple[str | Path, ...]:
    given = ("extend", folder, "--method", methods, "--factor", "2", "--always")
    return given if text is None else (*given, "--text", text)


@pytest.mark.parametrize("kind", ["masked", "sentence"])
def test_a_text_encoder_with_a_report(text: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    study = printed_json(*extend(made(tmp_path, kind), "all", text), "--out", out)
    assert study["lengths"] == [8, 16, 32]
    (metric,) = study["metrics"]
    assert metric["key"] == ("loss" if kind == "masked" else "needles")
    assert "hierarchical@prefix=1" in {each["key"] for each in study["findings"]}
    assert (out / "report/index.html").exists()
    assert (out / "tokenizer.json").exists()
    tokens = torch.randint(5, len(WORDS), (1, 32))
    opened = {"masked": LiveMaskedLM, "sentence": LiveEncoder}[kind]
    longer = opened.open(Fields.read(out), device="cpu")
    assert longer(tokens).shape[1] == 32
    if study["transformers"]:
        assert longer.model.config.max_position_embeddings == 32


def test_rows_of_a_roberta_that_are_no_positions_are_kept(text: Path, tmp_path: Path) -> None:
    """Two before the first position."""
    roberta, out = made(tmp_path, "roberta"), tmp_path / "out"
    study = printed_json(*extend(roberta, "interpolate@prefix=1", text), "--out", out)
    assert study["length"] == 16
    assert [each["key"] for each in study["findings"]] == ["cut", "interpolate@prefix=1"]
    before, after = (
        transformers.RobertaForMaskedLM.from_pretrained(path).roberta.embeddings
        for path in (roberta, out)
    )
    rows, longer = (module.position_embeddings.weight for module in (before, after))
    assert len(longer) == 34
    torch.testing.assert_close(longer[:3], rows[:3])
    torch.testing.assert_close(longer[-1], rows[-1])


def test_a_causal_model_with_a_table(text: Path, tmp_path: Path) -> None:
    """GPT-2: beyond its table it is compared with itself in segments."""
    torch.manual_seed(0)
    sizes = {"vocab_size": len(WORDS), "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    build("GPT2LMHeadModel", sizes).save_pretrained(tmp_path / "gpt2")
    (tmp_path / "gpt2/tokenizer.json").write_text(TOKENIZER)
    given = extend(tmp_path / "gpt2", "interpolate", text)
    study = printed_json(*given, "--out", tmp_path / "out")
    assert [each["key"] for each in study["findings"]] == ["cut", "interpolate"]
    longer = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert longer.config.n_positions == len(longer.transformer.wpe.weight) == 32


def test_a_vit_with_a_report(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for name in ("cat", "fox"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(4):
            pixels = rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)
            image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    vit = made(tmp_path, "vit")
    (vit / "preprocessor_config.json").write_text('{"image_mean": [0.2], "image_std": [0.3]}')
    photos = ("--images", tmp_path / "photos")
    study = printed_json(*extend(vit, "all"), *photos, "--out", tmp_path / "out")
    assert [metric["key"] for metric in study["metrics"]] == ["right", "agreement", "cosine"]
    measured = study["findings"][1]["untuned"]
    loader = transformers.ViTForImageClassification.from_pretrained
    theirs = loader(vit).eval()
    right = 0
    for path in sorted((tmp_path / "photos").rglob("*.png")):
        pixels = np.asarray(image.open(path).convert("L"), dtype=np.float32)
        normal = (torch.tensor(pixels)[None, None] / 255 - 0.2) / 0.3
        how = {"size": (16, 16), "mode": "bilinear", "antialias": True}
        shown = torch.nn.functional.interpolate(normal, **how)
        with torch.inference_mode():
            logits = theirs(shown, interpolate_pos_encoding=True).logits
        right += int(logits.argmax()) == {"cat": 0, "fox": 2}[path.parent.name]
    assert measured["right"]["16"] == pytest.approx(right / 8), "as transformers interpolates"
    assert loader(tmp_path / "out").config.image_size in (16, [16, 16])
    seen = ("--lengths", "16", "--out", tmp_path / "seen", "--json")
    done = run_command("evaluate", vit, *photos, *seen)
    assert (done.returncode == 2) == ("a better accuracy than 33%" in done.stderr), done.stderr
    found = json.loads(done.stdout)["findings"][0]["untuned"]["right"]
    assert found == {size: measured["right"][size] for size in ("8", "16")}


@pytest.mark.parametrize(
    ("command", "kind", "arguments", "message"),
    [
        ("extend", "vit", (), "--images: expected images, which such a model is measured on"),
        ("evaluate", "vit", ("--text", "a.txt"), "--text: expected none, for a vit"),
        ("extend", "sentence", ("--images", "photos"), "--images: expected none, for a bert"),
        ("extend", "sentence", ("--finetune-steps", "2"), "--finetune-steps: expected 0"),
        ("extend", "sentence", ("--trained-length", "8"), "16, which its table of positions has"),
        ("extend", "sentence", ("--factor", "16"), "text: expected at least"),
        ("extend", "sentence", ("--method", "all", "--no-report"), "--no-report: expected one"),
        ("extend", "sentence", ("--method", "segments"), "a method that a checkpoint can hold"),
        ("extend", "masked", ("--method", "log_n"), "the table alone"),
        ("evaluate", "t5", (), "a model that can be measured"),
    ],
)
def test_bad_input_is_told(
    text: Path, tmp_path: Path, command: str, kind: str, arguments: tuple[str, ...], message: str
) -> None:
    given = [made(tmp_path, kind), *arguments]
    if kind != "vit":
        given += ["--text", text]
    if command == "extend" and "--method" not in arguments:
        given += ["--method", "interpolate" if kind == "vit" else "hierarchical"]
    assert message in refusal(command, *given, "--out", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [kind], "nothing is written"


def test_a_tokenizer_without_a_mask_is_refused(text: Path, tmp_path: Path) -> None:
    bert = made(tmp_path, "masked")
    (bert / "tokenizer.json").write_text(TOKENIZER.replace("[MASK]", "[HIDE]"))
    arguments = ("evaluate", bert, "--text", text, "--out", tmp_path / "out")
    assert "a token that hides others" in refusal(*arguments)
    (bert / "tokenizer_config.json").write_text('{"mask_token": {"content": "[HIDE]"}}')
    said = " ".join(run_command(*arguments).stderr.split())
    assert "a better loss than" in said, "nothing is trained here"
    (bert / "tokenizer_config.json").write_text("[")
    assert "expected a JSON object" in refusal(*arguments[:-1], tmp_path / "again")


def test_without_a_report_nothing_is_measured(tmp_path: Path) -> None:
    given = ("--method", "hierarchical", "--no-report", "--out", tmp_path / "longer")
    told = printed("extend", made(tmp_path, "sentence"), *given)
    assert "transformers runs it as stretched" in told
    assert not (tmp_path / "longer/report").exists()
    load = transformers.AutoModel.from_pretrained
    bert = load(tmp_path / "longer")
    assert bert(torch.zeros(1, 64, dtype=torch.int64)).last_hidden_state.shape == (1, 64, 16)
    vit = made(tmp_path, "vit")
    for method, side, image in (
        ("interpolate", ("--factor", "2"), (16, 16)),
        ("interpolate@size=(3,5)", (), (12, 20)),
    ):
        out = tmp_path / f"{image}"
        printed("extend", vit, "--method", method, *side, "--out", out, "--no-report")
        wider = load(out, add_pooling_layer=False)
        cells = image[0] * image[1] // 16
        assert wider(torch.zeros(1, 1, *image)).last_hidden_state.shape == (1, cells + 1, 16)
