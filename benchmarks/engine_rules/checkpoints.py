"""Small checkpoints of every family and method, and their logits in transformers.

Weights are random and large enough that every rotation other than the right one changes logits by
tenths or more. No window hides a token, every expert has its share of every token, so that logits
depend on nothing that rounding could turn. Caps of logits are far above them and heads have the
usual scale, so that programs that read neither differ by the rotation alone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from posenc.errors import PosencError
from posenc.lab.evaluation.extend import extend_checkpoint
from posenc.transformers.engines import EngineRotation, ModelConfig
from posenc.transformers.engines.serving import gguf_keys
from posenc.transformers.stretching.frequencies import frequencies_in

TRAINED, FACTOR = 128, 4
SHORT, LONG = 100, 500
"""Tokens of the texts: one within the trained length, one up to the extended."""

VOCABULARY = 256
BOS, EOS, PAD = 1, 2, 0

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": TRAINED,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 64,
    "attn_logit_softcapping": 1e4,
    "final_logit_softcapping": 1e4,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
EXPERTS = {
    "num_experts": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
LATENT = {
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "num_key_value_heads": 2,
    "n_routed_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
}
BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
FOUR = {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
"""Layers with windows and without; programs that do not read which take every fourth as full."""

OWN: dict[str, dict[str, Any]] = {
    "apertus": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 12e6},
        "mlp_bias": False,
        "post_norm": False,
        "qk_norm": True,
    },
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "youtu"), LATENT),
    "minicpm3": LATENT | {"tie_word_embeddings": False},
    "glm4_moe_lite": LATENT | {"mlp_layer_types": ["dense", "dense"]},
    "minimax_m2": {"rotary_dim": 64, "shared_intermediate_size": 0},
    "nanochat": {"num_key_value_heads": 2},
    "olmoe": {"num_key_value_heads": 2},
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
    "phi": {"num_key_value_heads": 2, "intermediate_size": 512},
    "falcon": {"head_dim": None, "num_kv_heads": 1, "multi_query": True, "alibi": False},
    "glm": {"rms_norm_eps": 1e-5},
    "gpt_neox": {"intermediate_size": 512},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 15e4}},
    "gemma2": BOTH,
    "gemma3_text": {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
    **dict.fromkeys(("mellum", "olmo3"), FOUR),
    "afmoe": FOUR | {"mup_enabled": True},
    "bitnet": {"tie_word_embeddings": True},
    "cohere2": FOUR | {"rotary_pct": 1.0},
    "exaone4": FOUR | {"sliding_window_pattern": "LLLG"},
    "laguna": {"num_hidden_layers": 4, "layer_types": FOUR["layer_types"][::-1]},
    "ernie4_5_moe": {"moe_num_shared_experts": 1},
    "granitemoehybrid": {"layer_types": ["attention", "attention"]},
    "phi3": {"original_max_position_embeddings": TRAINED},
}
"""Fields of families beside the sizes."""

METHODS = (
    "original",
    "interpolate",
    "ntk",
    "ntk_by_parts",
    "llama3",
    "yarn",
    "yarn@temperature=1.4",
    "yarn@alpha=0.5@beta=4",
    "yarn@truncate=False",
    "longrope",
    "dynamic_ntk",
)
SAVED = ("extended", "plain")
"""As ``posenc extend`` writes a config, for other engines too, and as transformers saves it."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder and its logits.

    Args:
        family, method, saved: that it is of.
        folder: with ``tokens.json``, token ids by length.
    """

    family: str
    method: str
    saved: str
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.family}/{self.method}/{self.saved}"

    @property
    def fields(self) -> dict[str, Any]:
        """``config.json``."""
        return dict(json.loads((self.folder / "config.json").read_text()))

    def tokens(self) -> dict[int, list[int]]:
        """Token ids by length."""
        texts = json.loads((self.folder / "tokens.json").read_text())
        return {int(length): ids for length, ids in texts.items()}

    def log_probabilities(
        self, rotations: Mapping[int, Mapping[str, EngineRotation]] | None = None
    ) -> dict[int, Float[Tensor, "L V"]] | None:
        """Log-probabilities by transformers, by length.

        Args:
            rotations: by length and layer type, in place of the model's own.

        Returns:
            None if the model cannot rotate by them, since they are of another number of pairs.
        """
        found = {}
        for length, ids in self.tokens().items():
            model = AutoModelForCausalLM.from_pretrained(
                self.folder, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            if rotations is not None and not rotated_by(model, rotations[length]):
                return None
            with torch.no_grad():
                logits = model(torch.tensor([ids]), use_cache=False).logits[0]
            found[length] = logits.log_softmax(-1)
        return found


def rotated_by(model: PreTrainedModel, rotations: Mapping[str, EngineRotation]) -> bool:
    """Make a model rotate by these, of each layer type; False if it cannot."""
    for frequencies in frequencies_in(model):
        rotation = rotations.get(frequencies.layer_type, rotations.get(""))
        if rotation is None or len(rotation.frequencies) != len(frequencies.theta()):
            return False
        frequencies.value.copy_(torch.tensor(rotation.frequencies).view_as(frequencies.value))
        module = frequencies.module
        setattr(module, frequencies.gain_name, rotation.gain)
        fixed = "default"  # not computed anew by length
        kinds = getattr(module, "rope_type", fixed)
        _scale_logits(model, rotation.scale)
        module.rope_type = dict.fromkeys(kinds, fixed) if isinstance(kinds, Mapping) else fixed
    return True


def _scale_logits(model: PreTrainedModel, scale: float) -> None:
    for module in model.modules():
        if scale != 1 and isinstance(getattr(module, "scaling", None), float):
            module.scaling *= scale


def small_model(family: str) -> PreTrainedModel:
    """A model with random weights, the same in every run."""
    torch.manual_seed(0)
    default = CONFIG_MAPPING[family]()
    usual = {k: v for k, v in (SIZES | EXPERTS).items() if k == "head_dim" or hasattr(default, k)}
    fields = usual | OWN.get(family, {})  # programs take a field that a model has not for its own
    config = CONFIG_MAPPING[family](**{k: v for k, v in fields.items() if v is not None})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.1)
    return model.eval()


def small_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    named = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{name: alphabet[i] for name, i in named.items()}
    )


def written(family: str, methods: tuple[str, ...], work: Path) -> list[Checkpoint]:
    """The checkpoints of a family, written anew; methods that do not fit it are left out."""
    folder = work / family
    shutil.rmtree(folder, ignore_errors=True)
    original = folder / "model"
    small_model(family).save_pretrained(original)
    small_tokenizer().save_pretrained(original)
    checkpoints = []
    for method in methods:
        extended, plain = (folder / method / saved for saved in SAVED)
        if method == "original":
            shutil.copytree(original, plain)
            kinds = [plain]
        else:
            try:
                extend_checkpoint(
                    original,
                    extended,
                    methods=method,
                    factor=float(FACTOR),
                    trained_length=TRAINED,
                    report=False,
                )
            except PosencError:
                continue
            config = AutoConfig.from_pretrained(extended)
            shutil.copytree(extended, plain, copy_function=os.link)
            (plain / "config.json").unlink()
            _as_transformers_saves(config).save_pretrained(plain)
            _write_options(extended)
            kinds = [extended, plain]
        texts = [SHORT] if method == "original" else [SHORT, LONG]
        for one in kinds:
            generator = torch.Generator().manual_seed(1)
            ids = torch.randint(3, VOCABULARY, (LONG,), generator=generator).tolist()
            (one / "tokens.json").write_text(json.dumps({n: ids[:n] for n in texts}))
            checkpoints.append(Checkpoint(family, method, one.name, one))
    return checkpoints


def _write_options(folder: Path) -> None:
    """Write the keys that the printed command of llama.cpp gives beside the file."""
    fields = json.loads((folder / "config.json").read_text())
    keys = gguf_keys(ModelConfig.of(fields), goal=FACTOR * TRAINED) or {}
    given = {key: value for key, (value, _) in keys.items() if key.endswith(".attn_factor")}
    (folder / "override_kv.json").write_text(json.dumps(given))


def _as_transformers_saves(config: Any) -> Any:
    """The config without the names that posenc writes beside RoPE's parameters."""
    for name in ("rope_theta", "rope_scaling", "partial_rotary_factor"):
        if name in config.__dict__:
            delattr(config, name)
    return config
