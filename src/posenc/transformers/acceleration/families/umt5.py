"""UMT5: as T5, with a bias in every layer."""

from __future__ import annotations

from torch import Tensor
from transformers.models.umt5.modeling_umt5 import UMT5Attention, UMT5Stack

from posenc.encoding.tensors import BucketIndex
from posenc.transformers.acceleration.families.common.text_bias import T5Bias
from posenc.transformers.acceleration.family import AcceleratedFamily


class UMT5Bias(T5Bias, UMT5Attention):
    """Self- and cross-attention."""

    def buckets(self, relative_position: Tensor) -> BucketIndex:
        return self._relative_position_bucket(relative_position)


ENTRY = AcceleratedFamily(title="UMT5", classes={UMT5Attention: UMT5Bias}, configured=(UMT5Stack,))
