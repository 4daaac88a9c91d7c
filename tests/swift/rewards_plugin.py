"""For `--external_plugins`: a reward for GRPO, and completions that are never empty, which ms-swift cannot train."""

from typing import Any

from swift.rewards import ORM, orms
from transformers import GenerationMixin


class Length(ORM):  # type: ignore[misc]
    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return [float(len(text) % 7) for text in completions]


def _install() -> None:
    generate = GenerationMixin.generate

    def never_empty(self: Any, *arguments: Any, **options: Any) -> Any:
        options["generation_config"].min_new_tokens = 4
        return generate(self, *arguments, **options)

    GenerationMixin.generate = never_empty
    orms["length"] = Length


_install()
