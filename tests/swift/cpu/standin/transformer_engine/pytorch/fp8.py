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


def fp8_autocast(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("no fp8 in this stand-in")


fp8_model_init = fp8_autocast
