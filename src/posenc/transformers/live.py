"""Models of text and of images that transformers runs, stretched in place."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from posenc.encoding import Encoding
from posenc.errors import ArgumentError, CheckpointError
from posenc.layout import Layout
from posenc.models import Greedy, Sample
from posenc.transformers.calls import CACHE, cache_name, names_of
from posenc.transformers.checkpoints import FIELD, Fields, fitting, require_extension, stored_shapes
from posenc.transformers.engines.config import WINDOWS, ModelConfig
from posenc.transformers.engines.transformers import TRANSFORMERS
from posenc.transformers.settings import quiet_transformers, settings_kept

POOLER = "pooler."
"""Start of the names of weights that no measurement needs."""


class LiveModel(nn.Module):
    """A model of transformers, called as posenc's models are.

    Args:
        model: in eval mode.
        served: ``rope_type`` of a stretched one in transformers, or ``table``; "": posenc only, or
            not stretched.
    """

    auto: ClassVar[str]
    """Class of transformers that loads it."""

    architectures: ClassVar[str]
    """Table of transformers with the names of its classes."""

    words: ClassVar[str]
    """Description of such a model."""

    def __init__(self, model: Any, *, served: str = "") -> None:
        super().__init__()
        self.model, self.served = model, served

    @classmethod
    def open(cls, fields: Fields, *, device: str, dtype: torch.dtype | str = torch.float32) -> Self:
        """Load a folder by transformers from safetensors; ``"auto"``: in the dtype of its weights.

        Args:
            fields: its ``config.json``.

        Raises:
            CheckpointError: if it cannot be loaded, or a weight is missing.
        """
        import transformers

        folder = fields.path.parent
        absent: list[str] = []
        try:
            stored_shapes(folder)
            for options in ({}, {"add_pooling_layer": False}):
                with quiet_transformers():
                    model, loading_info = getattr(transformers, cls.auto).from_pretrained(
                        folder,
                        dtype=dtype,
                        use_safetensors=True,
                        trust_remote_code=False,
                        output_loading_info=True,
                        **options,
                    )
                absent = [*loading_info["missing_keys"], *map(str, loading_info["mismatched_keys"])]
                if not absent or not all(name.startswith(POOLER) for name in absent):
                    break
            if absent:
                raise ValueError(f"no {absent[0]}")  # transformers would draw it at random
        except CheckpointError:  # of what is stored, which names what is missing
            raise
        except Exception as error:  # of any model type
            raise CheckpointError(
                str(folder),
                expected=f"{cls.words} that transformers loads",
                got=_unknown_scaling(fields)
                or _misfit(cls.auto, folder)
                or " ".join(f"{type(error).__name__}: {error}".split()),
                remedy="Correct its config.json, or name a folder written by save_pretrained.",
            ) from error
        if fields.values.get(FIELD) is not None:
            from posenc.transformers.stretching import stretch

            require_extension(fields)
            with fitting(fields):
                stretch(model)
        return cls(model.to(device).eval())

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.model.config.get_text_config().vocab_size)

    @cached_property
    def biases(self) -> list[Any]:
        """Biases by distance of its layers (``stretching.biases.LinearBias``)."""
        from posenc.transformers.stretching.tables import biases_in

        return [] if self.model.main_input_name == "pixel_values" else biases_in(self.model)

    @cached_property
    def rotates(self) -> bool:
        """True for a model that rotates queries and keys."""
        from posenc.transformers.stretching.frequencies import frequencies_in

        if any(bias.linear for bias in self.biases):
            return False
        return any(True for _ in frequencies_in(self.model))

    @cached_property
    def table(self) -> Any:
        """The learned position table (``stretching.tables.LearnedTable``); None: there is none."""
        from posenc.transformers.stretching.tables import tables_in

        return None if self.rotates else next(iter(tables_in(self.model)), None)

    @property
    def _first(self) -> int:
        """Row of the first position in its table."""
        return 0 if self.table is None else int(self.table.prefix)

    @property
    def most(self) -> int | None:
        """Number of positions in its table; None: it has none."""
        return None if self.table is None else len(self.table.rows) - self.table.prefix

    def trained_encoding(self) -> Encoding:
        """The rotation of layers that see everything, the table, or the linear bias.

        Raises:
            ArgumentError: for a model with neither.
        """
        from posenc.transformers.stretching.frequencies import frequencies_in, windowed

        if self.rotates:
            for frequencies in frequencies_in(self.model):
                if not windowed(frequencies.layer_type):
                    return frequencies.encoding("frequencies")
        for part in [self.table] if self.table else self.biases:
            encoding: Encoding = part.encoding()
            return encoding
        raise ArgumentError(
            "checkpoint",
            expected="a model with rotary frequencies, a table of positions or linear biases",
            got=type(self.model).__name__,
            remedy="posenc evaluate measures it as it is.",
        )

    def extended(
        self, method: str, *, factor: float | None, length: int | None, options: Mapping[str, Any]
    ) -> Self:
        """The model stretched by a method; weights are shared.

        Args:
            method, factor, length: see ``stretch``.
            options: of the method; ``prefix`` counts positions.

        Raises:
            ArgumentError: if it does not fit.
        """
        from posenc.transformers.stretching import stretch

        if "prefix" in options:
            options = {**options, "prefix": options["prefix"] + self._first}
        extended = evaluation_copy(self.model)
        report = stretch(extended, method, factor=factor, length=length, **options)
        served = ""
        if report.place == "tables" and report.saved_as:
            served = "table"
        elif report.saved_as == "transformers":
            parameters = extended.config.get_text_config().rope_parameters
            kinds = parameters.get("rope_type") or [p["rope_type"] for p in parameters.values()]
            served = kinds if isinstance(kinds, str) else max(kinds, key=lambda k: k != "default")
        return type(self)(extended, served=served)

    def write(self, folder: Path, *, dtype: torch.dtype) -> None:
        """Write it as ``save_pretrained`` does, in this dtype."""
        with quiet_transformers():
            self.model.to(dtype).save_pretrained(folder)

    def _positions(self, tokens: Int[Tensor, "B L"], layout: Layout | None) -> dict[str, Any]:
        """The option of the model that says where tokens are.

        Raises:
            ArgumentError: if it has none.
        """
        if layout is None:
            return {}
        positions = layout.positions[..., 0].long().expand(len(tokens), -1)
        if "position_ids" in signature(self.model.forward).parameters:
            return {"position_ids": positions + self._first}
        if bool((positions == torch.arange(positions.shape[1], device=positions.device)).all()):
            return {}
        raise ArgumentError(
            "positions",
            expected=f"plain, as {type(self.model).__name__} takes no others",
            got="others",
            remedy="Use --positions plain.",
        )


class _PreallocatedLayer(DynamicLayer):
    """Keys and values in memory for a known number of tokens, written in place.

    Layers of a window keep all keys too, so that tokens can be taken back; their masks hide what
    lies before it.

    Args:
        capacity: in tokens.
        shown: of the tokens before a pass, the last that it sees.
    """

    def __init__(self, capacity: int, shown: int) -> None:
        super().__init__()
        self.capacity, self.shown, self.filled = capacity, shown, 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        new = key_states, value_states
        if not self.is_initialized:
            self.lazy_initialization(*new)
            self.memory = [x.new_empty(*x.shape[:2], self.capacity, x.shape[3]) for x in new]
        begin, self.filled = self.filled, self.filled + key_states.shape[2]
        for held, x in zip(self.memory, new, strict=True):
            held[:, :, begin : self.filled] = x
        first = max(0, begin - self.shown)
        self.keys, self.values = (held[:, :, first : self.filled] for held in self.memory)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.filled

    def get_mask_sizes(self, *arguments: Any) -> tuple[int, int]:
        new, _ = super().get_mask_sizes(*arguments)
        hidden = max(0, self.filled - self.shown)
        return new - hidden, hidden

    def crop(self, max_length: int) -> None:
        self.filled = max_length if max_length >= 0 else self.filled + max_length


class LiveDecoder(LiveModel):
    """A causal language model of transformers, called as posenc's decoders are.

    Args:
        model, served: see ``LiveModel``.
        window: attention is cut to the last tokens, as many as this.
    """

    auto, architectures = "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
    words = "a causal language model"

    def __init__(self, model: Any, *, served: str = "", window: int | None = None) -> None:
        super().__init__(model, served=served)
        self.window = window

    @property
    def windowed(self) -> bool:
        """True if some layers see a window already."""
        config = self.model.config.get_text_config()
        return any(getattr(config, name, None) is not None for name in WINDOWS)

    def forward(
        self,
        tokens: Int[Tensor, "B L"],
        layout: Layout | None = None,
        *,
        last: int = 0,
        cache: Cache | None = None,
    ) -> Float[Tensor, "B M V"]:
        """Logits of the next token, after all tokens or the ``last`` alone if the model can.

        Args:
            cache: of the tokens before these, which are added to it.
        """
        options = self._positions(tokens, layout)
        names = names_of(self.model.forward)
        if last and "logits_to_keep" in names:
            options["logits_to_keep"] = last
        if cache is not None:
            options[cache_name(names) or CACHE] = cache
        elif self.window is not None:
            visible = torch.ones(
                2 * tokens.shape[1:], dtype=torch.bool, device=tokens.device
            ).tril()
            visible = visible.triu(1 - self.window).expand(len(tokens), 1, -1, -1)
            lowest = torch.finfo(self.model.dtype).min
            mask = torch.zeros_like(visible, dtype=self.model.dtype)
            options["attention_mask"] = mask.masked_fill(~visible, lowest)
        options["use_cache"] = cache is not None
        logits: Tensor = self.model(input_ids=tokens, **options).logits
        return logits

    def cache(self, capacity: int, step: int) -> Cache:
        """An empty cache for so many tokens, of which ``crop(-n)`` takes back the last n.

        Args:
            step: tokens of a pass; with a window, the first of them see ``step - 1`` fewer.
        """
        layers = DynamicCache(config=self.model.config).layers
        shown = capacity if self.window is None else self.window - step
        return Cache(layers=[_PreallocatedLayer(capacity, shown) for _ in layers])

    @property
    def varies(self) -> bool:
        """True if its rotation depends on the length of the text."""
        from posenc.transformers.stretching.frequencies import frequencies_in, varies

        kinds = (frequencies.rope_type for frequencies in frequencies_in(self.model))
        return any(map(varies, (self.served, *kinds)))

    @torch.no_grad()
    def generate(
        self, tokens: Int[Tensor, "B L"], most: int, sampling: Greedy | Sample
    ) -> Int[Tensor, "B M"]:
        """The tokens with at most so many new ones, as the model's own ``generate`` adds them.

        Its random state is seeded by ``sampling``; that of the process is left alone.
        """
        options: dict[str, Any] = {"do_sample": False}
        with torch.random.fork_rng(), quiet_transformers():
            if isinstance(sampling, Sample):
                if sampling.generator is not None:
                    torch.manual_seed(sampling.generator.initial_seed())
                options = {"do_sample": True, "temperature": sampling.temperature}
                options |= {"top_k": sampling.top_k or 0, "top_p": sampling.top_p}
            done: Tensor = self.model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=most,
                **options,
            )
        return done

    def cut(self, window: int) -> LiveDecoder:
        """The model with this attention window; weights are shared."""
        return LiveDecoder(self.model, window=window)


class LiveMaskedLM(LiveModel):
    """A masked language model of transformers, called as posenc's are."""

    auto, architectures = "AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"
    words = "a masked language model"

    def forward(
        self, tokens: Int[Tensor, "B L"], layout: Layout | None = None
    ) -> Float[Tensor, "B L V"]:
        """Logits of each token."""
        logits: Tensor = self.model(input_ids=tokens, **self._positions(tokens, layout)).logits
        return logits


