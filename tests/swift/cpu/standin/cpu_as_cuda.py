"""Makes `torch.cuda` look like one device that is the CPU, for megatron-core and ms-swift, which ask for nothing else.

`torch.cuda.is_available()` stays False: code that asks keeps to the CPU by itself. Functions like `torch.empty` are not
replaced (torch's own code breaks then); a `TorchFunctionMode` rewrites their arguments `device` and `pin_memory`.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_tensor_type = torch.Tensor.type


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Stream(_Event):
    cuda_stream = 0
    device = torch.device("cpu")

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, other: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


def _is_cuda(device: Any) -> bool:
    if isinstance(device, bool):
        return False
    if isinstance(device, int):
        return True
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _CudaToCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        to = getattr(func, "__name__", "") == "to"
        if to and len(args) > 1 and isinstance(args[1], str | torch.device) and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


def _returning(value: Any) -> Any:
    return lambda *args, **kwargs: value


def _type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.type`, whose answer megatron-core compares with the names of CUDA tensors to find a dtype."""
    found = _tensor_type(self, *args, **kwargs)
    caller = sys._getframe(1).f_code.co_filename
    if not args and not kwargs and "megatron/core" in caller and not found.startswith("torch.cuda."):
        return found.replace("torch.", "torch.cuda.", 1)
    return found


def install() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = _returning(torch.device("cpu"))
    for name in (
        *("synchronize", "empty_cache", "set_device", "ipc_collect", "reset_peak_memory_stats"),
        *("manual_seed", "manual_seed_all"),
    ):
        setattr(cuda, name, _returning(None))
    for name in ("max_memory_reserved", "max_memory_allocated", "memory_allocated", "memory_reserved"):
        setattr(cuda, name, _returning(0))
    # Or megatron-core seeds no generator for what its tensor parallel ranks do differently.
    cuda.device_count = _returning(1)
    cuda.get_device_capability = _returning((8, 0))
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.Event, cuda.Stream = _Event, _Stream
    cuda.current_stream = cuda.default_stream = lambda *args: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    for kind in ("Float", "Double", "Half", "Int", "Long", "Byte", "BFloat16"):
        setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))

    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor.cuda = module.cuda = lambda self, *args, **kwargs: self
    tensor.type = _type
    _CudaToCpu().__enter__()
