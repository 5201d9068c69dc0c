"""A normalising flow: neural spline couplings (Durkan et al. 2019), from zuko."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from shortrun.core.latents import Rng, standard_normal
from shortrun.nets.build import needs_extra
from shortrun.priors.base import Prior, Report

with needs_extra("a flow prior", "flows"):
    import zuko

RATE, DECAY, BATCH = 1e-3, 1e-3, 256
EPOCHS, PATIENCE = 200, 5


class FlowPrior(Prior):
    """``p(y)`` is that of ``T(eps)`` with ``eps ~ N(0, I)``, learned by maximum likelihood.

    It stops once held-out latents have not become more likely for PATIENCE epochs, and keeps the best. With six
    thousand latents that is early: a flow needs many more than a mixture does.

    Args:
        transforms: number of couplings.
        width: of the two hidden layers that make the splines of each.
    """

    kind = "flow"

    def __init__(self, size: int, transforms: int = 4, width: int = 128) -> None:
        super().__init__(size)
        self.transforms, self.width = transforms, width
        # couplings (two passes) are as fast to draw from as to evaluate; one latent alone has nothing to be coupled to
        self.flow = zuko.flows.NSF(
            size, transforms=transforms, hidden_features=(width, width), passes=2 if size > 1 else None, randperm=True
        )

    def options(self) -> dict[str, Any]:
        return {"transforms": self.transforms, "width": self.width}

    def white_log_density(self, y: Tensor) -> Tensor:
        return self.flow().log_prob(y)

    def white_sample(self, count: int, rng: Rng = None) -> Tensor:
        with torch.no_grad():
            return self.flow().transform.inv(standard_normal((count, self.size), self.mean, rng))

    def learn(self, y: Tensor, held_out: Tensor, rng: torch.Generator, report: Report) -> None:
        optimiser = torch.optim.AdamW(self.flow.parameters(), lr=RATE, weight_decay=DECAY)
        best, kept, waited = -math.inf, copy.deepcopy(self.flow.state_dict()), 0
        for epoch in range(EPOCHS):
            order = torch.randperm(len(y), generator=rng).to(y.device)
            for chosen in order.split(BATCH):
                with torch.enable_grad():
                    loss = -self.white_log_density(y[chosen]).mean()
                    optimiser.zero_grad(set_to_none=True)
                    loss.backward()
                optimiser.step()
            density = float(self.white_log_density(held_out).mean())
            report((epoch + 1) / EPOCHS, f"epoch {epoch + 1}: {density:.2f} nats on held-out latents")
            if density > best:
                best, kept, waited = density, copy.deepcopy(self.flow.state_dict()), 0
            else:
                waited += 1
            if waited >= PATIENCE or not math.isfinite(density):
                break
        self.flow.load_state_dict(kept)
        optimiser.zero_grad(set_to_none=True)
