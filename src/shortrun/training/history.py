"""What happened during training."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class History:
    """What happened during training: the lines of ``metrics.jsonl``."""

    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """One for each evaluation: iteration, seconds, mse, loss, step_size, divergent .."""
        return [line for line in self.lines if "loss" in line]

    def plot(self, path: str | Path | None = None) -> Any:
        """Error and step size over time, as a matplotlib figure; also written to ``path``, if one is given."""
        from shortrun.pictures import plot_history

        return plot_history(self.evaluations, path)
