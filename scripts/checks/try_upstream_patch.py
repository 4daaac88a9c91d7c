"""What `scripts/try_upstream_patch` runs and checks, with the Python of .venv."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "integrations" / "swift")]

from lazyshard_swift import versions  # noqa: E402
from tests.swift import commands, streams  # noqa: E402
from tests.swift.commands import Run  # noqa: E402

PATCH: Final = ROOT / "integrations" / "swift" / "upstream" / "lazyshard.patch"
MADE_FOR: Final = "4.6.0"
STANDIN: Final = commands.CPU / "standin"

MICRO_BATCH: Final = 2
"""As in `commands.SWIFT` and `commands.MEGATRON`."""

UNTOUCHED: Final = """
import importlib
from lazyshard_swift import hooked
places = {
    "swift.pipelines.train.sft": ("SwiftSft", "_get_dataset", "_encode_dataset", "_post_process_datasets"),
    "swift.trainers.mixin": ("SwiftMixin", "_save_checkpoint"),
    "swift.megatron.trainers.base": ("BaseMegatronTrainer", "_prepare_dataloader", "save_checkpoint", "train"),
}
for name, (owner, *methods) in places.items():
    module = importlib.import_module(name)
    assert hooked.knows_streams(module), name
    for method in methods:
        assert not hasattr(getattr(getattr(module, owner), method), "__wrapped__"), (name, method)
