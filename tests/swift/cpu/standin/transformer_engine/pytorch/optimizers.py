"""Adam with the state as megatron-core's distributed optimizer finds it in a checkpoint of a real training: the number
of steps in the parameter groups, not in the parameters' state. With torch's own Adam that optimizer can be saved, but
not loaded again."""

from __future__ import annotations

from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **others: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Any, group: dict[str, Any]) -> None:
        first, second = group["betas"]
        gradient, state = parameter.grad, self.state[parameter]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        deviation = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], deviation, value=-group["lr"] / (1 - first ** group["step"]))


class FusedSGD(torch.optim.SGD): ...
