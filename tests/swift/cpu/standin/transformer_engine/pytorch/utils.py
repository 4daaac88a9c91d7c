from typing import Any

import torch


class SplitAlongDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, sizes: Any, squeeze: bool = False) -> Any:
        ctx.dim = dim
        parts = torch.split(x, sizes, dim=dim)
        return tuple(part.contiguous().squeeze(dim) if squeeze else part.contiguous() for part in parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return torch.cat(gradients, dim=ctx.dim), None, None, None
