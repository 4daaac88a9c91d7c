"""Runs `examples/live_distillation/vllm_teacher.py` with a model of transformers in place of vLLM; same arguments."""

import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import transformers


class LLM:
    """vLLM's class, as far as the example needs it."""

    def __init__(self, model: str, max_logprobs: int) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._most = max_logprobs

    @torch.no_grad()
    def generate(self, prompts: Sequence[dict[str, Any]], params: Any) -> Iterator[Any]:
        assert params.prompt_logprobs <= self._most
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            after = self._model(torch.tensor([ids])).logits[0].log_softmax(-1)
            found: list[Any] = [None]
            for token, one in zip(ids[1:], after[:-1], strict=True):
                shown = {token, *one.topk(params.prompt_logprobs).indices.tolist()}
                found.append({number: SimpleNamespace(logprob=one[number].item()) for number in shown})
            yield SimpleNamespace(prompt_logprobs=found)


vllm: Any = ModuleType("vllm")
vllm.LLM, vllm.SamplingParams = LLM, SimpleNamespace
sys.modules["vllm"] = vllm
ROOT = Path(__file__).resolve().parents[2]
runpy.run_path(str(ROOT / "examples/live_distillation/vllm_teacher.py"), run_name="__main__")
