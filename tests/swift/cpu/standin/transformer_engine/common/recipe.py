import enum


class Format(enum.Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"
    E5M2 = "e5m2"


class Recipe: ...


class DelayedScaling(Recipe): ...


class Float8CurrentScaling(Recipe): ...


class Float8BlockScaling(Recipe): ...


class MXFP8BlockScaling(Recipe): ...
