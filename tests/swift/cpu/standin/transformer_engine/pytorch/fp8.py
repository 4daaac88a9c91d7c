from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def get_fp8_recipe() -> None:
        return None

    @staticmethod
    def is_fp8_available() -> tuple[bool, str]:
        return False, "no fp8 in this stand-in"


@contextmanager
def fp8_autocast(enabled: bool = False, *args: Any, **kwargs: Any) -> Iterator[None]:
    if enabled:
        raise NotImplementedError("no fp8 in this stand-in")
    yield


@contextmanager
def fp8_model_init(enabled: bool = False, *args: Any, **kwargs: Any) -> Iterator[None]:
    if enabled:
        raise NotImplementedError("no fp8 in this stand-in")
    yield
