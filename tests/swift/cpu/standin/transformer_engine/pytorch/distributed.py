from contextlib import AbstractContextManager, nullcontext
from typing import Any


class CudaRNGStatesTracker:
    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}

    def reset(self) -> None:
        self.states_ = {}

    def get_states(self) -> dict[str, Any]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        self.states_[name] = seed


def checkpoint(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("nothing is recomputed here")


def activation_recompute_forward(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    return nullcontext()


def get_all_rng_states() -> dict[str, Any]:
    return {}


def graph_safe_rng_available() -> bool:
    return False


in_fp8_activation_recompute_phase = is_fp8_activation_recompute_enabled = graph_safe_rng_available
