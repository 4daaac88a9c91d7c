"""`commands`: ms-swift's own command line, with signals that reach the training."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lazyshard_swift import commands
from lazyshard_swift.commands import flag_is_on
from tests.swift.programs import PATHS, environment, run

BEFORE = ["/bin/python", "-m", "torch.distributed.run", "--nproc_per_node", "4", "/swift/cli/_megatron/sft.py"]

ON = [
    *(f"--sharded_lazy {value}" for value in ("true", "True", "TRUE", "t", "T", "yes", "y", "1")),
    *(f"--sharded_lazy={value}" for value in ("true", "True", "1", "Yes")),
    *("--sharded_lazy", "--sharded_lazy --model x", "--model x --sharded_lazy true --dataset s"),
    "--sharded_lazy_max_wait 1 --sharded_lazy true",
    # transformers.HfArgumentParser takes both spellings, and the last one counts.
    *("--sharded-lazy true", "--sharded-lazy=1", "--sharded_lazy false --model x --sharded_lazy true"),
]
OFF = [
    *("", "--model x", "--model sharded_lazy", "--no_sharded_lazy true"),
    *(f"--sharded_lazy {value}" for value in ("false", "False", "f", "no", "n", "0")),
    *(f"--sharded_lazy={value}" for value in ("false", "0", "")),
    # Others that begin alike.
    *("--sharded_lazy_max_wait 1", "--sharded_lazy_on_end=repeat"),
    *("--sharded-lazy false", "--sharded_lazy=true --sharded_lazy=0"),
]


def test_flag_is_on() -> None:
    for lines, on in ((ON, True), (OFF, False)):
        assert [line for line in lines if flag_is_on([*BEFORE, *line.split()]) is not on] == []


def extended() -> Any:
    module = ModuleType("swift.cli.main")
    vars(module)["subprocess"] = subprocess
    commands.extend(module)
    return module


def test_without_the_flag_the_child_is_started_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    module, calls = extended(), []
    assert module.subprocess is not subprocess and module.subprocess.Popen is subprocess.Popen

    def stock(*arguments: Any, **options: Any) -> str:
        calls.append((arguments, options))
        return "result"

    monkeypatch.setattr(subprocess, "run", stock)
    command = [*BEFORE, "--model", "x"]
    assert module.subprocess.run(command) == "result"
    # Nor when ms-swift calls it in a way of which we know nothing.
    on = [*command, "--sharded_lazy", "true"]
    assert module.subprocess.run(on, check=True) == "result"
    assert calls == [((command,), {}), ((on,), {"check": True})]


def test_module_that_starts_its_child_otherwise_is_refused() -> None:
    module = ModuleType("swift.cli.main")
    with pytest.raises(AttributeError):
        commands.extend(module)
    vars(module)["subprocess"] = ModuleType("subprocess")
    with pytest.raises(AttributeError):
        commands.extend(module)


HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("", 0),
        ("raise SystemExit(75)", 75),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 143),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
    ],
)
def test_code_of_the_child_is_passed_on_and_signals_are_as_before(source: str, code: int, tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in HANDLED]
    command = [sys.executable, "-S", "-c", source, "--sharded_lazy", "true"]
    result = extended().subprocess.run(command)
    assert (result.returncode, result.args) == (code, command)
    with pytest.raises(FileNotFoundError):
        extended().subprocess.run([str(tmp_path / "python"), "--sharded_lazy", "true"])
    assert [signal.getsignal(number) for number in HANDLED] == before


NOT_INSTALLED: list[tuple[str | None, list[str], str, str | None]] = [
    ("4.6.0", [], "_megatron", "megatron-core mcore-bridge"),
    ("4.6.0", ["megatron.core"], "_megatron", "mcore-bridge"),
    ("4.6.0", ["megatron.core", "mcore_bridge"], "_megatron", None),
    ("4.6.0", [], "cli", None),
    ("4.0.2", [], "_megatron", None),
    (None, [], "_megatron", None),
]


def test_megatron_that_is_not_installed_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of one that fails, as ms-swift's own traceback does not say what to install."""
    for number, (version, there, folder, missing) in enumerate(NOT_INSTALLED):
        monkeypatch.setattr("lazyshard_swift.ms_swift.version", lambda version=version: version)
        monkeypatch.setattr("importlib.util.find_spec", lambda name, there=there: object() if name in there else None)
        script = tmp_path / str(number) / folder / "sft.py"
        script.parent.mkdir(parents=True)
        script.write_text("import sys\nraise SystemExit(int(sys.argv[-1]))")
        for code in (0, 1):
            command = [sys.executable, "-S", str(script), "--sharded_lazy", "true", str(code)]
            assert extended().subprocess.run(command).returncode == code
            told = capsys.readouterr().err
            assert (told == "") == (missing is None or not code)
            assert not told or f"pip install {missing};" in told


