import enum
from typing import Any


class Format(enum.Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"
    E5M2 = "e5m2"


class Recipe: ...


class DelayedScaling(Recipe):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("no fp8 in this stand-in")


class Float8CurrentScaling(DelayedScaling): ...


class Float8BlockScaling(DelayedScaling): ...


class MXFP8BlockScaling(DelayedScaling): ...
