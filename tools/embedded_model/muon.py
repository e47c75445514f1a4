"""Muon, the optimizer of the matrices inside the layers."""

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal (Jordan et al., 2024), for the matrices inside the layers."""

    def __init__(self, params: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weights in by_shape(group["params"]):
                updates = orthogonalize(torch.stack([self._momentum(weight, group["momentum"]) for weight in weights]))
                scale = max(1.0, weights[0].shape[0] / weights[0].shape[1]) ** 0.5
                for weight, update in zip(weights, updates, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update, alpha=-group["lr"] * scale)

    def _momentum(self, weight: nn.Parameter, momentum: float) -> Tensor:
        """Fold the gradient into the running mean of `weight` and return Nesterov's look-ahead."""
        mean = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
        mean.lerp_(weight.grad, 1 - momentum)
        return weight.grad.lerp(mean, momentum)


def by_shape(weights: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[torch.Size, list[nn.Parameter]] = {}
    for weight in weights:
        groups.setdefault(weight.shape, []).append(weight)
    return list(groups.values())


def orthogonalize(matrices: Tensor) -> Tensor:
    """Move all singular values of `[n, rows, columns]` to about 1 with five Newton-Schulz iterations."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.mT if tall else x).float()
