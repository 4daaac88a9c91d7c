"""Runs the programs of `docs/guides`: real processes with gloo, killed where a test says so."""

import contextlib
import importlib
import os
import re
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from tests.harness.processes.environment import environment
from tests.harness.processes.nursery import Nursery, has_ended
from tests.swift.commands import free_port

ROOT: Final = Path(__file__).resolve().parents[2]
GUIDES: Final = ROOT / "docs" / "guides"
DEADLINE_S: Final = 120.0
QUIET: Final = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

MODULES: Final = (  # What the programs import
    *("torch.distributed.run", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"),
    *("torch.nn.parallel", "lazyshard.data.dataset"),
    *(("transformers.trainer", "transformers.models.gpt2.modeling_gpt2") if find_spec("transformers") else ()),
)


def blocks(guide: str, language: str) -> list[str]:
    """Returns what stands in the blocks of that language on a page; "" for those that name none, commands."""
    return blocks_of((GUIDES / guide).read_text(encoding="utf-8"), language)


def blocks_of(text: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for of, block in found if of == language]


def with_tools(folder: Path, scripts: Mapping[str, str]) -> dict[str, str]:
    """The environment of a script that finds these programs, by name, before all others."""
    (folder / "bin").mkdir()
    for name, text in scripts.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return environment() | {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def as_command(module: str = "") -> str:
    """A program that runs a module with the Python of the tests, or that Python itself."""
    return f'#!/bin/sh\nexec "{sys.executable}" {module and f"-m {module}"} "$@"\n'


def with_commands(folder: Path) -> dict[str, str]:
    """The environment of a script that calls the commands of this checkout, whether or not they are installed."""
    modules = {"python": "", "lazyshard": "lazyshard.cli", "lazyshard-producer": "lazyshard_producer"}
    return with_tools(folder, {name: as_command(module) for name, module in modules.items()})


def dialogue(session: str) -> list[tuple[str, str]]:
    """The commands of a session, each with what it prints."""
    return re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", session, re.MULTILINE)


def settled(printed: str) -> str:
    """What a command prints, without what differs from one machine and moment to the next."""
    seconds, producer = r"\(\d+\.\d s(, [^)]+)?\)", r"\d+ on \S+, (?:heartbeat .* old|ended .* ago)"
    for pattern in (seconds, producer, r"; .* old$", r"disk .* free$", r"rate .*/s$"):
        printed = re.sub(pattern, "...", printed, flags=re.MULTILINE)
    return printed


def run_program(folder: str, environment: dict[str, str], rank: int, program: list[str]) -> None:
    """In a fork: does as `python PROGRAM`, or as `torchrun` does, in a session of its own."""
    os.setsid()
    os.environ.update(environment)
    os.chdir(folder)
    for fd, name in ((1, f"out{rank}"), (2, f"log{rank}")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), fd)
    importlib.import_module("torch").set_num_threads(1)
    sys.path[0], sys.argv = folder, program
    if program[0] == "torchrun":
        importlib.import_module("torch.distributed.run").main(program[1:])
        return
    if program[0] == "trainer.py":
        note_steps(importlib.import_module("transformers").Trainer)
    runpy.run_path(program[0], run_name="__main__")


def note_steps(trainer: Any) -> None:
    """Notes what each step of a Trainer trains: the first four bytes of a text are its number."""
    trains = trainer.training_step

    def noting(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        ids = [int(bytes(row[:4].tolist())) for row in inputs["input_ids"]]
        result = trains(self, model, inputs, *args, **kwargs)
        print("trained", *ids, flush=True)
        return result

    trainer.training_step = noting


@contextlib.contextmanager
def ranks_of(nursery: Nursery, folder: Path, size: int, *program: str) -> Iterator[list[int]]:
    """Starts processes with the variables of torchrun; rank r prints to `out{r}` and logs to `log{r}` in `folder`."""
    common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(free_port())}
    ranks = []
    for rank in range(size):
        (folder / f"out{rank}").unlink(missing_ok=True)
        own = {**environment(), **QUIET, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(nursery.fork(run_program, str(folder), own, rank, list(program)))
    try:
        yield ranks
    finally:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # its loader's workers too
        for pid in ranks:
            nursery.reap(pid, DEADLINE_S)


def finish(nursery: Nursery, folder: Path, size: int, *program: str) -> None:
    with ranks_of(nursery, folder, size, *program) as ranks:
        ended = [nursery.reap(pid, DEADLINE_S) for pid in ranks]
        ranks.clear()
    logs = [(folder / f"log{rank}").read_text(encoding="utf-8")[-3000:] for rank in range(size)]
    assert [one.status for one in ended] == [0] * size, "\n".join(logs)


def steps(output: Path) -> list[list[int]]:
    lines = output.read_text(encoding="utf-8").splitlines(keepends=True) if output.exists() else []
    whole = [line.split() for line in lines if line.startswith("trained ") and line[-1] == "\n"]
    return [[int(word) for word in words[1:]] for words in whole]


def wait_until(condition: Callable[[], bool], what: str, pids: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:.0f} s: {what}"
        assert not [pid for pid in pids if has_ended(pid, 0)], f"ended before {what}"
        time.sleep(0.05)
