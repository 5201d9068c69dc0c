"""Work shared between processes: the only file that knows there may be several.

Several are started by ``accelerate launch`` or ``torchrun``; then accelerate connects them. A process by itself needs
nothing of that.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor

from shortrun.core.latents import seeded, standard_normal

MixedPrecision = Literal["no", "bf16"]
CHUNK = 250


_flushing = 0  # how many blocks of flushed_denormals are open


@contextlib.contextmanager
def flushed_denormals() -> Iterator[None]:
    """Numbers below the smallest normal one count as zero inside this block.

    Saturated units give such gradients, and processors are many times slower with them. The setting is one of the whole
    process, so the outermost block restores it; torch does not tell what it was, and off is its default.
    """
    global _flushing
    _flushing += 1
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        _flushing -= 1
        if not _flushing:
            torch.set_flush_denormal(False)


class Processes:
    """This process among all that share the work, and its device. By itself, all shares are the whole."""

    num_processes = 1
    process_index = 0

    def __init__(self, device: torch.device | str = "cpu", mixed_precision: MixedPrecision = "no") -> None:
        self.device, self.mixed_precision = torch.device(device), mixed_precision

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    def autocast(self) -> AbstractContextManager[Any]:
        """The mixed precision of the network."""
        if self.mixed_precision == "no":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def total(self, values: Tensor) -> Tensor:
        """Sum over all processes."""
        return values

    def gather(self, values: Tensor) -> Tensor:
        """Those of all processes, one after the other along the first dimension; equally many each."""
        return values

    def gather_uneven(self, values: Tensor, filling: float = 0.0) -> Tensor:
        """As :meth:`gather`; shares that are shorter than the longest are filled up."""
        return values

    def gather_objects(self, values: list[Any]) -> list[Any]:
        return values

    def wait(self) -> None:
        """Until all processes are here."""

    # -- shares ---------------------------------------------------------------------------------------

    def own(self, batch: Any) -> Any:
        """The share of this process in something that all processes hold or draw in full."""
        if self.num_processes == 1:
            return batch
        if isinstance(batch, Tensor):
            return batch.tensor_split(self.num_processes)[self.process_index]
        rows = torch.arange(len(batch)).tensor_split(self.num_processes)[self.process_index]
        return [batch[i] for i in rows.tolist()]

    def own_noise(self, shape: Sequence[int], like: Tensor, rng: torch.Generator) -> Tensor:
        """N(0, 1) noise for the whole batch, drawn alike by all processes, of which each takes its share."""
        return self.own(standard_normal(shape, like, rng))

    def remember(self, table: Tensor, indices: Tensor, values: Tensor) -> None:
        """Write what each process found for its share of the batch into a table with a row per training example."""
        rows = self.own(indices)
        if self.num_processes > 1:
            rows = self.gather_uneven(rows.to(values.device), filling=-1)
            values = self.gather_uneven(values)[rows >= 0]
            rows = rows[rows >= 0]
        table[rows.cpu()] = values.detach().cpu()

    def in_chunks(
        self,
        count: int,
        work: Callable[[slice, torch.Generator], Sequence[Tensor]],
        rng: torch.Generator,
        chunk: int = CHUNK,
    ) -> tuple[Tensor, ...]:
        """``work(rows, rng)`` for each chunk of rows; the parts are joined along their first dimension.

        Each chunk has random numbers of its own, so the result does not depend on the number of processes.
        """
        parts = []
        for i, source in enumerate(seeded(rng, -(-count // chunk))):
            if i % self.num_processes == self.process_index:
                rows = slice(chunk * i, min(chunk * (i + 1), count))
                with flushed_denormals():
                    parts.append((i, tuple(work(rows, source))))
        if self.num_processes > 1:
            sent = [(i, tuple(tensor.cpu() for tensor in part)) for i, part in parts]
            parts = sorted(self.gather_objects(sent), key=lambda pair: pair[0])
        return tuple(torch.cat(columns) for columns in zip(*(part for _, part in parts), strict=True))


def _part() -> None:
    """Leave the group of processes in order: gloo may abort one whose group is gone while the interpreter ends."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Launched(Processes):
    """Several processes, connected by accelerate."""

    def __init__(self, mixed_precision: MixedPrecision = "no") -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state()  # else a second run in one process could not have another precision
        # Without cpu=True, processes on machines that have only CPUs would each believe to be alone.
        self.accelerator = Accelerator(cpu=not torch.accelerator.is_available(), mixed_precision=mixed_precision)
        super().__init__(self.accelerator.device, mixed_precision)
        self.num_processes = self.accelerator.num_processes
        self.process_index = self.accelerator.process_index
        atexit.register(_part)

    def total(self, values: Tensor) -> Tensor:
        return self.accelerator.reduce(values, "sum")

    def gather(self, values: Tensor) -> Tensor:
        return self.accelerator.gather(values)

    def gather_uneven(self, values: Tensor, filling: float = 0.0) -> Tensor:
        return self.accelerator.gather(self.accelerator.pad_across_processes(values, pad_index=filling))

    def gather_objects(self, values: list[Any]) -> list[Any]:
        from accelerate.utils import gather_object

        return gather_object(values)

    def wait(self) -> None:
        self.accelerator.wait_for_everyone()


def is_first_process() -> bool:
    """Whether this is the first of those that were launched together, before they are connected."""
    return int(os.environ.get("RANK", "0")) == 0


def processes(mixed_precision: MixedPrecision = "no") -> Processes:
    """The processes that were launched together with this one, on the best device there is."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return Launched(mixed_precision)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return Processes(device or "cpu", mixed_precision)
