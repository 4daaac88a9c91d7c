import contextlib
import re
import sys
from collections.abc import Callable

import pytest
import typer

import lazyshard as package
from lazyshard.cli import command, exits, main, output, verify
from lazyshard.errors import (
    ChunkCorrupt,
    FileUnreadable,
    LazyShardError,
    ProducerLocked,
    RowInvalid,
    StreamInvalid,
    StreamMismatch,
)
from tests.cli.commands import lazyshard, python


def codes() -> set[int]:
    return {value for value in vars(exits).values() if isinstance(value, int)}


def test_every_exit_code_is_in_the_table() -> None:
    assert main.__doc__ is not None
    assert {int(code) for code in re.findall(r"^ *(\d+)  \S", main.__doc__, re.MULTILINE)} == codes()


def test_exit_codes_are_the_producers_where_both_have_one() -> None:
    producer = pytest.importorskip("lazyshard_producer.errors")
    for error in (
        RowInvalid("x"),
        ProducerLocked("x"),
        FileUnreadable("x"),
        StreamMismatch("x"),
        ChunkCorrupt("x"),
        LazyShardError("x"),
        OSError(28, "No space left on device"),
        KeyError("x"),
        MemoryError("x"),
        OSError(12, "Cannot allocate memory"),
    ):
        assert exits.exit_code(error) == producer.exit_code(error)
    for name in ("NO_EXTRA", "USAGE", "UNEXPECTED", "OUT_OF_MEMORY", "INTERRUPTED"):
        assert getattr(exits, name) == getattr(producer, name)
    assert exits.exit_code(StreamInvalid("x")) == exits.REFUSED


def test_help_in_a_process_of_its_own() -> None:
    done = python("-m", "lazyshard.cli", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "verify" in done.stdout


def test_help_of_verify() -> None:
    done = lazyshard("verify", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("--samples-per-chunk", "lazyshard verify /shared/stream", "pip install 'lazyshard[cli]'"):
        assert part in done.stdout
    shown = {int(code) for code in re.findall(r"^ +(\d+)  \S", done.stdout, re.MULTILINE)}
    assert shown and shown <= codes()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"lazyshard {package.__version__}\n"


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 2
    assert "Usage: lazyshard" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mend"], "No such command 'mend'. (see `lazyshard --help`)"),
        (["--mend", "verify"], "(see `lazyshard --help`)"),
        (["verify"], "(see `lazyshard verify --help`)"),
        (["status", "/no/such/place"], "(see `lazyshard status --help`)"),
        (["verify"], "Missing argument"),
        (["verify", ""], "'' is not a directory"),
        (["verify", "/no/such/place"], "'/no/such/place' is not a directory"),
        (["verify", __file__], "is not a directory"),
        (["verify", "/", "--samples-per-chunk", "0"], "--samples-per-chunk"),
        (["verify", "/", "--samples-per-chunk", "100000001"], "--samples-per-chunk"),
        (["verify", "/", "--samples-per-chunk", "many"], "--samples-per-chunk"),
        (["verify", "/", "--forever"], "--forever"),
    ],
)
def test_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(arguments) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert shown.err.startswith("lazyshard: error: ")
    assert message in shown.err


@pytest.mark.parametrize("name", ["typer", "rich", "rich.console"])
def test_missing_requirement_is_named_in_one_line(name: str) -> None:
    hidden = f"import sys; sys.modules[{name!r}] = None"
    code = f"{hidden}; from lazyshard.cli.main import main; sys.exit(main(['verify', '/']))"
    done = python("-c", code)
    top = name.partition(".")[0]
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"lazyshard needs {top}, which is not installed: pip install 'lazyshard[cli]'\n"


def test_other_missing_module_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lazyshard.cli.command", None)
    with pytest.raises(ModuleNotFoundError):
        main.main(["verify", "/"])


@pytest.mark.parametrize("module", ["torch", "lazyshard.data"])
def test_command_loads_nothing_of_training(module: str) -> None:
    done = python("-c", f"import sys, lazyshard.cli.command; print({module!r} in sys.modules)")
    assert done.stdout == "False\n", done.stderr


def fail(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    def raising(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(verify, "verify", raising)
    return main.main(["verify", "/"])


def test_filesystem_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(monkeypatch, OSError(28, "No space left on device", "/a/b")) == 7
    assert capsys.readouterr().err.startswith("lazyshard: error: /a/b: No space left on device; ")


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "lazyshard: interrupted; run the same command again to go on\n"


def test_interrupt_while_typer_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: object, **__: object) -> None:
        raise typer.Abort

    monkeypatch.setattr(command, "app", raising)
    assert main.main(["verify", "/"]) == 130


def test_unexpected_error_shows_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fail(monkeypatch, KeyError("x")) == 70
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.splitlines()[-1].startswith("lazyshard: error: unexpected KeyError: 'x'; ")


@pytest.mark.parametrize("write", [output.explain, output.complain])
def test_messages_that_go_nowhere_are_no_failure(write: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full, monkeypatch.context() as patched:
        patched.setattr("sys.stderr", full)
        write("x")
        output.drop_what_nobody_reads()
        # What is still in its buffer must not fail at close.
        with contextlib.suppress(OSError):
            full.close()


def test_results_that_a_full_disk_does_not_take_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", full)
        with pytest.raises(OSError, match="No space left on device"):
            output.say("x")
        with contextlib.suppress(OSError):
            full.close()


def test_messages_are_one_line() -> None:
    assert output.one_line("a\nb\tc\x1b[31m\udcff") == "a\\nb\\tc\\x1b[31m\\udcff"
