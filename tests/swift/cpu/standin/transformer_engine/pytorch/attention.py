"""Attention over packed sequences: (token, head, width) inputs, also with the context split over processes.

With context parallelism each process holds, of every sequence of L tokens, 2 of 2n equal pieces: process r has piece r
and piece 2n - 1 - r (megatron-core's zigzag, which evens out the work of a causal mask). Here every process gathers all
keys and values and puts them in order; the real package passes them around in a ring.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .utils import SplitAlongDim as _SplitAlongDim  # noqa: F401 (mcore looks for it here)


class _Gather(torch.autograd.Function):
    """(...) of every process to (processes, ...)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[dist.get_rank(ctx.group)], None


def zigzag(length: int, rank: int, size: int) -> Tensor:
    """Places of the tokens that process `rank` of `size` holds, of a sequence of `length`.

    For 8 tokens and 2 processes: 0 1 6 7 and 2 3 4 5.
    """
    if length % (2 * size):
        raise ValueError(f"a sequence of {length} tokens does not split into 2 x {size} pieces")
    pieces = torch.arange(length).view(2 * size, -1)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


class DotProductAttention(nn.Module):
    def __init__(self, *args: Any, softmax_scale: float | None = None, cp_group: Any = None, **others: Any) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.cp_group = cp_group

    def set_context_parallel_group(self, group: Any, *others: Any) -> None:
        self.cp_group = group

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        qkv_format: str = "sbhd",
        cu_seqlens_q: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        if qkv_format != "thd" or cu_seqlens_q is None:
            raise NotImplementedError(f"attention of {qkv_format}: only packed sequences are trained here")
        size = 1 if self.cp_group is None else dist.get_world_size(self.cp_group)
        if size > 1:
            keys, values = _Gather.apply(key, self.cp_group), _Gather.apply(value, self.cp_group)
        outputs = []
        for start, end in pairwise(cu_seqlens_q.tolist()):
            own = slice(start // size, end // size)
            if size == 1:
                outputs.append(self._product(query[own], key[own], value[own], None))
            else:
                outputs.append(self._split(query[own], keys[:, own], values[:, own], end - start))
        return torch.cat(outputs)

    def _split(self, query: Tensor, keys: Tensor, values: Tensor, length: int) -> Tensor:
        """`keys` and `values` as (process, token, head, width)."""
        size = keys.shape[0]
        places = [zigzag(length, rank, size) for rank in range(size)]
        order = torch.argsort(torch.cat(places))
        key, value = (x.flatten(0, 1)[order] for x in (keys, values))
        seen = torch.arange(length)[None, :] <= places[dist.get_rank(self.cp_group)][:, None]
        return self._product(query, key, value, seen)

    def _product(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None) -> Tensor:
        """Causal, unless it is told what is seen."""
        grouped = key.shape[1] != query.shape[1]
        heads = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        output = F.scaled_dot_product_attention(
            *heads, attn_mask=seen, is_causal=seen is None, scale=self.scale, enable_gqa=grouped
        )
        return output.squeeze(0).transpose(0, 1).flatten(1)
