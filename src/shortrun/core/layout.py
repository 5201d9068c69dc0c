"""Convolutions run faster on weights that lie channels-last in memory: the same numbers in another order.

Not in every module: one that takes maps for rows, ``maps.view(n, -1)``, works in the usual order alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def to_channels_last(model: Any, trial: Callable[[], object]) -> Any:
    """The model, whose weights of 2-d convolutions lie channels-last for good, if the trial runs with them."""
    ranks = {parameter.ndim for parameter in model.parameters()}
    if 4 in ranks and 5 not in ranks:
        model.to(memory_format=torch.channels_last)
        try:
            trial()
        except Exception:  # what else is wrong will be said where the model is used
            model.to(memory_format=torch.contiguous_format)
    return model


def in_channels_last(model: Any) -> Any:
    """``model`` with copies of the weights of its 2-d convolutions, channels-last; it shares all else with the model.

    The model stays as it is, also while others use it. It is given back itself if there is nothing to lay out: weights
    lie so, or not on the CPU, or it is no ``nn.Module``.
    """
    twins: dict[nn.Module, nn.Module] = {}

    def twin(module: nn.Module) -> nn.Module:
        if module not in twins:
            children = {name: None if child is None else twin(child) for name, child in module._modules.items()}
            weights = _laid_out(module)
            twins[module] = module
            if weights or any(children[name] is not child for name, child in module._modules.items()):
                twins[module] = copy = module.__new__(type(module))  # as torch's DataParallel makes its replicas
                vars(copy).update(vars(module), _modules=children, _parameters={**module._parameters, **weights})
        return twins[module]

    return twin(model) if isinstance(model, nn.Module) else model


def _laid_out(module: nn.Module) -> dict[str, nn.Parameter]:
    weight = module._parameters.get("weight") if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)) else None
    if type(weight) is not nn.Parameter or weight.device.type != "cpu":
        return {}
    laid_out = weight.detach().contiguous(memory_format=torch.channels_last)
    return {} if laid_out.data_ptr() == weight.data_ptr() else {"weight": nn.Parameter(laid_out, False)}
