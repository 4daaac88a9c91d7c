"""A teacher in vLLM scores chats for ms-swift's GKD, whose student trains while they are scored.

    python vllm_teacher.py CHATS.jsonl STREAM TEACHER --model STUDENT --template TEMPLATE
    swift rlhf --rlhf_type gkd --model STUDENT --template TEMPLATE --lmbda 0 --teacher_model_server rows \
        --gkd_logits_topk 20 --dataset STREAM --sharded_lazy true --max_steps 10000 ...

Both models have the same tokenizer. Each chat has `messages`, the last of them a response. After an interruption the
same command continues after the last published row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from lazyshard import ChunkWriter

TOP = 20
BATCH = PER_CHUNK = 256


def predictions(prompt_logprobs: list[Any], top: int) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the most probable tokens in the place of each token but the first: arrays of shape (tokens - 1, top)."""
    # vLLM adds the prompt's own token where it is not among them.
    best = [sorted(one.items(), key=lambda item: -item[1].logprob)[:top] for one in prompt_logprobs[1:]]
    ids = np.array([[token for token, _ in one] for one in best], np.int32)
    return {"teacher_ids": ids, "teacher_logprobs": np.array([[it.logprob for _, it in one] for one in best], "f4")}


def scored(llm: Any, params: Any, template: Any, chats: Iterable[dict[str, Any]], top: int) -> Iterator[dict[str, Any]]:
    """Yields chats with the teacher's predictions."""
    chats = iter(chats)
    while batch := list(islice(chats, BATCH)):
        prompts = [{"prompt_token_ids": template.encode(chat)["input_ids"]} for chat in batch]
        for chat, output in zip(batch, llm.generate(prompts, params), strict=True):
            yield chat | predictions(output.prompt_logprobs, top)


def main() -> None:
    """Publishes the scored chats, and ends the stream."""
    from swift.arguments import BaseArguments
    from swift.utils import parse_args
    from vllm import LLM, SamplingParams

    chats, stream, teacher, *options = sys.argv[1:]
    template = parse_args(BaseArguments, options)[0].get_template()
    template.set_mode("train")
    llm, params = LLM(teacher, max_logprobs=TOP), SamplingParams(max_tokens=1, prompt_logprobs=TOP)
    with open(chats, encoding="utf-8") as lines, ChunkWriter(stream, PER_CHUNK, arrays=True) as writer:
        rest = map(json.loads, islice(lines, writer.published_samples, None))
        for row in scored(llm, params, template, rest, TOP):
            writer.write(row)


if __name__ == "__main__":
    main()
