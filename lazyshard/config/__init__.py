"""One file that says what is trained: tokenizer, data sets with their weights and steps, and the loader.

Reading and checking only; `lazyshard.data.loading` makes of it what it says. Imports no torch; pydantic and PyYAML are
imported where a configuration is read.

- `checks`: reads it, and finds all that is wrong with it
- `config`: the model of what it says; `document`: its plain values and the place of each
- `named_function`: functions by their names
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lazyshard.lazy import lazily

if TYPE_CHECKING:
    from lazyshard.config.checks import Checked, check_config, read_config
    from lazyshard.config.config import Config
    from lazyshard.config.document import Mistake

__all__ = ["Checked", "Config", "Mistake", "check_config", "read_config"]

_HOMES: Final = {
    "checks": (
        "Checked",
        "check_config",
        "read_config",
    ),
    "config": ("Config",),
    "document": ("Mistake",),
}

__getattr__ = lazily(__name__, _HOMES)
