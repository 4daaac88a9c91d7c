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
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from tests.swift.warm import CPU, warm_ranks

TRACE_PLUGIN: Final = Path(__file__).with_name("trace_plugin.py")
BIN: Final = Path(sys.executable).parent

TIMEOUT_S: Final = 300.0
"""For a whole run. One takes 20 to 40 s on 2 idle cores; several may share them."""

POLL_S: Final = 0.05
MARK: Final = "LAZYSHARD_TEST_RUN"

STACK: Final = ("ms-swift", "megatron-core", "mcore-bridge", "transformers", "torch")

Option = str | int | float | bool | Path | Sequence[str | Path | float] | None

BOTH: Final[dict[str, Option]] = {
    "template": "qwen2_5",
    "tuner_type": "full",
    "torch_dtype": "float32",
    "check_model": False,
    "add_version": False,
    "max_length": 512,
    "logging_steps": 1,
    "dataloader_num_workers": 1,
    "dataloader_pin_memory": False,
}

MEGATRON: Final[dict[str, Option]] = {
    **BOTH,
    "fp16": False,  # float32 alone turns it on
    "bf16": False,
    "ddp_backend": "gloo",
    "recompute_granularity": "none",
    "micro_batch_size": 2,
    "global_batch_size": 8,
    # The last step is saved all the same. With these two (the first is ms-swift's default) only the weights are, which
    # takes 1 s, not 8.
    "save_steps": 1_000_000,
    "save_safetensors": True,
    "no_save_optim": True,
}

RESUMABLE: Final[dict[str, Option]] = {"no_save_optim": False, "torch_dtype": "bfloat16", "bf16": True}
"""More options for `megatron sft`, of a run that is to be resumed and of the one that resumes it, with
`mcore_model=run.output_dir / "checkpoint-2", finetune=False`. The losses are then those of an uninterrupted run. (In 32
bits megatron-core 0.16 cannot load the state of its distributed optimizer.)"""

_CALLERS: Final = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []

MEGATRON_VARIABLES: Final = {
    "PYTHONPATH": os.pathsep.join([str(CPU / "startup"), str(CPU / "standin"), *_CALLERS]),
    "CPU_AS_CUDA": "1",
    "TORCHDYNAMO_DISABLE": "1",
}

SWIFT: Final[dict[str, Option]] = {
    **BOTH,
    "use_cpu": True,  # or 2 processes train apart from each other, without a word
    "report_to": "none",
    "save_strategy": "no",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
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

    def tail(self, lines: int = 40) -> str:
        """The end of the output, for messages."""
        return "\n".join(self.output.splitlines()[-lines:])


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


def read_trace(directory: Path) -> list[Batch]:
    """All batches so far, by time. A line that is being written is left for the next call."""
    lines = [line for path in directory.glob("rank_*.jsonl") for line in path.read_bytes().splitlines(keepends=True)]
    facts = [json.loads(line) for line in lines if line.endswith(b"\n") and b'"batch"' in line]
    batches = [Batch(**{**one, "ids": tuple(one["ids"])}) for one in facts if one.pop("event") == "batch"]
    return sorted(batches, key=lambda batch: batch.time)


def read_losses(output_dir: Path) -> dict[int, float]:
    """Loss by step, from logging.jsonl."""
    losses = {}
    path = output_dir / "logging.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        facts = json.loads(line)
        position = facts.get("iteration", facts.get("global_step/max_steps"))
        if "loss" in facts and position is not None:
            losses[int(str(position).partition("/")[0])] = float(facts["loss"])
    return losses


@dataclass(frozen=True)
class Process:
    pid: int
    argv: tuple[str, ...]

    @property
    def trains(self) -> bool:
        """Whether it runs the training script itself; its forks, DataLoader workers, do too."""
        return any(part.endswith(("cli/sft.py", "cli/_megatron/sft.py")) for part in self.argv[:4]) and (
            "torch.distributed.run" not in self.argv[:4]
        )


def processes_of(mark: str, sessions: Iterable[int] = ()) -> list[Process]:
    """The live processes that carry a mark, whoever their parents are, and those of these sessions."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            status = (folder / "stat").read_text()
            argv = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has just ended, or is another user's
            continue
        state, _, _, session = status.rpartition(")")[2].split()[:4]
        if state in "ZX" or (wanted not in environment and int(session) not in sessions):
            continue
        found.append(Process(int(folder.name), tuple(argv)))
    return found


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        self.process.wait()

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def batches(self) -> list[Batch]:
        return read_trace(self.trace)

    @property
    def losses(self) -> dict[int, float]:
        return read_losses(self.output_dir)

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
        """Waits until `condition()`; fails if the command ends before, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.poll()} before {what}\n{self.output}"
            assert time.monotonic() < deadline, f"no {what} after {timeout_s} s\n{self.output}"
            time.sleep(POLL_S)

    def wait(self, timeout_s: float = TIMEOUT_S) -> Run:
        """Waits for the end. After `timeout_s` everything is killed and AssertionError raised."""
        try:
            returncode = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not through after {timeout_s} s\n{self.output}") from None
        return Run(returncode, self.output, self.output_dir, self.batches, self.losses)

    def end(self, code: int | None = 0, timeout_s: float = TIMEOUT_S) -> Run:
        """Waits for the end, which must come with this exit code; None takes any."""
        run = self.wait(timeout_s)
        assert code in (None, run.returncode), run.tail()
        return run

    def processes(self) -> list[Process]:
        """Its live processes, torchrun, DataLoader workers and warm ranks included."""
        # Each fork of a warm server, which has the server's environment, begins a session and leaves its number.
        return processes_of(self.mark, {int(path.name[5:]) for path in self.trace.glob("warm_*")})

    def kill(self) -> None:
        """Sends SIGKILL to every process of the command at once."""
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


