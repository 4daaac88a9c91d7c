from . import attention, distributed, fp8, module, ops, optimizers, tensor, utils
from .attention import DotProductAttention
from .fp8 import fp8_autocast, fp8_model_init
from .module import GroupedLinear, LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm

__all__ = ["DotProductAttention", "GroupedLinear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm"]
__all__ += ["attention", "distributed", "fp8", "fp8_autocast", "fp8_model_init", "module", "ops", "optimizers"]
__all__ += ["tensor", "utils"]
