"""Work shared between processes, for use after training: each answers a part of the question, all get the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object
from torch import Tensor

CHUNK = 250


def _on_cpu() -> bool:
    """Without this, processes on machines that have only CPUs would each believe to be alone."""
    return not torch.accelerator.is_available()


def processes() -> PartialState:
    """This process among all of them, and its device."""
    return PartialState(cpu=_on_cpu())


def accelerator(mixed_precision: str = "no") -> Accelerator:
    AcceleratorState._reset_state()  # else a second run in one process could not have another precision
    return Accelerator(cpu=_on_cpu(), mixed_precision=mixed_precision)


def seeded(generator: torch.Generator, count: int) -> list[torch.Generator]:
    """A generator for each part of some work, so that results do not depend on how the parts are shared out."""
    seeds = torch.randint(2**62, (count,), generator=generator).tolist()
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def in_chunks(
    count: int,
    work: Callable[[slice, torch.Generator], Sequence[Tensor]],
    generator: torch.Generator,
    chunk: int = CHUNK,
) -> tuple[Tensor, ...]:
    """``work(rows, generator)`` for each chunk of rows; the parts are joined along their first dimension.

    Each chunk has a generator of its own, so the result does not depend on the number of processes.
    """
    state = processes()
    parts = []
    for i, source in enumerate(seeded(generator, -(-count // chunk))):
        if i % state.num_processes == state.process_index:
            rows = slice(chunk * i, min(chunk * (i + 1), count))
            parts.append((i, tuple(work(rows, source))))
    if state.num_processes > 1:
        parts = sorted(
            gather_object([(i, tuple(tensor.cpu() for tensor in part)) for i, part in parts]), key=lambda pair: pair[0]
        )
    return tuple(torch.cat(columns) for columns in zip(*(part for _, part in parts), strict=True))
