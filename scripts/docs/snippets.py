"""Code to paste for an encoding: posenc's layer, tensors for another attention, transformers."""

from __future__ import annotations

import posenc
from posenc.encoding import Encoding, ValueTerm, ValueTransform
from posenc.encoding.entry import Entry
from posenc.registry import ENCODINGS

DIM, HEADS, TOKENS, SIDE = 64, 4, 16, 4
SIZES = {"dim": DIM, "heads": HEADS, "max_length": 128}


def settings(name: str) -> dict[str, object]:
    """Arguments of ``create`` in the examples."""
    entry = ENCODINGS[name]
    parameters = entry.parameters()
    needed = {
        option: entry.sample[option]
        for option, parameter in entry.options().items()
        if parameter.default is parameter.empty
    }
    given: dict[str, object] = {
        size: value
        for size, value in SIZES.items()
        if size in parameters or (size != "max_length" and "head_dim" in parameters)
    }
    if "causal" in parameters:
        given["causal"] = entry.claims.serves(1)
    if "axes" in parameters and not entry.claims.serves(1):
        given["axes"] = 2
    return given | needed


def created(name: str) -> str:
    """The call of ``posenc.create``."""
    arguments = "".join(f", {key}={value!r}" for key, value in settings(name).items())
    return f'posenc.create("{name}"{arguments})'.replace("'", '"')


def make(name: str) -> Encoding:
    """The encoding of the examples."""
    return posenc.create(name, **settings(name))  # type: ignore[arg-type]


def layout(entry: Entry) -> tuple[str, bool]:
    """Code of the examples' layout, and whether attention is causal in it."""
    if entry.claims.serves(1):
        return f"Layout.sequence({TOKENS})", True
    if entry.claims.serves(2):
        return f"Layout.image({SIDE}, {SIDE})", False
    return f"Layout.at(torch.arange({TOKENS}.0).view(1, -1, 1).expand(1, -1, 3))", True


def layer(name: str) -> str:
    """An attention layer of posenc with the encoding."""
    where, causal = layout(ENCODINGS[name])
    return f"""import torch
import posenc
from posenc import Layout

encoding = {created(name)}
attention = posenc.Attention(dim={DIM}, heads={HEADS}, encoding=encoding, causal={causal})
layout = {where}
x = torch.randn(1, {TOKENS}, {DIM})
{_embedded(make(name), name)}out = attention(x, layout)  # [1, {TOKENS}, {DIM}]
"""


def tensors(name: str) -> str:
    """Arguments of PyTorch's own attention, from the encoding."""
    encoding, (where, causal) = make(name), layout(ENCODINGS[name])
    lines = [_embedded(encoding, name)]
    if _observes(encoding):
        lines.append(
            "layout = encoding.observe(x, layout)  # what it reads from the layer's input\n"
        )
    lines.append(f"grid = Grid.of(layout, causal={causal})\n")
    lines.append(
        f"heads = x.unflatten(-1, ({HEADS}, -1)).transpose(1, 2)\n"
        "q, k, v = heads, heads, heads  # by your projections\n"
    )
    lines.append(f"scale = encoding.default_scale({DIM // HEADS})\n")
    query, key = "q", "k"
    if encoding.query_key is not None:
        query, key = "new_q", "new_k"
        lines.append("new_q, new_k = encoding.query_key(q, k, grid)\n")
    undone, values = "", "v"
    if isinstance(encoding.value, ValueTransform):
        values = "new_v"
        lines.append("new_v = encoding.value(v, layout)\n")
        undone = "out = encoding.value.undo(out, layout)\n"
    return f"""import torch
import posenc
from posenc import Grid, Layout
from torch.nn.functional import scaled_dot_product_attention

encoding = {created(name)}
layout = {where}
x = torch.randn(1, {TOKENS}, {DIM})
{"".join(lines)}{_attended(encoding, query, key, values)}{undone}"""


def _embedded(encoding: Encoding, name: str) -> str:
    if encoding.embedding is None:
        return ""
    tokens = ", tokens=torch.randint(256, x.shape[:2])" if name in READS_TOKENS else ""
    return f"x = encoding.embed(x, layout{tokens})\n"


READS_TOKENS = ("abacus",)


def _observes(encoding: Encoding) -> bool:
    return any(type(part).observe is not posenc.encoding.Part.observe for part in encoding.parts())


SDPA = "scaled_dot_product_attention({query}, {key}, {values}, attn_mask={mask}, scale=scale)"