# ms-swift's own command line, and a child that says what it gets.
COMMAND = """
import sys
from lazyshard_swift import commands
from tests.data import swift_samplers
main = swift_samplers.load("cli/main.py")
commands.extend(main)
main.cli_main({"sft": "child"})
"""

CHILD = """
import os, signal, sys

def leave(number, frame):
    # Not print: the signal may come while the line below is being printed.
    os.write(1, signal.Signals(number).name.encode() + b"\\n")
    os._exit(7)

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, leave)
print(os.getppid(), os.getpid(), *sys.argv[1:], flush=True)
while True:
    signal.pause()
"""


@contextlib.contextmanager
def command(folder: Path, *arguments: str) -> Any:
    """`swift sft` in a process; yields that and the id of the child that it has started."""
    (folder / "child.py").write_text(CHILD)
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, "sft", *arguments],
        env=environment(*PATHS, folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("run sh: ")
            parent, child, *given = process.stdout.readline().split()
            assert (int(parent), given) == (process.pid, list(arguments))
            yield process, int(child)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


ON_LINE = ("--sharded_lazy", "true")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_is_handed_down_and_the_childs_end_waited_for(tmp_path: Path, number: signal.Signals) -> None:
    with command(tmp_path, *ON_LINE) as (process, child):
        process.send_signal(number)
        said, _ = process.communicate(timeout=30)
        assert (process.returncode, said) == (7, f"{number.name}\n")
        assert not Path("/proc", str(child)).exists()


def test_interrupt_of_the_terminal_is_left_to_the_child(tmp_path: Path) -> None:
    with command(tmp_path, *ON_LINE) as (process, _):
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=30)
        assert (process.returncode, said) == (7, "SIGINT\n")


def test_command_of_an_ms_swift_that_is_too_old_ends_with_2_before_it_starts_anything(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text("print('started')")
    of_3 = "from lazyshard_swift import ms_swift; ms_swift.version = lambda: '3.12.6'"
    done = run(["-c", of_3 + COMMAND, "sft", *ON_LINE], environment(*PATHS, tmp_path))
    assert (done.returncode, "started" in done.stdout) == (2, False)
    (line,) = done.stderr.splitlines()
    assert all(words in line for words in ("3.12.6", "4.0.0", "pip install"))


SFT = "/site-packages/swift/cli/sft.py"


@pytest.mark.parametrize(
    ("script", "arguments", "full_parser", "answers"),
    [
        (SFT, ["--help"], True, "full"),
        (SFT, ["--model", "m", "-h"], True, "full"),
        (SFT, ["--model", "m"], True, "stock"),
        (SFT, ["--help"], False, "stock"),
        ("/site-packages/swift/cli/pt.py", ["--help"], True, "stock"),
        ("/home/user/sft.py", ["--help"], True, "stock"),
        (None, ["--help"], True, "stock"),
    ],
)
def test_the_full_parser_answers_help_of_swift_sft_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, script: str | None, arguments: list[str], full_parser: bool, answers: str
) -> None:
    class Asked(Exception):
        pass

    def sft_main() -> None:
        raise Asked

    module, pipelines, main = (ModuleType(name) for name in ("swift.cli.utils", "swift.pipelines", "__main__"))
    vars(module)["try_use_single_device_mode"] = lambda: "stock"
    vars(pipelines).update({"sft_main": sft_main} if full_parser else {})
    main.__file__ = script
    commands.extend(module)
    monkeypatch.setitem(sys.modules, "swift.pipelines", pipelines)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["sft.py", *arguments])
    with pytest.raises(Asked) if answers == "full" else contextlib.nullcontext():
        assert vars(module)["try_use_single_device_mode"]() == answers
