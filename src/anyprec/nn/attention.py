"""AnyMultiheadAttention: torch's `nn.MultiheadAttention`, its four projections at any width.

Parameters and their names stay torch's (`in_proj_weight`, `out_proj.weight`, ...): `query_proj`, `key_proj` and
`value_proj` are any-layers whose weight is a part of them. Softmax stays float, and so do the two products unless
`scores` and `values` quantize their operands. Made by convert.py; at 32 bits it is torch's own forward, so the output
is what it was, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyprec.errors import UnsupportedOperation
from anyprec.nn.act_quantizer import ActQuantizer
from anyprec.nn.layers import AnyLayer, AnyLinear, own_method
from anyprec.nn.products import AnyProduct, spelled_attention
from anyprec.nn.quantizers import WeightQuantizer
from anyprec.widths import FLOAT

PROJECTIONS = ("query_proj", "key_proj", "value_proj")
SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class AttentionProjection(AnyLinear):
    """One of the three input projections: `weight` and `bias` are parts of the attention's parameters."""

    def __init__(
        self, attention: nn.MultiheadAttention, part: int, quantizer: WeightQuantizer, act: ActQuantizer
    ) -> None:
        nn.Module.__init__(self)
        self.__dict__["attention"] = attention  # not a submodule: it is the other way round
        self.part = part
        self.out_features, self.in_features = self.weight.shape
        self.init_any(quantizer, act)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        attention: Any = self.__dict__["attention"]
        if attention.in_proj_weight is None:
            separate: Tensor = getattr(attention, SEPARATE[self.part])
            return separate
        whole: Tensor = attention.in_proj_weight  # (3E, E)
        return whole[self.part * attention.embed_dim : (self.part + 1) * attention.embed_dim]

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        attention: Any = self.__dict__["attention"]
        whole: Tensor | None = attention.in_proj_bias
        if whole is None:
            return None
        return whole[self.part * attention.embed_dim : (self.part + 1) * attention.embed_dim]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class AnyMultiheadAttention(nn.MultiheadAttention):
    query_proj: AttentionProjection
    key_proj: AttentionProjection
    value_proj: AttentionProjection
    scores: AnyProduct | None  # of queries and keys; None: float
    values: AnyProduct | None  # of softmax and values

    def init_any(
        self,
        quantizer: Callable[[], WeightQuantizer],
        act: Callable[[], ActQuantizer],
        scores: AnyProduct | None = None,
        values: AnyProduct | None = None,
    ) -> None:
        """`self.out_proj` has been made an any-layer by the caller."""
        for part, name in enumerate(PROJECTIONS):
            setattr(self, name, AttentionProjection(self, part, quantizer(), act()))
        self.scores, self.values = scores, values

    @property
    def is_integer(self) -> bool:
        """Both products have quantized operands."""
        return self.scores is not None and self.values is not None

    def projections(self) -> tuple[AnyLayer, ...]:
        assert isinstance(self.out_proj, AnyLayer)
        return self.query_proj, self.key_proj, self.value_proj, self.out_proj

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if any(t.is_nested for t in (query, key, value)):
            raise UnsupportedOperation("AnyMultiheadAttention was given a nested tensor; pad it, with key_padding_mask")
        if self._is_torchs_own():
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        batched = query.dim() == 3
        if not batched:
            query, key, value = (t.unsqueeze(1) for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        # (length, batch, embed) from here on
        mask = self._mask(query, key, key_padding_mask, attn_mask, is_causal)
        output, weights = self._attend(query, key, value, mask, need_weights)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return output.squeeze(1), None if weights is None else weights.squeeze(0)
        return output.transpose(0, 1) if self.batch_first else output, weights

    def _is_torchs_own(self) -> bool:
        """In float nothing is quantized, unless someone looks, or the quantizer's float weight is not the weight.
        `pack` turns torch's fast path off, to see the same operations at every width."""
        idle = all(product is None or product.is_idle for product in (self.scores, self.values))
        return (
            torch.backends.mha.get_fastpath_enabled()
            and idle
            and all(
                layer.weight_bits == FLOAT
                and layer.act_bits == FLOAT
                and not (layer.act is not None and layer.act.observed)
                and own_method(layer.quantizer, WeightQuantizer, ("float_weight",)) is None
                for layer in self.projections()
            )
        )

    def _mask(
        self, query: Tensor, key: Tensor, padding: Tensor | None, mask: Tensor | None, is_causal: bool
    ) -> Tensor | None:
        """What is added to the scores: (N, heads, L, S), or what broadcasts to it."""
        length, batch, _ = query.shape
        source = key.shape[0]
        if is_causal and mask is None:
            raise UnsupportedOperation("is_causal=True is a hint about attn_mask; give attn_mask as well")
        added = None if mask is None else _additive(mask, query.dtype)
        if added is not None and added.dim() == 3:
            added = added.view(batch, self.num_heads, length, source)
        if padding is not None:
            columns = _additive(padding, query.dtype).view(batch, 1, 1, source)
            added = columns if added is None else added + columns
        return added

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        length, batch, _ = query.shape
        q, k, v = self.query_proj(query), self.key_proj(key), self.value_proj(value)
        more = 0
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.repeat(1, batch, 1)])
            v = torch.cat([v, self.bias_v.repeat(1, batch, 1)])
            more += 1
        q, k, v = (
            t.reshape(t.shape[0], batch, self.num_heads, self.head_dim).permute(1, 2, 0, 3) for t in (q, k, v)
        )  # (N, heads, length, head)
        if self.add_zero_attn:
            k, v = (torch.cat([t, t.new_zeros(*t.shape[:2], 1, self.head_dim)], 2) for t in (k, v))
            more += 1
        if mask is not None and more:
            mask = F.pad(mask, (0, more))
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            q, k = q * math.sqrt(1 / self.head_dim), k.transpose(-2, -1)
            if self.scores is not None:
                q, k = self.scores.left(q), self.scores.right(k)
            scores = q @ k
            weights = (scores if mask is None else scores + mask).softmax(-1)
            if self.values is not None:
                weights, v = self.values.left(weights), self.values.right(v)
            weights = F.dropout(weights, dropout)
            output = weights @ v
        elif self.scores is not None or self.values is not None:
            output = spelled_attention(self.scores, self.values, q, k, v, mask, dropout)
        else:
            output = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        output = output.permute(2, 0, 1, 3).reshape(length, batch, self.embed_dim)
        return self.out_proj(output), weights


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