class LiveEncoder(LiveModel):
    """A model of transformers that answers vectors of tokens."""

    auto, architectures, words = "AutoModel", "MODEL_MAPPING_NAMES", "a model of text or images"

    def forward(
        self, tokens: Int[Tensor, "B L"], layout: Layout | None = None
    ) -> Float[Tensor, "B L C"]:
        """A vector of each token."""
        output = self.model(input_ids=tokens, **self._positions(tokens, layout))
        vectors: Tensor = output.last_hidden_state
        return vectors


def evaluation_copy(model: Any) -> Any:
    """A copy of a transformers model that shares its weights."""
    tensors = chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _unknown_scaling(fields: Fields) -> str:
    """The kind of RoPE that transformers does not know, in words; "" if there is none."""
    ropes = ModelConfig.of(fields.values).ropes().values()
    names = sorted({rope.kind for rope in ropes} - set(TRANSFORMERS.kinds))
    return f"rope_type {names[0]!r}, which transformers does not know" if names else ""


def _misfit(auto: str, folder: Path) -> str:
    """The first weight that has another shape than its config gives it, in words; "": none."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        stored = stored_shapes(folder)
        with torch.device("meta"), quiet_transformers():
            made = getattr(transformers, auto).from_config(config, trust_remote_code=False)
            wanted = made.state_dict()
    except Exception:  # of any model type, or of a config that is wrong by itself
        return ""
    for name, tensor in wanted.items():
        shape = stored.get(name, tuple(tensor.shape))
        if shape != tuple(tensor.shape):
            return f"{name} of shape {list(shape)}, where config.json gives {list(tensor.shape)}"
    return ""


class LiveImages(LiveModel):
    """A model of images of transformers."""

    auto = "AutoModelForImageClassification"
    architectures = "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"
    words = "a model of images"

    @property
    def channels(self) -> int:
        """Number of channels of an image."""
        return int(getattr(self.config, "num_channels", 3))

    @property
    def classes(self) -> int | None:
        """Number of classes; None: it answers features alone."""
        named = "ForImageClassification" in type(self.model).__name__
        return int(self.model.config.num_labels) if named else None

    @property
    def patch(self) -> int:
        """Side of a patch in pixels."""
        side = self.config.patch_size
        return int(side if isinstance(side, int) else max(side))

    @property
    def cells(self) -> tuple[int, int]:
        """Height and width of a trained image in patches."""
        size = self.config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return height // self.patch, width // self.patch

    @property
    def config(self) -> Any:
        """The part of its config that describes images."""
        return getattr(self.model.config, "vision_config", self.model.config)

    def forward(
        self, images: Float[Tensor, "B P Y X"]
    ) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B K"] | None]:
        """Features, and logits of a classifier.

        Features are those of the class token, or the mean over cells.
        """
        outputs: list[Any] = []
        base, options = self.model.base_model, {}
        if self.table is None and "interpolate_pos_encoding" in signature(base.forward).parameters:
            options["interpolate_pos_encoding"] = True  # of other positions, if it has any
        hook = base.register_forward_hook(lambda module, inputs, output: outputs.append(output))
        try:
            with settings_kept(self.model):  # a picture says nothing of the next one
                output = self.model(pixel_values=images, return_dict=True, **options)
        finally:
            hook.remove()
        hidden: Tensor = outputs[0][0]
        tokens = hidden.flatten(2).mT if hidden.dim() == 4 else hidden
        return tokens[:, 0] if self._first else tokens.mean(1), getattr(output, "logits", None)
