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
from tests.stream.streams import raised
from tests.swift.programs import environment, run, write
from tests.swift.warm import PATHS

BEFORE = ["/bin/python", "-m", "torch.distributed.run", "--nproc_per_node", "4", "/swift/cli/_megatron/sft.py"]
ON = [
    *(f"--sharded_lazy {value}" for value in ("true", "TRUE", "t", "T", "yes", "y", "1")),
    *("--sharded_lazy=True", "--sharded_lazy=Yes", "--sharded_lazy", "--sharded_lazy --model x"),
    "--sharded_lazy_max_wait 1 --sharded_lazy true --dataset s",
    # transformers.HfArgumentParser takes both spellings, and the last one counts.
    *("--sharded-lazy true", "--sharded-lazy=1", "--sharded_lazy false --model x --sharded_lazy true"),
]
OFF = [
    *("", "--model x", "--model sharded_lazy", "--no_sharded_lazy true"),
    *("--sharded_lazy False", "--sharded_lazy f", "--sharded_lazy no", "--sharded_lazy=0", "--sharded_lazy="),
    # Others that begin alike.
    *("--sharded_lazy_max_wait 1", "--sharded_lazy_on_end=repeat"),
    *("--sharded-lazy false", "--sharded_lazy=true --sharded_lazy=0"),
]
HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
ON_LINE = ("--sharded_lazy", "true")
SFT = "/site-packages/swift/cli/sft.py"


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
    raised(AttributeError, commands.extend, module)
    vars(module)["subprocess"] = ModuleType("subprocess")
    raised(AttributeError, commands.extend, module)


def test_code_of_the_child_is_passed_on_and_signals_are_as_before(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in HANDLED]
    for source, code in (
        ("", 0),
        ("raise SystemExit(75)", 75),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 143),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
    ):
        command = [sys.executable, "-S", "-c", source, "--sharded_lazy", "true"]
        result = extended().subprocess.run(command)
        assert (result.returncode, result.args) == (code, command)
    raised(FileNotFoundError, extended().subprocess.run, [str(tmp_path / "python"), "--sharded_lazy", "true"])
    assert [signal.getsignal(number) for number in HANDLED] == before


def test_megatron_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    """Of one that fails, as ms-swift's own traceback does not say what to install."""
    both = "megatron-core mcore-bridge"
    for number, (version, there, folder, code, missing) in enumerate(
        (
            ("4.6.0", [], "_megatron", 1, both),
            ("4.6.0", [], "_megatron", 0, None),
            ("4.6.0", ["megatron.core"], "_megatron", 1, "mcore-bridge"),
            ("4.6.0", ["megatron.core", "mcore_bridge"], "_megatron", 1, None),
            ("4.6.0", [], "cli", 1, None),
            ("4.0.2", [], "_megatron", 1, None),
            (None, [], "_megatron", 1, None),
        )
    ):
        monkeypatch.setattr("lazyshard_swift.ms_swift.version", lambda version=version: version)
        monkeypatch.setattr("importlib.util.find_spec", lambda name, there=there: object() if name in there else None)
        script = write(tmp_path / str(number) / folder / "sft.py", f"raise SystemExit({code})")
        assert extended().subprocess.run([sys.executable, "-S", str(script), "--sharded_lazy"]).returncode == code
        told = capsys.readouterr().err
        assert f"pip install {missing};" in told if missing else told == ""


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


@pytest.mark.parametrize("number", HANDLED)
def test_signal_is_handed_down_and_the_childs_end_waited_for(tmp_path: Path, number: signal.Signals) -> None:
    with command(tmp_path, *ON_LINE) as (process, child):
        # That of the terminal comes to the child anyway.
        send = os.killpg if number == signal.SIGINT else os.kill
        send(process.pid, number)
        said, _ = process.communicate(timeout=30)
        assert (process.returncode, said) == (7, f"{number.name}\n")
        assert not Path("/proc", str(child)).exists()


def test_command_of_an_ms_swift_that_is_too_old_ends_with_2_before_it_starts_anything(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text("print('started')")
    of_3 = "from lazyshard_swift import ms_swift; ms_swift.version = lambda: '3.12.6'"
    done = run(["-c", of_3 + COMMAND, "sft", *ON_LINE], environment(*PATHS, tmp_path))
    assert (done.returncode, "started" in done.stdout) == (2, False)
    (line,) = done.stderr.splitlines()
    assert all(words in line for words in ("3.12.6", "4.0.0", "pip install"))


def test_the_full_parser_answers_help_of_swift_sft_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def sft_main() -> None:
        raise SystemExit("full")

    for script, arguments, full_parser, answers in (
        (SFT, ["--help"], True, "full"),
        (SFT, ["--model", "m", "-h"], True, "full"),
        (SFT, ["--model", "m"], True, "stock"),
        (SFT, ["--help"], False, "stock"),
        ("/site-packages/swift/cli/pt.py", ["--help"], True, "stock"),
        ("/home/user/sft.py", ["--help"], True, "stock"),
        (None, ["--help"], True, "stock"),
    ):
        module, pipelines, main = (ModuleType(name) for name in ("swift.cli.utils", "swift.pipelines", "__main__"))
        vars(module)["try_use_single_device_mode"] = lambda: "stock"
        vars(pipelines).update({"sft_main": sft_main} if full_parser else {})
        main.__file__ = script
        commands.extend(module)
        monkeypatch.setitem(sys.modules, "swift.pipelines", pipelines)
        monkeypatch.setitem(sys.modules, "__main__", main)
        monkeypatch.setattr(sys, "argv", ["sft.py", *arguments])
        try:
            answered = vars(module)["try_use_single_device_mode"]()
        except SystemExit as asked:
            answered = asked.code
        assert answered == answers
