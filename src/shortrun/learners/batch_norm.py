"""Batch normalisation (Ioffe & Szegedy 2015) over the batch of all processes together."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as across
from torch import Tensor, nn


class BatchNorm(nn.BatchNorm2d):
    """``nn.BatchNorm2d`` whose batch is that of all processes, so that learning does not depend on their number.

    ``nn.SyncBatchNorm`` does the same on GPUs alone. Evaluation uses the running statistics, which are equal in all
    processes; there they need not keep step.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float

    def forward(self, x: Tensor) -> Tensor:
        alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
        if alone or not self.training:
            return super().forward(x)
        # Gradients flow back through these sums: each process gets the part that the losses of the others have in it.
        wide = x.float()
        count = across.all_reduce(wide.new_tensor(float(x.numel() // self.num_features)))
        mean = across.all_reduce(wide.sum((0, 2, 3))) / count
        centred = wide - mean[:, None, None]
        variance = across.all_reduce(centred.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
            self.num_batches_tracked.add_(1)
        scale = self.weight * (variance + self.eps).rsqrt()
        return (centred * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)
