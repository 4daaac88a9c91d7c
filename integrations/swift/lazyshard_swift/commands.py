"""How a stream becomes the data set of ms-swift's pipeline (`_get_dataset`); its commands: start and `--help`.

On SIGTERM, ms-swift's command exits alone and leaves `torchrun` behind as an orphan; with the flag it forwards the
signal and waits. Its script of `swift sft` first runs a small parser, which prints only one option for `--help`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

from lazyshard_swift import ms_swift
from lazyshard_swift.arguments import STORED
from lazyshard_swift.errors import REFUSED, refused
from lazyshard_swift.ms_swift import changed, is_stream, notice, tell, wrap


def extend(module: ModuleType) -> None:
    """Wraps the start of the child, the preparation before the small parser, or functions of the pipelines for data."""
    if module.__name__ == "swift.cli.utils":
        wrap(module, {"try_use_single_device_mode": _then_help})
        return
    if module.__name__ == "swift.pipelines.train.kto":
        wrap(module, {"prepare_kto_dataset args train_dataset val_dataset": _prepare_kto_dataset})
        return
    if module.__name__ == "swift.rlhf_trainers.gkd_helpers":
        wrap(module, {"parse_teacher_model_server val": _parse_teacher_model_server})
        wrap(module, {"fetch_teacher_parsed_by_routing samples requests teacher_configs": _fetch_teacher_outputs})
        return
    if module.__name__ == "swift.pipelines.train.sft":
        # The pipelines of pre-training, RLHF and Megatron inherit from it. ms-swift handles validation data in files.
        data = "self train_dataset val_dataset"
        ours: dict[str, Any] = {f"_encode_dataset {data} pre_process": _encode_dataset}
        ours |= {f"_show_dataset {data}": _show_dataset, "_get_dataset self": _get_dataset}
        ours |= {"_post_process_datasets self datasets": _post_process_datasets}
        wrap(module.SwiftSft, ours)
        return
    original = module.subprocess
    if not callable(getattr(original, "run", None)):
        raise AttributeError("swift.cli.main has no subprocess.run")
    own = {name: getattr(original, name) for name in original.__all__} | {"run": _run}
    module.subprocess = SimpleNamespace(**own)  # type: ignore[attr-defined]


def flag_is_on(arguments: Sequence[str]) -> bool:
    """Returns whether a command line turns the flag on."""
    on = False
    for word, after in itertools.zip_longest(arguments, arguments[1:], fillvalue="true"):
        name, equals, value = word.partition("=")
        # As in transformers' parser: hyphens or underscores, the last one counts, no value means true.
        if name.replace("-", "_") == "__sharded_lazy":
            value = value if equals else after
            on = value.startswith("--") or value.lower() in ("true", "t", "yes", "y", "1")
    return on


def _run(arguments: Sequence[str], *rest: Any, **options: Any) -> Any:
    if rest or options or not flag_is_on(arguments):
        return subprocess.run(arguments, *rest, **options)  # noqa: S603 - as ms-swift would
    if ms_swift.is_too_old(ms_swift.version()):
        tell(f"--sharded_lazy true needs ms-swift {ms_swift.needed()}")
        return subprocess.CompletedProcess(list(arguments), REFUSED)
    code = _wait_for_child(arguments)
    if code and (missing := _missing(arguments)):
        needs, names = f"`megatron` needs {' and '.join(missing)}", " ".join(missing)
        tell(f"{needs}, which is not installed: pip install {names}; see `lazyshard doctor swift`")
    # The code that a shell reports.
    return subprocess.CompletedProcess(list(arguments), code if code >= 0 else 128 - code)


def _wait_for_child(arguments: Sequence[str]) -> int:
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    def interrupted(number: int, frame: FrameType | None) -> None:
        # The terminal has sent it to the child too, which exits on its own; a second one ends both.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    # Installed before the child starts, so that no signal is lost. Under nohup SIGHUP stays ignored. None is a handler
    # that Python did not install and cannot restore.
    handlers = {signal.SIGTERM: forward, signal.SIGHUP: forward, signal.SIGINT: interrupted}
    taken = [number for number in handlers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, handlers[number]) for number in taken}
    try:
        child = subprocess.Popen(arguments)  # noqa: S603 - the command of ms-swift
        for number in early:
            child.send_signal(number)
        return child.wait()
    finally:
        for handled, previous in before.items():
            signal.signal(handled, previous)


def _missing(arguments: Sequence[str]) -> list[str]:
    """Returns the missing distributions without which a command cannot start; empty if that is unknown."""
    version = ms_swift.version()
    needed = ms_swift.dependencies(version)
    megatron = any(Path(word).parent.name == "_megatron" for word in arguments if word.endswith(".py"))
    # 4.0 downloads Megatron-LM itself.
    if version is None or len(needed) == 1 or not megatron:
        return []
    found = set()
    for name in needed:
        with contextlib.suppress(ImportError, ValueError):
            found |= {name} if importlib.util.find_spec(ms_swift.DEPENDENCIES[name]) is not None else set()
    return [name for name in needed if name not in found]


def _then_help(original: Any, *arguments: Any, **options: Any) -> Any:
    result = original(*arguments, **options)
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is not None and Path(script).parts[-2:] == ("cli", "sft.py") and {"-h", "--help"} & {*sys.argv[1:]}:
        with contextlib.suppress(ImportError):
            from swift.pipelines import sft_main

            # Parses the command line, which prints the help and exits.
            sft_main()
    return result


def _get_dataset(original: Any, self: Any, *rest: Any, **options: Any) -> Any:
    args = self.args
    if not getattr(args, "sharded_lazy", False):
        return original(self, *rest, **options)
    from lazyshard_swift.opening import open_train_stream

    _check_hooks("swift.megatron.trainers.base" if ms_swift.is_megatron(args) else "swift.trainers.mixin")
    stream = open_train_stream(args, self.template)
    if stream.validation is not None:
        return stream, stream.validation
    # With no training data to load, ms-swift loads only the validation data.
    with changed(args, dataset=[]):
        return stream, original(self, *rest, **options)[1]


def _prepare_kto_dataset(original: Any, args: Any, train_dataset: Any, val_dataset: Any) -> tuple[Any, Any]:
    """Pairs each response with another one for the KL term, except in streams, whose rows hold it."""
    if not is_stream(train_dataset):
        return original(args, train_dataset, val_dataset)  # type: ignore[no-any-return]
    paired = val_dataset is None or is_stream(val_dataset)
    return train_dataset, val_dataset if paired else original(args, val_dataset, None)[0]


def _parse_teacher_model_server(original: Any, val: str | None) -> Any:
    return [] if val == STORED else original(val)


def _fetch_teacher_outputs(original: Any, samples: Any, requests: Any, servers: Any, *rest: Any, **options: Any) -> Any:
    """Returns the logarithms of the probabilities, and the tokens, of each sample: without servers those of its row."""
    if servers:
        return original(samples, requests, servers, *rest, **options)
    return [(one.extra["teacher_logprobs"], one.extra["teacher_ids"]) for one in samples]


def _except_streams(original: Callable[[Any, Any], Any], train_dataset: Any, val_dataset: Any) -> Any:
    if not is_stream(train_dataset):
        return original(train_dataset, val_dataset)
    return [train_dataset, val_dataset if is_stream(val_dataset) else original(None, val_dataset)[1]]


def _encode_dataset(original: Any, self: Any, train_dataset: Any, val_dataset: Any, *rest: Any, **options: Any) -> Any:
    return _except_streams(lambda *both: original(self, *both, *rest, **options), train_dataset, val_dataset)


def _post_process_datasets(original: Any, self: Any, datasets: Any, *rest: Any, **options: Any) -> Any:
    return _except_streams(lambda *both: original(self, [*both], *rest, **options), *datasets)


def _show_dataset(original: Any, self: Any, stream: Any, val_dataset: Any, *rest: Any, **options: Any) -> None:
    """Logs the first sample of a stream, if it is published; ms-swift would then count the tokens of all samples."""
    if not is_stream(stream):
        original(self, stream, val_dataset, *rest, **options)
        return
    from lazyshard_swift.checkpoints import is_first

    if is_first():
        if (sample := stream.first_sample()) is None:
            notice("too little of the stream is published to show a sample")
        else:
            self.template.print_inputs(sample[0] if isinstance(sample, list) else sample)
    self.train_msg["train_dataset"] = repr(stream)
    counted = not self.args.lazy_tokenize and not getattr(self.args, "predict_with_generate", False)
    if is_stream(val_dataset):
        self.train_msg["val_dataset"] = repr(val_dataset)
    elif val_dataset is not None and len(val_dataset) and counted:
        self.train_msg["val_dataset"] = self._stat_dataset(val_dataset)


def _check_hooks(trainer: str) -> None:
    """Refuses to train with half of the integration: the trainer would draw the samples in its own order."""
    # ms-swift imports its trainers late.
    importlib.import_module(trainer)
    known = trainer in ms_swift.outcomes
    if reasons := ms_swift.failures() if known else f"{trainer} was imported before lazyshard could extend it":
        why = f"cannot work with this ms-swift, {ms_swift.version()}: {reasons}. Supported: {ms_swift.SUPPORTED}"
        raise refused("sharded_lazy", f"true {why}")
