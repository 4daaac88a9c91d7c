from typing import Any

import torch


class TransformerEngineBaseModule(torch.nn.Module):
    fp8_meta: dict[str, Any] = {}  # noqa: RUF012

    def set_tensor_parallel_group(self, group: Any) -> None:
        self.tp_group = group
