"""One file that says what is trained: tokenizer, data sets with their weights and steps, and the loader.

`checks` reads it and finds all that is wrong with it, `config` is the model of what it says. Neither imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lazyshard.lazy import lazily

if TYPE_CHECKING:
    from lazyshard.config.checks import Checked, Mistake, check_config, read_config
    from lazyshard.config.config import Config

__all__ = ["Checked", "Config", "Mistake", "check_config", "read_config"]

__getattr__ = lazily(__name__, {"checks": ("Checked", "Mistake", "check_config", "read_config"), "config": ("Config",)})