def start_megatron_sft(
    work: Path, model: Path, *, processes: int = 4, command: Sequence[str] = ("megatron", "sft"), **more: Any
) -> Training:
    """Starts `megatron sft` by so many processes of torchrun, in a folder of this run alone; see `_start`."""
    given = {**MEGATRON_VARIABLES, "NPROC_PER_NODE": str(processes)}
    return _start("megatron", work, model, command, given, MEGATRON, **more)


def start_swift_sft(
    work: Path, model: Path, *, processes: int = 2, command: Sequence[str] = ("swift", "sft"), **more: Any
) -> Training:
    """Starts `swift sft`; as `start_megatron_sft`. With one process there is no torchrun, and nothing warm."""
    given = {"NPROC_PER_NODE": str(processes)} if processes > 1 else {}
    return _start("swift", work, model, command, given, SWIFT, **more)


def megatron_sft(work: Path, model: Path, *, code: int | None = 0, timeout_s: float = TIMEOUT_S, **options: Any) -> Run:
    """Runs `megatron sft` to its end; other arguments as of `start_megatron_sft`."""
    with start_megatron_sft(work, model, **options) as training:
        return training.end(code, timeout_s)


def swift_sft(work: Path, model: Path, *, code: int | None = 0, timeout_s: float = TIMEOUT_S, **options: Any) -> Run:
    """Runs `swift sft` to its end; other arguments as of `start_swift_sft`."""
    with start_swift_sft(work, model, **options) as training:
        return training.end(code, timeout_s)


def _start(
    kind: str,
    work: Path,
    model: Path,
    command: Sequence[str],
    variables: Mapping[str, str],
    defaults: Mapping[str, Option],
    *,
    plugins: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
    packages: Path | None = None,
    warm: bool = True,
    **options: Option,
) -> Training:
    """Starts a command.

    Args:
        kind: "megatron" or "swift".
        work: folder, made here: output.log, trace/, output/ (unless `output_dir` is given).
        model: see `cpu/tiny_model.py`.
        command: the console command, found beside Python, and its arguments before the options.
        variables, environment: of the environment.
        defaults, options: of the command.
        plugins: more `--external_plugins`, imported before the one that traces.
        packages: folder of packages that are taken before the installed ones.
        warm: whether the ranks are forks of a process that has imported what they need, see `warm.py`; not where
            packages are replaced, or where a rank's own process is looked at.
    """
    complete: dict[str, Option] = {
        "model": model,
        "model_type": json.loads((model / "config.json").read_bytes())["model_type"],
        "output_dir": work / "output",
        "external_plugins": [*plugins, TRACE_PLUGIN],
        **defaults,
        **options,
    }
    whole = {**_environment(work), **variables, **(environment or {})}
    if packages is not None:
        whole["PYTHONPATH"] = os.pathsep.join((str(packages), whole["PYTHONPATH"]))
    elif warm and "NPROC_PER_NODE" in variables and "PYTHONPATH" not in (environment or {}):
        server = {**_environment(Path.cwd()), **variables, "MASTER_PORT": "", "NPROC_PER_NODE": ""}
        whole |= warm_ranks(kind, tuple(sorted(server.items())))
    program, *leading = command
    arguments = [str(BIN / program), *leading, *_arguments(complete)]
    return Training(work, arguments, whole, Path(str(complete["output_dir"])))


def _arguments(options: Mapping[str, Option]) -> list[str]:
    arguments = []
    for name, value in options.items():
        if value is None:
            continue
        several = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        arguments += [f"--{name}", *(str(one).lower() if isinstance(one, bool) else str(one) for one in several)]
    return arguments


def _environment(work: Path) -> dict[str, str]:
    """All that the commands see of this machine: offline, one thread, nothing of the caller's but PYTHONPATH."""
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH") if name in os.environ}
    return {
        **kept,
        "PATH": os.pathsep.join([str(BIN), "/usr/local/bin", "/usr/bin", "/bin"]),
        "PYTHONPATH": os.pathsep.join([str(CPU / "startup"), *_CALLERS]),
        "HOME": str(work),  # caches of data sets, models and fonts
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
    }


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
