"""For `--external_plugins`: writes down which samples the model gets, from inside every training process.

Each process appends to `$TRACE_DIR/rank_R.jsonl`, one JSON object a line, each line written at once, so that `kill -9`
loses none: {"event": "start" or "batch", "rank": 0, "time": ...}, and of a batch the attributes of `commands.Batch`.

`ids` are read from the tokens themselves: the text of row n holds "sample n" once (see streams.py), so the batch is
decoded, whether it is padded or one long row of many samples. With Megatron the hook is at the batch that comes out of
the data loader, before it is cut for context parallelism; every pipeline stage fetches its own. Where `$ENCODED` is
set, rows that the template encodes are written down there.
"""

import json
import multiprocessing
import os
import re
import sys
import time
from typing import IO, Any, Final

PATTERN: Final = re.compile(r"sample (\d+)")


class _Trace:
    """The file of this process. Forked children (DataLoader workers) never write to it."""

    def __init__(self, directory: str) -> None:
        self._pid = os.getpid()
        self._rank = int(os.environ.get("RANK", "0"))
        self._file: IO[str] = open(  # noqa: SIM115 (stays open for the life of the process)
            os.path.join(directory, f"rank_{self._rank}.jsonl"), "a", buffering=1, encoding="utf-8"
        )
        self._micro: dict[tuple[bool, int], tuple[int, int]] = {}

    def write(self, event: str, **facts: Any) -> None:
        if os.getpid() == self._pid:
            line = {"event": event, "rank": self._rank, "time": time.time(), **facts}
            self._file.write(json.dumps(line) + "\n")

    def batch(self, tokenizer: Any, inputs: Any, step: int, train: bool, **place: int) -> None:
        # KTO has two inputs, of the row's response and of another's.
        tokens = (inputs["completion_input_ids"] if "label" in inputs else inputs["input_ids"]).tolist()
        ids = [int(number) for row in tokens for number in PATTERN.findall(tokenizer.decode(row))]
        place = dict.fromkeys(("dp", "tp", "pp", "cp", "vp"), 0) | place
        last_step, last_micro = self._micro.get((train, place["vp"]), (0, 0))
        micro = last_micro + 1 if last_step == step else 0
        self._micro[train, place["vp"]] = step, micro
        self.write("batch", step=step, micro=micro, train=train, ids=ids, tokens=sum(map(len, tokens)), **place)


def _trace_megatron(trace: _Trace) -> None:
    from megatron.core import mpu
    from swift.megatron.trainers.base import BaseMegatronTrainer

    prepare = BaseMegatronTrainer._prepare_batch

    def traced(self: Any, data: Any, vp_stage: int | None = None) -> Any:
        trace.batch(
            self.template.tokenizer,
            data,
            step=self.state.iteration + 1,
            train=self.unwrapped_models[0].training,
            dp=mpu.get_data_parallel_rank(),
            tp=mpu.get_tensor_model_parallel_rank(),
            pp=mpu.get_pipeline_model_parallel_rank(),
            cp=mpu.get_context_parallel_rank(),
            vp=vp_stage or 0,
        )
        return prepare(self, data, vp_stage)

    BaseMegatronTrainer._prepare_batch = traced


def _trace_transformers(trace: _Trace) -> None:
    from transformers import Trainer

    training_step, prediction_step = Trainer.training_step, Trainer.prediction_step

    def traced(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        step, rank = self.state.global_step + 1, self.accelerator.process_index
        if not isinstance(inputs, list):
            trace.batch(self.template.tokenizer, inputs, step, train=True, dp=rank)
            return training_step(self, model, inputs, *args, **kwargs)
        prepare = self._prepare_inputs

        def prepared(rows: Any) -> Any:
            # GRPO and GKD take rows, and train what they make of them.
            made = prepare(rows)
            trace.batch(self.template.tokenizer, made["model_inputs"], step, train=True, dp=rank)
            return made

        self._prepare_inputs = prepared
        try:
            return training_step(self, model, inputs, *args, **kwargs)
        finally:
            del self._prepare_inputs

    def evaluated(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        step, rank = self.state.global_step, self.accelerator.process_index
        trace.batch(self.template.tokenizer, inputs, step, train=False, dp=rank)
        return prediction_step(self, model, inputs, *args, **kwargs)

    Trainer.training_step, Trainer.prediction_step = traced, evaluated


def _count_encoded(log: str) -> None:
    """Appends the number of each row that ms-swift's template encodes, in all processes, or -1."""
    from swift.template.base import Template

    encode = Template.encode

    def counted(self: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
        found = PATTERN.search(str(inputs))
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{int(found[1]) if found else -1}\n")
        return encode(self, inputs, *rest, **options)

    Template.encode = counted


def _install() -> None:
    directory = os.environ.get("TRACE_DIR")
    # A worker that was spawned, not forked, imports the plugins again.
    if not directory or multiprocessing.parent_process() is not None:
        return
    trace = _Trace(directory)
    if "swift.megatron.pipelines" in sys.modules:
        _trace_megatron(trace)
    else:
        _trace_transformers(trace)
    if "ENCODED" in os.environ:
        _count_encoded(os.environ["ENCODED"])
    trace.write("start")


_install()
