"""`swift sft --help`: shows all arguments, ours among them, as `swift pt --help` and `megatron sft --help` do.

ms-swift's script for it asks a small parser first, which knows `--tuner_backend` only and answers `--help` by itself.
Before that it sets up the visible device, which is where we come in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from lazyshard_swift.wrapping import wrap

_SCRIPT: Final = ("cli", "sft.py")


def extend(module: ModuleType) -> None:
    """Has `swift sft` show its own help before the small parser is asked."""
    wrap(module, {"try_use_single_device_mode": _after})


def asks_for_help(script: str | None, arguments: Sequence[str]) -> bool:
    """Returns whether this process is the script of `swift sft`, asked for help.

    Args:
        script: path of the file that is run, None where it is none.
        arguments: the command line after it.
    """
    return script is not None and Path(script).parts[-2:] == _SCRIPT and not {"-h", "--help"}.isdisjoint(arguments)


def _after(original: Callable[..., Any]) -> Callable[..., Any]:
    def then_help(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        if asks_for_help(getattr(sys.modules.get("__main__"), "__file__", None), sys.argv[1:]):
            _show()
        return result

    return then_help


def _show() -> None:
    """Lets ms-swift parse the command line, which prints the help and exits; comes back where that cannot be."""
    try:
        from swift.pipelines import sft_main
    except ImportError:
        return
    sft_main()