import swift
print(swift.__path__[0])
"""
"""Prints where ms-swift was imported from; fails where our hooks have changed what the patch has changed."""


class Failed(Exception):
    """A check that did not hold."""


def check(held: bool, what: str, detail: object) -> None:
    print(f"  {'ok    ' if held else 'FAILED'} {what:<14} {detail}", flush=True)
    if not held:
        raise Failed(what)


def patched(folder: Path) -> Path:
    """Returns a folder that holds a copy of the installed ms-swift, with the patch applied."""
    installed = versions.folder()
    if installed is None:
        raise Failed("ms-swift is not installed")
    folder.mkdir()
    shutil.copytree(installed, folder / "swift", ignore=shutil.ignore_patterns("__pycache__"))
    # With no repository above, git apply takes the folder as it is.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", str(PATCH)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    check(done.returncode == 0, "applies", done.stderr.strip() or f"to ms-swift {MADE_FOR}, without a word")
    return folder


def path(tree: Path, *more: Path) -> str:
    ours = [ROOT, ROOT / "producer", ROOT / "integrations" / "swift"]
    return os.pathsep.join(map(str, [*more, tree, *ours]))


def own_tests(tree: Path, work: Path, model: Path) -> None:
    print("\nthe tests that the patch brings")
    work.mkdir()
    environment = {**commands._environment(work), "PYTHONPATH": path(tree)}
    started = time.monotonic()
    log = work / "output.log"
    with log.open("wb") as output:
        code = subprocess.run(
            [sys.executable, str(tree / "tests" / "train" / "test_sharded_lazy.py"), "-v"],
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    text = log.read_text(encoding="utf-8", errors="replace")
    ran = re.findall(r"^Ran (\d+) tests", text, re.MULTILINE)
    check(code == 0, "tests", f"exit code {code} after {time.monotonic() - started:.0f} s; {log}")
    check(ran == ["7"] and "skipped=" not in text, "none left out", f"{' '.join(ran)} tests")


def untouched(tree: Path, work: Path, model: Path) -> None:
    environment = {**commands._environment(work), "PYTHONPATH": path(tree, STANDIN), "CPU_AS_CUDA": "1"}
    done = subprocess.run(
        [sys.executable, "-c", UNTOUCHED], cwd=work, env=environment, capture_output=True, text=True, check=False
    )
    last = done.stdout.splitlines()[-1:]
    check(last == [str(tree / "swift")], "not by hooks", last or done.stderr[-2000:])


def swift(tree: Path, work: Path, model: Path) -> None:
    samples, samples_per_chunk, ranks = 46, 4, 2
    print(f"\nswift sft, {ranks} processes, a stream of {samples} samples that is being produced")
    work.mkdir()
    source = streams.write_jsonl(work / "rows.jsonl", 0, samples)
    stream = work / "stream"
    options: dict[str, Any] = {"max_steps": 1000, "save_strategy": "steps", "save_steps": 1000, "sharded_lazy": True}
    # What is here and not what is installed, should that be another checkout.
    run_options: dict[str, Any] = {"environment": {"PYTHONPATH": path(tree)}, "processes": ranks}
    with (
        streams.producing(stream, source, samples_per_chunk, 6.0),
        commands.start_swift_sft(work / "run", model, dataset=stream, **options, **run_options) as training,
    ):
        run = training.wait()
    judge(run, samples, samples_per_chunk, ranks, step=ranks * MICRO_BATCH)


def megatron(tree: Path, work: Path, model: Path) -> None:
    samples, samples_per_chunk, ranks = 21, 2, 2
    print(f"\nmegatron sft, {ranks} processes, a stream of {samples} samples that ends before --train_iters")
    work.mkdir()
    stream = streams.write_stream(work / "stream", 0, samples, samples_per_chunk)
    run = commands.megatron_sft(
        work / "run",
        model,
        dataset=stream,
        sharded_lazy=True,
        train_iters=1000,
        global_batch_size=4,
        processes=ranks,
        environment={"PYTHONPATH": path(tree, STANDIN)},
    )
    judge(run, samples, samples_per_chunk, ranks, step=4)


def judge(run: Run, samples: int, samples_per_chunk: int, ranks: int, step: int) -> None:
    """Checks what was trained.

    Args:
        run: the command, which has ended.
        samples: of the stream.
        samples_per_chunk: of the stream.
        ranks: data-parallel ones.
        step: samples that a step takes.
    """
    check(
        run.returncode == 0,
        "exit code",
        f"{run.returncode} after {run.seconds:.0f} s" + f"\n{run.tail()}" * bool(run.returncode),
    )
    batches = [batch for batch in run.batches if batch.train]
    ids = sorted(number for batch in batches for number in batch.ids)
    whole = samples // step * step
    check(len(set(ids)) == len(ids) == whole, "exactly once", f"{len(ids)} samples of {samples}, {step} a step")
    stripes = samples // samples_per_chunk // ranks * ranks
    chunks = {(batch.dp, number // samples_per_chunk) for batch in batches for number in batch.ids}
    strangers = {(dp, chunk) for dp, chunk in chunks if chunk < stripes and chunk % ranks != dp}
    check(not strangers and {dp for dp, _ in chunks} == set(range(ranks)), "own chunks", strangers or "of each rank")
    checkpoint = run.output_dir / f"checkpoint-{whole // step}" / "lazyshard.json"
    check(checkpoint.exists(), "checkpoint", f"{checkpoint.parent.name}, with the position in the stream")


PARTS: Final[dict[str, Callable[[Path, Path, Path], None]]] = {"tests": own_tests, "swift": swift, "megatron": megatron}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/try_upstream_patch")
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    wanted = parser.parse_args().only
    found = versions.installed()
    if found != MADE_FOR:
        print(
            f"scripts/try_upstream_patch: the patch is made for ms-swift {MADE_FOR}, installed is {found}",
            file=sys.stderr,
        )
        return 2
    names = ("ms-swift", "megatron-core", "transformers", "torch")
    print(f"Python {sys.version.split()[0]}, {', '.join(f'{name} {metadata.version(name)}' for name in names)}\n")
    work = Path(tempfile.mkdtemp(prefix="lazyshard-upstream-"))
    started = time.monotonic()
    try:
        tree = patched(work / "ms-swift")
        model = work / "model"
        maker = commands.CPU / "tiny_model.py"
        subprocess.run([sys.executable, str(maker), str(model), "qwen3"], check=True, capture_output=True)
        untouched(tree, work, model)
        for name, part in PARTS.items():
            if wanted in (None, name):
                part(tree, work / name, model)
    except Failed as failed:
        print(f"\nfailed: {failed}; see {work}", file=sys.stderr)
        return 1
    shutil.rmtree(work)
    print(f"\nevery check held, {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