def _attended(encoding: Encoding, query: str, key: str, values: str) -> str:
    """Attention from what the score and value parts give."""
    score = encoding.score
    value = encoding.value if isinstance(encoding.value, ValueTerm) else None
    if score is None and value is None:
        return f"out = {SDPA.format(query=query, key=key, values=values, mask='grid.visible')}\n"
    if score is not None and score.replaces_softmax:
        return (
            f"weights = encoding.score({query}, {key}, grid, scale=scale).exp()\n"
            f"out = weights.masked_fill(~grid.visible, 0.0) @ {values}\n"
        )
    if score is not None and score.by_position and value is None:
        return (
            "bias = encoding.bias(grid, scale=scale).masked_fill(~grid.visible, -torch.inf)\n"
            f"out = {SDPA.format(query=query, key=key, values=values, mask='bias')}\n"
        )
    term = f"encoding.score({query}, {key}, grid, scale=scale)"
    if value is None and score is not None and not score.replaces_product:
        return (
            f"bias = {term}.masked_fill(~grid.visible, -torch.inf)\n"
            f"out = {SDPA.format(query=query, key=key, values=values, mask='bias')}\n"
        )
    product = f"scale * {query} @ {key}.mT"
    if score is not None:
        product = term if score.replaces_product else f"{product} + {term}"
    lines = (
        f"logits = {product}\n"
        "weights = logits.masked_fill(~grid.visible, -torch.inf).softmax(-1)\n"
        f"out = weights @ {values}"
    )
    return lines + (" + encoding.value(weights, grid)\n" if value is not None else "\n")


def transformers(name: str) -> str:
    """A model of transformers with the encoding in place of positions of its own."""
    encoding, entry = make(name), ENCODINGS[name]
    where, causal = layout(entry)
    image = not causal
    body = IMAGES if image else TEXTS
    parts = [body.replace("CREATED", created(name))]
    if encoding.embedding is not None:
        parts.append(_hooked(encoding, name, image))
    if len(encoding.parts()) > (encoding.embedding is not None):
        parts.append(_attention(name, encoding, where, causal))
    return "".join(parts) + (RUN_IMAGES if image else RUN_TEXTS)


TEXTS = f"""import torch
import posenc
from posenc import Grid, Layout
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

sizes = {{"hidden_size": {DIM}, "num_attention_heads": {HEADS}, "num_key_value_heads": {HEADS}}}
sizes |= {{"num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 256}}
sizes |= {{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}}
sizes |= {{"no_rope_layers": [0, 0]}}  # without positions
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("smollm3", **sizes))
encoding = CREATED
model.encoding = encoding  # trained with it
"""

IMAGES = f"""import torch
import posenc
from posenc import Grid, Layout
from transformers import AttentionInterface, AutoConfig, AutoModel

sizes = {{"hidden_size": {DIM}, "num_attention_heads": {HEADS}, "num_hidden_layers": 2}}
sizes |= {{"intermediate_size": 128, "image_size": 64, "patch_size": 16}}
model = AutoModel.from_config(AutoConfig.for_model("vit", **sizes))
own = model.embeddings.position_embeddings
torch.nn.init.zeros_(own).requires_grad_(False)  # without positions
encoding = CREATED
model.encoding = encoding  # trained with it
"""

RUN_TEXTS = f"""
ids = torch.randint(256, (2, {TOKENS}))
loss = model(ids, labels=ids, use_cache=False).loss
loss.backward()
"""
RUN_IMAGES = """
states = model(torch.randn(2, 3, 64, 64)).last_hidden_state  # [2, 17, 64]
states.sum().backward()
"""


def _hooked(encoding: Encoding, name: str, image: bool) -> str:
    """The encoding of the embedding site, as a hook of the model."""
    if image:
        return """

def embed(module, inputs, output):
    return encoding.embed(output, Layout.image(4, 4))


model.embeddings.patch_embeddings.register_forward_hook(embed)
"""
    if encoding.embedding is not None and encoding.embedding.every_layer:
        return """

def embed(module, inputs):
    return (encoding.embed(inputs[0], Layout.sequence(inputs[0].shape[1])), *inputs[1:])


for layer in model.model.layers:
    layer.register_forward_pre_hook(embed)
"""
    tokens = ", tokens=inputs[0]" if name in READS_TOKENS else ""
    return f"""

def embed(module, inputs, output):
    return encoding.embed(output, Layout.sequence(output.shape[1]){tokens})


model.get_input_embeddings().register_forward_hook(embed)
"""


def _attention(name: str, encoding: Encoding, where: str, causal: bool) -> str:
    """posenc's attention with the encoding, under a name of transformers' interface."""
    where = where.replace(f"sequence({TOKENS})", "sequence(k.shape[2])")
    where = where.replace(f"({SIDE}, {SIDE})", f"({SIDE}, {SIDE}, prefix=1)")
    where = where.replace(f"{TOKENS}.0", "float(k.shape[2])")
    observed = remembered = ""
    if _observes(encoding):
        observed = "    layout = encoding.observe(module.inputs, layout)\n"
        remembered = """

def remember(module, args, kwargs):
    module.inputs = kwargs["hidden_states"]


for layer in model.model.layers:
    layer.self_attn.register_forward_pre_hook(remember, with_kwargs=True)
"""
    return f"""{remembered}

def attention(module, q, k, v, mask, **ignored):  # whole sequences, without padding
    layout = {where}
{observed}    out = posenc.attend(q, k, v, Grid.of(layout, causal={causal}), encoding)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("{name}", attention)
model.set_attn_implementation("{name}")
"""
