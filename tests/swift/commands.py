"""Runs the real `megatron sft` and `swift sft` on the CPU, and tells what they did.

    run = megatron_sft(tmp_path / "run", model, dataset=path, train_iters=3, tensor_model_parallel_size=2)
    run.losses            {1: 6.2, 2: 6.1, 3: 6.2}
    run.batches           what each process gave to its model, see Batch

    with start_megatron_sft(tmp_path / "run", model, dataset=path, train_iters=50) as training:
        training.wait_for(lambda: 3 in training.losses, "loss of step 3")
        training.kill()
        run = training.wait()

Keyword arguments are options of the command, over the defaults below; None takes a default away. The commands run with
an environment of their own. Every process they start, however detached (torchrun gives each worker a session of its
own), carries a mark in its environment, by which it is found and killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from tests.swift.warm import BIN, offline, warm

TRACE_PLUGIN: Final = Path(__file__).with_name("trace_plugin.py")
TIMEOUT_S: Final = 300.0  # For a whole run. One takes 20 to 40 s on 2 idle cores; several may share them

POLL_S: Final = 0.05
MARK: Final = "LAZYSHARD_TEST_RUN"
STACK: Final = ("ms-swift", "megatron-core", "mcore-bridge", "transformers", "torch")
Option = str | int | float | bool | Path | Sequence[str | Path | float] | None
BOTH: Final[dict[str, Option]] = {
    **{"template": "qwen2_5", "tuner_type": "full", "torch_dtype": "float32", "max_length": 512, "logging_steps": 1},
    **{"check_model": False, "add_version": False, "dataloader_num_workers": 1, "dataloader_pin_memory": False},
}
MEGATRON: Final[dict[str, Option]] = {
    **BOTH,
    **{"fp16": False, "bf16": False},  # float32 alone turns the first one on
    **{"ddp_backend": "gloo", "recompute_granularity": "none", "micro_batch_size": 2, "global_batch_size": 8},
    # The last step is saved all the same. With these two (the first is ms-swift's default) only the weights are, which
    # takes 1 s, not 8.
    **{"save_steps": 1_000_000, "save_safetensors": True, "no_save_optim": True},
}
RESUMABLE: Final[dict[str, Option]] = {"no_save_optim": False, "torch_dtype": "bfloat16", "bf16": True}
"""More options for `megatron sft`, of a run that is to be resumed and of the one that resumes it, with
`mcore_model=run.output_dir / "checkpoint-2", finetune=False`. The losses are then those of an uninterrupted run. (In 32
bits megatron-core 0.16 cannot load the state of its distributed optimizer.)"""

SWIFT: Final[dict[str, Option]] = {
    **BOTH,
    "use_cpu": True,  # or 2 processes train apart from each other, without a word
    **{"report_to": "none", "save_strategy": "no", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1},
}


def missing_stack() -> str | None:
    """What keeps the commands from running here, for a skip; None if nothing does."""
    there = {str(one.metadata["Name"]).lower().replace("_", "-") for one in metadata.distributions()}
    missing = [name for name in STACK if name not in there]
    return f"not installed: {', '.join(missing)} (see scripts/environment)" if missing else None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro batch that one process gave to its model."""

    step: int  # iteration, from 1, as in `Run.losses`
    micro: int  # number of the batch within its step, from 0
    rank: int  # global
    dp: int  # ranks in the parallel groups; without Megatron `dp` is the rank
    tp: int
    pp: int
    cp: int
    vp: int  # the part of the pipeline stage that it was fetched for, 0 without virtual pipelines
    train: bool  # False in an evaluation
    ids: tuple[int, ...]  # numbers of its rows, in order, see streams.py
    tokens: int  # with padding
    time: float  # seconds since 1970


@dataclass(frozen=True)
class Run:
    """A command that has ended. `returncode` is negative for a signal."""

    returncode: int
    output: str
    output_dir: Path
    batches: list[Batch]
    losses: dict[int, float]

    def tail(self) -> str:
        return "\n".join(self.output.splitlines()[-40:])


def ids_by_dp(batches: Iterable[Batch]) -> dict[int, list[int]]:
    """What each data-parallel rank trained, in order.

    Fails where the processes that share a data-parallel rank did not all get the same.
    """
    by_process: dict[tuple[int, int, int], list[int]] = {}
    for batch in batches:
        if batch.train:
            by_process.setdefault((batch.dp, batch.rank, batch.vp), []).extend(batch.ids)
    by_dp: dict[int, list[int]] = {}
    for (dp, rank, vp), ids in sorted(by_process.items()):
        assert by_dp.setdefault(dp, ids) == ids, f"rank {rank}, part {vp}: {ids}; others of dp {dp}: {by_dp[dp]}"
    return by_dp


@dataclass(frozen=True)
class Process:
    pid: int
    argv: tuple[str, ...]

    @property
    def trains(self) -> bool:
        """Whether it runs the training script itself; its forks, DataLoader workers, do too."""
        words = self.argv[:4]
        return any(word.endswith("/sft.py") for word in words) and "torch.distributed.run" not in words


