"""The command line of ms-swift: `megatron sft` and `swift sft` themselves, and the help of `swift sft`.

Sent SIGTERM, as Slurm, Kubernetes and `kill` do, ms-swift's command dies alone and leaves `torchrun` and the training
behind as orphans; with the flag on it hands the signal down and waits. Its script of `swift sft` asks a small parser
first, which answers `--help` with `--tuner_backend` only; before that it sets up the visible device, where we come in.
"""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, Final

from lazyshard_swift import ms_swift

_IMPORTED: Final = {"megatron-core": "megatron.core", "mcore-bridge": "mcore_bridge"}
"""What is imported of a distribution that Megatron in ms-swift needs."""


def extend(module: ModuleType) -> None:
    """Has ms-swift's `cli_main` start its child through us if the flag is on; or, of the other module, shows help."""
    if module.__name__ == "swift.cli.utils":
        ms_swift.wrap(module, {"try_use_single_device_mode": _then_help})
        return
    original = module.subprocess
    if not callable(getattr(original, "run", None)):
        raise AttributeError("swift.cli.main has no subprocess.run")
    replacement = SimpleNamespace(**{name: getattr(original, name) for name in original.__all__})
    replacement.run = _run
    module.subprocess = replacement  # type: ignore[attr-defined]


def flag_is_on(arguments: Sequence[str]) -> bool:
    """Returns whether a command line turns the flag on."""
    on = False
    for place, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        # As transformers' parser takes it: hyphens or underscores, the last one counts, no value means true.
        if name.replace("-", "_") == "__sharded_lazy":
            if not equals:
                value = arguments[place + 1] if place + 1 < len(arguments) else "true"
            on = value.startswith("--") or value.lower() in ("true", "t", "yes", "y", "1")
    return on


def _run(arguments: Sequence[str], *rest: Any, **options: Any) -> Any:
    if rest or options or not flag_is_on(arguments):
        return subprocess.run(arguments, *rest, **options)  # noqa: S603 - as ms-swift would
    if ms_swift.is_too_old(ms_swift.version()):
        from lazyshard_swift.errors import REFUSED

        _tell(f"--sharded_lazy true needs ms-swift {ms_swift.needed()}")
        return subprocess.CompletedProcess(list(arguments), REFUSED)
    code = _wait_for_child(arguments)
    if code < 0:
        # As a shell would say it.
        code = 128 - code
    if code and (missing := _missing(arguments)):
        _tell(
            f"`megatron` needs {' and '.join(missing)}, which this environment has not: pip install "
            f"{' '.join(missing)}; `lazyshard doctor swift` shows what else is needed"
        )
    return subprocess.CompletedProcess(list(arguments), code)


def _wait_for_child(arguments: Sequence[str]) -> int:
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def hand_down(number: int, frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    def interrupted(number: int, frame: FrameType | None) -> None:
        # The terminal has sent it to the child as well, which ends by itself; a second one ends us both.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    handlers = {signal.SIGTERM: hand_down, signal.SIGHUP: hand_down, signal.SIGINT: interrupted}
    # Before there is a child, so that no signal finds nobody to hand it down. Under nohup SIGHUP stays ignored; None is
    # a handler that Python does not know and could not put back.
    before = {
        number: signal.signal(number, handler)
        for number, handler in handlers.items()
        if signal.getsignal(number) not in (signal.SIG_IGN, None)
    }
    try:
        child = subprocess.Popen(arguments)  # noqa: S603 - what ms-swift would start
        for number in early:
            child.send_signal(number)
        return child.wait()
    finally:
        for handled, previous in before.items():
            signal.signal(handled, previous)


def _missing(arguments: Sequence[str]) -> list[str]:
    """Returns what must be installed for a command to begin at all; nothing where that is not known."""
    version, missing = ms_swift.version(), []
    megatron = any(word.endswith(".py") and Path(word).parent.name == "_megatron" for word in arguments)
    if version is not None and ms_swift.needs_bridge(version) and megatron:
        for name in ms_swift.DEPENDENCIES:
            with contextlib.suppress(ImportError, ValueError):
                if importlib.util.find_spec(_IMPORTED[name]) is not None:
                    continue
            missing.append(name)
    return missing


def _tell(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"lazyshard: {text}", file=sys.stderr, flush=True)


def _then_help(original: Callable[..., Any]) -> Callable[..., Any]:
    def then_help(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        if script is not None and Path(script).parts[-2:] == ("cli", "sft.py") and {"-h", "--help"} & {*sys.argv[1:]}:
            try:
                from swift.pipelines import sft_main
            except ImportError:
                return result
            # Parses the command line, which prints the help and exits.
            sft_main()
        return result

    return then_help
