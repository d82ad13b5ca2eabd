"""Multi-head latent attention: keys and values of all heads are made from one latent per token."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Count, Length, Probability, Rate, Width, check, typed
from posenc.attention.api import attend
from posenc.attention.backends.common.base import Backend
from posenc.attention.cache import LayerCache
from posenc.attention.call import Call, require_fit
from posenc.attention.decoding import attend_last, may_keep_transformed, transform_tokens
from posenc.attention.dispatch import named
from posenc.encoding import Encoding
from posenc.encoding.prepared import Prepared, entering, is_plain
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.layout.features import require_features
from posenc.layout.padding import zero_invalid
from posenc.runtime import PLAIN_TENSORS


class LatentNorm(nn.RMSNorm):
    """RMSNorm in the precision of its weight; under autocast, latents are in another."""

    def forward(self, x: Float[Tensor, "*places R"]) -> Float[Tensor, "*places R"]:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class LatentAttention(nn.Module):
    """Multi-head latent attention (MLA): self-attention that caches one latent for all heads.

    ``[a_j; b_j] = W_down x_j``, ``c_j = RMSNorm(a_j)``, ``[k_jh; v_jh] = W_up,h c_j``,
    ``[q_ih; r_ih] = W_Q,h x_i``, or ``W_Q,h RMSNorm(W_QD x_i)`` with ``q_lora_rank``.
    ``s_ijh = scale · (q_ih · k_jh + f(r_ih) · f(b_j))``,
    ``o_i = W_O [Σ_j softmax_j(s_ijh) v_jh]_h``.

    f is the encoding's query_key part: only r and b have positions, and b is one key for all heads.
    The cache has c and f(b), ``kv_lora_rank + qk_rope_head_dim`` numbers a token. Few queries read
    it as it is: by ``q · W_K c = W_Kᵀ q · c`` the query takes W_K, and by ``Σ p W_V c = W_V Σ p c``
    the output W_V, the two halves of W_up. Otherwise keys and values of all heads are made from it.
    The layer takes whichever needs fewer multiplications; both give the same numbers.

    Sizes have the names of transformers' configs, and weights its order of rows. DeepSeek's layer
    is ``LatentAttention(encoding=create("rope", head_dim=qk_rope_head_dim, pairing="adjacent"),
    causal=True, …)``. A stretched RoPE's temperature multiplies all logits, as YaRN's ``mscale²``
    does there, and so does the factor of ``scalable_softmax`` and ``log_n``. In transformers a
    config without ``mscale_all_dim`` has the temperature in products of rotated features alone.

    Args:
        dim: width C of the model.
        heads: H.
        kv_lora_rank: width R of the latent c.
        qk_nope_head_dim: width of q and k, without positions.
        qk_rope_head_dim: width D of r and b, which the encoding is made for.
        v_head_dim: width E of a head's values.
        q_lora_rank: width of the latent of queries; None: queries are made from x.
        encoding: of r and b; one without score and value parts. Where each head has angles of its
            own, or they are learned, the cache has b, and f(b) is computed at each call.
        causal: a token sees the past only.
        window: a token sees fewer than this many steps away only.
        bias: ``down``, ``query_down`` and ``output`` have biases.
        dropout: probability of dropping an attention weight in training.
        scale: factor of the logits; ``(qk_nope_head_dim + qk_rope_head_dim) ** -0.5`` by default.
        norm_eps: added to the variance by the norms of latents.
        backend: see ``attend``.

    Attributes:
        prepared: results that its calls share, perhaps with those of a model's other layers.

    Raises:
        ArgumentError: for an encoding with a score or value part, with heads that share queries or
            with a scale of its own; for one that is made for other sizes or another mask.

    Reference: DeepSeek-AI 2024, "DeepSeek-V2: A Strong, Economical, and Efficient
    Mixture-of-Experts Language Model", https://arxiv.org/abs/2405.04434, section 2.1.

    >>> import posenc, torch
    >>> from posenc.attention import LatentAttention
    >>> rope = posenc.create("rope", head_dim=8, pairing="adjacent")
    >>> sizes = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    >>> layer = LatentAttention(
    ...     dim=64, heads=4, kv_lora_rank=32, encoding=rope, causal=True, **sizes
    ... )
    >>> cache = posenc.Cache(layers=1)
    >>> layer(torch.randn(2, 6, 64), posenc.Layout.sequence(6), cache=cache[0]).shape
    torch.Size([2, 6, 64])
    >>> cache[0].keys.shape
    torch.Size([2, 1, 6, 40])
    """

    @typed
    def __init__(
        self,
        *,
        dim: Width,
        heads: Count,
        kv_lora_rank: Width,
        qk_nope_head_dim: Width,
        qk_rope_head_dim: Width,
        v_head_dim: Width,
        q_lora_rank: Width | None = None,
        encoding: Encoding,
        causal: bool = False,
        window: Length | None = None,
        bias: bool = False,
        dropout: Probability = 0.0,
        scale: Rate | None = None,
        norm_eps: Rate = 1e-6,
        backend: Backend | str = "auto",
    ) -> None:
        super().__init__()
        if backend != "auto":
            named(backend)
        self.dim, self.heads, self.causal, self.window = dim, heads, causal, window
        self.widths = (qk_nope_head_dim, qk_rope_head_dim)
        self.kv_lora_rank, self.v_head_dim = kv_lora_rank, v_head_dim
        self.dropout, self.backend = dropout, backend
        self.scale = sum(self.widths) ** -0.5 if scale is None else scale
        self.query_down: nn.Module = nn.Identity()
        self.query_norm: nn.Module = nn.Identity()
        if q_lora_rank is not None:
            self.query_down = nn.Linear(dim, q_lora_rank, bias=bias)
            self.query_norm = LatentNorm(q_lora_rank, eps=norm_eps)
        self.query = nn.Linear(q_lora_rank or dim, heads * sum(self.widths), bias=False)
        self.down = nn.Linear(dim, kv_lora_rank + qk_rope_head_dim, bias=bias)
        self.norm = LatentNorm(kv_lora_rank, eps=norm_eps)
        self.up = nn.Linear(kv_lora_rank, heads * (qk_nope_head_dim + v_head_dim), bias=False)
        self.output = nn.Linear(heads * v_head_dim, dim, bias=bias)
        self.encoding = encoding
        self._require_fit()
        self._no_position = Encoding()
        self.prepared = Prepared()

    def _require_fit(self) -> None:
        encoding, transform = self.encoding, self.encoding.query_key
        shared = transform is None or (transform.views == 1 and transform.scale is None)
        if encoding.score is not None or encoding.value is not None or not shared:
            parts = [encoding.score, encoding.value, *([] if shared else [transform])]
            raise ArgumentError(
                "encoding",
                expected="one that transforms the queries and keys of a part of each head",
                got=", ".join(type(part).__name__ for part in parts if part is not None),
                remedy="Use a rotation, such as rope, or posenc.Attention, which takes all.",
            )
        sizes = {"heads": self.heads, "head_dim": self.widths[1], "dim": self.dim}
        require_fit(encoding, **sizes, causal=self.causal)

    def forward(
        self, x: Float[Tensor, "B Q C"], layout: Layout, *, cache: LayerCache | None = None
    ) -> Float[Tensor, "B Q C"]:
        """Attend from ``x`` to itself and to what is cached.

        Args:
            x: ``[B, Q, C]`` token vectors.
            layout: where they are; with a cache, where the new tokens are. Tokens that it marks
                invalid may hold anything, NaN included.
            cache: the past; it is extended by these tokens.

        Raises:
            ArgumentError: for tensors, a layout or an encoding that do not fit this layer.
        """
        check("cache", LayerCache | None, cache, None)
        self._require_fit()
        require_features(x, layout, self.dim)
        layout = layout.in_precision_of(x)
        x = zero_invalid(x, layout)
        layout = self.encoding.observe(x, layout)
        q = self.query(self.query_norm(self.query_down(x)))
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        latent, key = self.down(x).split((self.kv_lora_rank, self.widths[1]), dim=-1)
        latent, key = self.norm(latent).unsqueeze(1), key.unsqueeze(1)
        with entering(self.prepared):
            output = self._attended(q, latent, key, layout, cache)
        merged: Tensor = self.output(output.transpose(1, 2).flatten(2))
        return merged

    def _attended(
        self,
        q: Float[Tensor, "B H Q N+D"],
        latent: Float[Tensor, "B 1 Q R"],
        key: Float[Tensor, "B 1 Q D"],
        layout: Layout,
        cache: LayerCache | None,
    ) -> Float[Tensor, "B H Q E"]:
        """Attention to these tokens and those in the cache, which is extended by them."""
        transform, key_layout, joined = self.encoding.query_key, layout, None
        plain, rotary = q.split_with_sizes(self.widths, dim=-1)
        transformed = transform is None
        if cache is not None:
            if may_keep_transformed(self.encoding, cache, causal=self.causal):
                rotated, kept = self._transform(rotary, key, layout, layout)
                if kept.shape == key.shape:
                    rotary, key, cache.transformed, transformed = rotated, kept, True, True
            joined = torch.cat([latent, key], dim=-1)
            joined, _, key_layout = cache.append(joined, joined[..., :0], layout)
            latent, key = joined.split_with_sizes((self.kv_lora_rank, self.widths[1]), dim=-1)
        if not transformed:
            rotary, key = self._transform(rotary, key, layout, key_layout)
            joined = None
        grid = Grid(layout, key_layout, self.causal, self.window)
        if transform is not None:
            plain = (plain * transform.logit_factor(grid)).to(plain.dtype)
        if key.shape[1] > 1 or not self._absorbs(plain.shape[2], key.shape[2]):
            expanded = self.up(latent.squeeze(1)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            k, v = expanded.split((self.widths[0], self.v_head_dim), dim=-1)
            k = torch.cat([k, key.expand(-1, self.heads, -1, -1)], dim=-1)
            return self._attend(torch.cat([plain, rotary], dim=-1), k, v, grid)
        up = self.up.weight.view(self.heads, -1, self.kv_lora_rank)
        to_key, to_value = up.split_with_sizes((self.widths[0], self.v_head_dim), dim=1)
        absorbed = torch.einsum("bhqn,hnr->bhqr", plain, to_key)
        k = torch.cat([latent, key], dim=-1) if joined is None else joined
        output = self._attend(torch.cat([absorbed, rotary], dim=-1), k, latent, grid)
        return torch.einsum("bhqr,her->bhqe", output, to_value)

    def _transform(
        self, q: Float[Tensor, "B H Q D"], k: Float[Tensor, "B 1 K D"], here: Layout, there: Layout
    ) -> tuple[Float[Tensor, "B H Q d"], Float[Tensor, "B g K d"]]:
        """Rotary parts of queries and keys, with their positions."""
        grid = Grid(here, there, self.causal, self.window)
        return transform_tokens(Call(q, k, k, grid, self.encoding))

    def _absorbs(self, queries: int, keys: int) -> bool:
        """True if it takes fewer products that queries take W_K, and outputs W_V, than to expand.

        A head then has R·(N + E) products a query and 2R + D a pair; expanded, R·(N + E) a key and
        N + D + E a pair. A module in the place of ``up`` (an adapter, a quantized one) is called:
        its weight may not be all of it.
        """
        plain = type(self.up) is nn.Linear and is_plain(self.up)
        if not (plain and type(self.up.weight) in PLAIN_TENSORS):
            return False
        expanded = self.widths[0] + self.v_head_dim
        past = (keys - queries) * self.kv_lora_rank * expanded
        return past > queries * keys * (2 * self.kv_lora_rank - expanded)

    def _attend(
        self,
        q: Float[Tensor, "B H Q F"],
        k: Float[Tensor, "B G K F"],
        v: Float[Tensor, "B G K V"],
        grid: Grid,
    ) -> Float[Tensor, "B H Q V"]:
        """Attention to keys with their positions."""
        dropout = self.dropout if self.training else 0.0
        call, output = Call(q, k, v, grid, self._no_position, scale=self.scale), None
        if self.backend == "auto" and not dropout:
            output = attend_last(call)
        if output is None:
            options: dict[str, Any] = {"backend": self.backend, "dropout": dropout}
            output = attend(q, k, v, grid, self._no_position, scale=self.scale, **options)
        return output