class Training:
    """A command that is running. Leaving its `with` block kills what is left of it."""

    def __init__(self, work: Path, command: list[str], environment: Mapping[str, str], output_dir: Path) -> None:
        self.output_dir = output_dir
        self.log = work / "output.log"
        self.trace = work / "trace"
        self.mark = uuid.uuid4().hex
        work.mkdir(parents=True, exist_ok=True)
        self.trace.mkdir()  # a work folder is for one run
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=work,
                env={**environment, MARK: self.mark, "TRACE_DIR": str(self.trace)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.process.wait()

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def batches(self) -> list[Batch]:
        """All so far, by time. A line that is being written is left for the next call."""
        data = [line for path in self.trace.glob("rank_*.jsonl") for line in path.read_bytes().splitlines(True)]
        facts = [json.loads(line) for line in data if line.endswith(b"\n")]
        batches = [Batch(**{**one, "ids": tuple(one["ids"])}) for one in facts if one.pop("event") == "batch"]
        return sorted(batches, key=lambda batch: batch.time)

    @property
    def losses(self) -> dict[int, float]:
        losses: dict[int, float] = {}
        path = self.output_dir / "logging.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            facts = json.loads(line)
            if "loss" in facts:
                step = str(facts.get("iteration", facts.get("global_step/max_steps")))
                losses[int(step.partition("/")[0])] = float(facts["loss"])
        return losses

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Waits until `condition()`; fails if the command ends before, or does not come to it."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.poll()} before {what}\n{self.output}"
            assert time.monotonic() < deadline, f"no {what} after {TIMEOUT_S} s\n{self.output}"
            time.sleep(POLL_S)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: step in self.losses, f"loss of step {step}")

    def killed_after(self, step: int) -> Run:
        self.wait_for_step(step)
        self.kill()
        return self.wait()

    def wait(self, timeout_s: float = TIMEOUT_S) -> Run:
        """Waits for the end. After `timeout_s` everything is killed and AssertionError raised."""
        try:
            returncode = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not through after {timeout_s} s\n{self.output}") from None
        return Run(returncode, self.output, self.output_dir, self.batches, self.losses)

    def end(self) -> Run:
        """Waits for the end, which must be a good one."""
        run = self.wait()
        assert run.returncode == 0, run.tail()
        return run

    def processes(self) -> list[Process]:
        """Its live processes, whoever their parents are: torchrun, DataLoader workers and warm ones included."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        # Each fork of a warm server, which has the server's environment, begins a session and leaves its number.
        sessions = {path.name[5:] for path in self.trace.glob("warm_*")}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                argv = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:  # it has just ended, or is another user's
                continue
            if state not in "ZX" and (wanted in environment or session in sessions):
                found.append(Process(int(folder.name), tuple(argv)))
        return found

    def kill(self) -> None:
        while pids := [process.pid for process in self.processes()]:  # again for forks that were just being made
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)

    def leftover_processes(self, timeout_s: float = 10.0) -> list[Process]:
        """What still lives `timeout_s` after the command has ended; empty as soon as nothing does."""
        self.process.wait()
        deadline = time.monotonic() + timeout_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return left


def start_megatron_sft(work: Path, model: Path, *, processes: int = 4, **more: Any) -> Training:
    """Starts `megatron sft` by so many processes of torchrun; see `_start`."""
    return _start("megatron", work, model, {"NPROC_PER_NODE": str(processes)}, MEGATRON, **more)


def start_swift_sft(work: Path, model: Path, *, processes: int = 2, **more: Any) -> Training:
    """Starts `swift sft`; as `start_megatron_sft`. With one process there is no torchrun."""
    given = {"NPROC_PER_NODE": str(processes)} if processes > 1 else {}
    return _start("swift", work, model, given, SWIFT, **more)


def megatron_sft(work: Path, model: Path, **options: Any) -> Run:
    with start_megatron_sft(work, model, **options) as training:
        return training.end()


def swift_sft(work: Path, model: Path, **options: Any) -> Run:
    with start_swift_sft(work, model, **options) as training:
        return training.end()


def _start(
    kind: str,
    work: Path,
    model: Path,
    variables: Mapping[str, str],
    defaults: Mapping[str, Option],
    *,
    command: Sequence[str] | None = None,
    plugins: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
    packages: Path | None = None,
    cold: bool = False,
    **options: Option,
) -> Training:
    """Starts a command.

    Args:
        kind: "megatron" or "swift".
        work: folder of this run alone, made here: output.log, trace/, output/ (unless `output_dir` is given).
        model: see `cpu/tiny_model.py`.
        command: the console command, found beside Python, and its arguments before the options; by default `KIND sft`.
        variables, environment: of the environment.
        defaults, options: of the command.
        plugins: more `--external_plugins`, imported before the one that traces.
        packages: folder of packages that are taken before the installed ones.
        cold: no process is a fork of one that has imported what they need, see `warm.py`. For tests that look at a
            process or send it signals other than SIGKILL.
    """
    complete: dict[str, Option] = {
        "model": model,
        "model_type": json.loads((model / "config.json").read_bytes())["model_type"],
        "output_dir": work / "output",
        "external_plugins": [*plugins, TRACE_PLUGIN],
        **defaults,
        **options,
    }
    whole = {**offline(work, kind, packages), "MASTER_PORT": str(free_port()), **variables, **(environment or {})}
    program, *leading = command or (kind, "sft")
    arguments = [str(BIN / program), *leading, *_arguments(complete)]
    if not cold:
        whole |= warm(kind, packages)
        arguments.insert(0, whole["PYTHON_EXEC"])
    return Training(work, arguments, whole, Path(str(complete["output_dir"])))


def _arguments(options: Mapping[str, Option]) -> list[str]:
    arguments = []
    for name, value in options.items():
        if value is None:
            continue
        several = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        arguments += [f"--{name}", *(str(one).lower() if isinstance(one, bool) else str(one) for one in several)]
    return arguments


def free_port() -> int:
    """A port below those that the system hands out by itself, so that nobody gets it before torchrun does."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
