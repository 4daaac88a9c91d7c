"""NVIDIA's transformer_engine in plain torch, as far as megatron-core 0.16, mcore-bridge 1.6 and ms-swift 4.6 need it
to import, and to build and train a dense GPT.

Names and arguments are those of Transformer Engine; whatever is not here raises or is missing.
"""

import importlib.util
import os
import sys
import types
from typing import Any, Final

from . import common, pytorch

__all__ = ["common", "pytorch"]
__version__ = "2.3.0"
_IMPORT_TRITON: Final = (
    "mcore_bridge.model.modules.kernels.qsa_block_sparse_attn",
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops",
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
)
"""Modules that import triton without asking whether it is there. A CPU build of torch comes without it, and a stand-in
for triton itself would mislead torch and transformers, which do ask."""


class _NoTriton(types.ModuleType):
    """A module of which any name can be imported, and nothing can be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} needs triton")

        return missing


if importlib.util.find_spec("triton") is None:
    for _name in _IMPORT_TRITON:
        sys.modules.setdefault(_name, _NoTriton(_name))

if os.environ.get("CPU_AS_CUDA"):
    import cpu_as_cuda

    cpu_as_cuda.install()
