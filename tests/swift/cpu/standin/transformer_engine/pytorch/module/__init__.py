"""Linear layers and norms, the linear ones also split over the processes of a tensor parallel group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import base
from .base import TransformerEngineBaseModule

__all__ = ["GroupedLinear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm", "base"]


def _parameter(shape: tuple[int, ...], dtype: Any, init: Callable[[Tensor], Any] | None) -> Any:
    parameter = nn.Parameter(torch.empty(*shape, dtype=dtype or torch.get_default_dtype(), device="cpu"))
    with torch.no_grad():
        if init is None:
            nn.init.normal_(parameter, std=0.02)
        else:
            init(parameter)
    return parameter


def _split(parameter: Any, dimension: int) -> None:
    """Marks a parameter as a slice of a tensor parallel one, as megatron-core wants it."""
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dimension, 1


class Linear(TransformerEngineBaseModule):
    """`parallel_mode` "column" splits the outputs over the group, "row" the inputs."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        params_dtype: Any = None,
        **others: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.tp_size, self.tp_group, self.parallel_mode = tp_size, tp_group, parallel_mode
        self.sequence_parallel, self.return_bias = False, return_bias
        self.fuse_wgrad_accumulation, self.apply_bias = fuse_wgrad_accumulation, bias and not return_bias
        outputs = out_features // tp_size if parallel_mode == "column" else out_features
        inputs = in_features // tp_size if parallel_mode == "row" else in_features
        self.weight = _parameter((outputs, inputs), params_dtype, init_method)
        _split(self.weight, 0 if parallel_mode == "column" else 1)
        self.weight.tensor_model_parallel = parallel_mode in ("column", "row")
        self.bias = _parameter((outputs,), params_dtype, nn.init.zeros_) if bias else None
        if self.bias is not None and parallel_mode == "column":
            _split(self.bias, 0)
        if self.bias is not None and parallel_mode == "row":
            self.bias.sequence_parallel = False

    def forward(self, x: Tensor, is_first_microbatch: Any = None, **others: Any) -> Any:
        y = self._leave(F.linear(self._enter(x), self.weight))
        if self.apply_bias:
            y = y + self.bias
        return (y, self.bias) if self.return_bias else y

    def _enter(self, x: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import mappings

        if self.parallel_mode != "column" or self.tp_size == 1:
            return x
        return mappings.copy_to_tensor_model_parallel_region(x, group=self.tp_group)

    def _leave(self, y: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import mappings

        if self.parallel_mode != "row" or self.tp_size == 1:
            return y
        return mappings.reduce_from_tensor_model_parallel_region(y, group=self.tp_group)


class RMSNorm(TransformerEngineBaseModule):
    def __init__(self, hidden_size: int, eps: float = 1e-5, params_dtype: Any = None, **others: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _parameter((hidden_size,), params_dtype, nn.init.ones_)
        self.weight.sequence_parallel = False
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return _norm(x, self.weight, self.eps)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm, in 32 bits."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        params_dtype: Any = None,
        **others: Any,
    ) -> None:
        if normalization != "RMSNorm":
            raise NotImplementedError(normalization)
        super().__init__(in_features, out_features, params_dtype=params_dtype, **others)
        self.eps = eps
        self.layer_norm_weight = _parameter((in_features,), params_dtype, nn.init.ones_)
        self.layer_norm_weight.sequence_parallel = False
        self.layer_norm_bias = None

    def forward(self, x: Tensor, is_first_microbatch: Any = None, **others: Any) -> Any:
        return super().forward(_norm(x, self.layer_norm_weight, self.eps))


class LayerNorm(TransformerEngineBaseModule): ...


class GroupedLinear(TransformerEngineBaseModule): ...


class LayerNormMLP(TransformerEngineBaseModule): ...
