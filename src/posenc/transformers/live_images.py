"""Models of images that transformers runs, stretched in place."""

from __future__ import annotations

from inspect import signature
from typing import Any

from jaxtyping import Float
from torch import Tensor

from posenc.transformers.live import LiveModel
from posenc.transformers.module_settings import settings_kept


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
