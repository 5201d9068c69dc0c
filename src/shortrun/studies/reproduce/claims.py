"""What the paper concludes from its tables and figures, and whether the numbers measured here agree."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shortrun.studies.reproduce.place import Place
from shortrun.studies.reproduce.published import (
    COLOUR_SETS,
    DATA_SETS,
    PAPER_DELTA,
    SCENES_HIERARCHY,
    TABLE_2,
    TABLE_K,
    Cell,
    Equal,
    Training,
    table_cells,
)

Claim = tuple[str, str, str]
"""What the paper concludes, the numbers measured here, and whether they agree: yes or no."""


@dataclass(frozen=True)
class Row:
    """A finished cell."""

    cell: Cell
    result: dict[str, Any]
    model: Training
    """The one that was trained; other cells may share it."""

    def measured(self, measure: str) -> float | None:
        """None where the cell does not show it, or it was not taken."""
        return self.result["measured"].get(measure) if self.cell.with_fid or measure.startswith("mse") else None


def finished(place: Place) -> list[Row]:
    rows = []
    for cell in place.cells:
        path = place.result(cell.training)
        if path.is_file():
            rows.append(Row(cell, json.loads(path.read_text()), place.model(cell.training)))
    return rows


def show(value: float | None, measure: str) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if measure == "fid" else f"{value:.4f}"


def agreement(rows: Sequence[Row], measure: str) -> tuple[int, int, list[str]]:
    """Pairs of rows that the paper orders, how many of them are in the same order here, and those that are not."""
    known = [
        (row.cell.row, paper, found)
        for row in rows
        if (paper := row.cell.paper.get(measure)) is not None and (found := row.measured(measure)) is not None
    ]
    total = agreeing = 0
    against = []
    for a, b in itertools.combinations(known, 2):
        theirs, ours = a[1] - b[1], a[2] - b[2]
        if theirs == 0:
            continue
        total += 1
        if theirs * ours > 0:
            agreeing += 1
        else:
            better, worse = (a, b) if theirs < 0 else (b, a)
            against.append(f"{better[0]} before {worse[0]}")
    return total, agreeing, against


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What the paper concludes from its tables. An order of several numbers holds if each step of it does."""
    known = {row.cell.training: row for row in rows}
    published: dict[Training, dict[str, float]] = {}
    for cell in table_cells():
        values = {measure: value for measure, value in cell.paper.items() if value is not None}
        published.setdefault(cell.training, {}).update(values)
    found = []
    compared = set()

    def falls(claim: str, measure: str, *order: Training) -> None:
        theirs: list[Any] = [published.get(training, {}).get(measure) for training in order]
        ours: list[Any] = [known[t].result["measured"].get(measure) if t in known else None for t in order]
        if None in theirs or None in ours or not all(a > b for a, b in itertools.pairwise(theirs)):
            return
        models = (measure, *(known[training].model for training in order))
        if models in compared:  # equal minutes and equal updates can be the same models
            return
        compared.add(models)
        numbers = show(ours[0], measure)
        for a, b in itertools.pairwise(ours):
            numbers += f" {'>' if a > b else '<' if a < b else '='} {show(b, measure)}"
        found.append((claim, numbers, "yes" if all(a > b for a, b in itertools.pairwise(ours)) else "no"))

    layers = (1, 3, 5)
    every_step = "falls with every step of L = 1, 3, 5"
    fair: Equal
    for name in DATA_SETS:
        for fair in ("minutes", "updates"):
            ours = [Training(name, "short-run", count, equal=fair) for count in layers]
            falls(f"{name}, equal {fair}: MSE {every_step}", "mse", *ours)
    for name in COLOUR_SETS:
        ours = [Training(name, "short-run", count) for count in layers]
        falls(f"{name}: FID {every_step}", "fid", *ours)
        for own in ours:
            falls(f"{name}, L = {own.layers}: FID below Ladder-VAE", "fid", replace(own, method="ladder-vae"), own)
        falls(f"{name}, L = 5: FID below Glow", "fid", Training(name, "glow", 3), ours[2])
        for method in TABLE_2:
            if method != "short-run":
                falls(f"{name}, one layer: FID below {method}", "fid", Training(name, method, 1), ours[0])
    for measure in ("mse", "fid"):
        large = [Training("celeba", layers=count, size=64) for count in layers]
        falls(f"celeba 64x64: {measure.upper()} {every_step}", measure, *large)
        for few, more in itertools.pairwise(TABLE_K):
            steps = [Training("celeba", layers=5, steps=k, equal="updates") for k in (few, more)]
            falls(f"celeba: {measure.upper()} falls from K = {few} to {more}", measure, *steps)
    return found


# What "near 0.05" and "settles" are taken to mean: all steps chosen in the last third of a run lie between these, and
# the longest is at most so many times the shortest. Neighbours in the tuner's grid differ by a factor of 1.18.
NEAR = (0.04, 0.06)
SETTLED = 1.25


def step_size_claims(tuned: Sequence[dict[str, Any]]) -> list[Claim]:
    """What the paper concludes from its step size figure, for each tuner, over all seeds."""
    found = []
    for tune in dict.fromkeys(run["tune"] for run in tuned):
        parts, holds = [], True
        for run in tuned:
            if run["tune"] != tune or not run["delta"]:
                continue
            points = zip(run["iteration"], run["delta"], strict=True)
            late = [delta for i, delta in points if 3 * i > 2 * run["iterations"]] or run["delta"][-1:]
            settled = max(late) <= SETTLED * min(late)
            holds = holds and settled and NEAR[0] <= min(late) and max(late) <= NEAR[1]
            moving = "settled" if settled else "not settled"
            parts.append(f"seed {run['seed']}: {min(late):.3f} to {max(late):.3f}, {moving}")
        claim = (
            f"tuned by {tune}, the step settles near {PAPER_DELTA} (in the last third of each run, delta stays within "
            f"{NEAR[0]} to {NEAR[1]} and changes by a factor of at most {SETTLED})"
        )
        if parts:
            found.append((claim, "; ".join(parts), "yes" if holds else "no"))
    return found


def hierarchy_claims(shares: dict[str, list[dict[str, float]]]) -> list[Claim]:
    """What the paper concludes from its figure of three independent layers, read from shares in scenes."""
    layers = shares.get(SCENES_HIERARCHY.name, [])
    if not layers:
        return []
    top, middle, bottom = 0, 1, 2
    found = []
    for layer, role, factors in (
        (bottom, "the bottom layer represents the background colour", ("background",)),
        (middle, "the second layer represents digit identity", ("digit",)),
        (top, "the top layer represents general structure", ("style", "position")),
    ):
        reading = "the largest share in " + " and in ".join(factors)
        values = {factor: [share[factor] for share in layers] for factor in factors}
        holds = all(share.index(max(share)) == layer for share in values.values())
        numbers = "; ".join(f"{f} {', '.join(f'{v:.2f}' for v in share)}" for f, share in values.items())
        claim = f"scenes, independent layers: {role} (it has {reading})"
        found.append((claim, f"{numbers} (z_3, z_2, z_1)", "yes" if holds else "no"))
    return found


def figure_claims(place: Place) -> list[Claim]:
    """What the paper concludes from its figures; none for figures without these numbers."""
    notes = {}
    for name in ("figure-step-size", "figure-hierarchy"):
        path = place.drawn(name)
        notes[name] = json.loads(path.read_text()) if path.is_file() else {}
    return [
        *step_size_claims(notes["figure-step-size"].get("tuned", [])),
        *hierarchy_claims(notes["figure-hierarchy"].get("shares", {})),
    ]


VARIANTS: dict[str, tuple[Equal, bool]] = {
    "equal updates": ("updates", False),
    "equal updates, more images": ("updates", True),
    "equal minutes": ("minutes", False),
}
"""How the budgets of methods are made equal: by what, and whether short run inference makes fewer updates per chain."""


def of_variant(training: Training, variant: str) -> bool:
    equal, fresh = VARIANTS[variant]
    return training.equal == equal and (training.method != "short-run" or training.fresh == fresh)


def against_ladder(rows: Sequence[Row]) -> tuple[list[str], list[list[str]], str]:
    """MSE of Ladder-VAE and short run inference, draws and centres apart: the heads and lines of a table, a summary."""
    known = {row.cell.training: row.result["measured"] for row in rows}
    models = {row.cell.training: row.model for row in rows}
    compared = set()
    heads = ["equal", "data", "L", "Ladder-VAE, draw", "short run, draw", "lower",
             "Ladder-VAE, centre", "short run, centre", "lower"]  # fmt: skip
    lines = []
    won: dict[tuple[str, str], list[bool]] = {}
    for variant, (equal, fresh) in VARIANTS.items():
        for name, layers in itertools.product(DATA_SETS, (1, 3, 5)):
            ours = Training(name, layers=layers, equal=equal, fresh=fresh)
            theirs = Training(name, "ladder-vae", layers, equal=equal)
            if ours not in known or theirs not in known or (models[ours], models[theirs]) in compared:
                continue
            compared.add((models[ours], models[theirs]))
            line = [variant.removeprefix("equal "), name, str(layers)]
            for measure in ("mse", "mse_centre"):
                pair = known[theirs][measure], known[ours][measure]
                lower = "short run" if pair[1] < pair[0] else "Ladder-VAE"
                line += [*(show(value, "mse") for value in pair), lower]
                won.setdefault((variant, measure), []).append(lower == "short run")
            lines.append(line)
    words = {"mse": "draws", "mse_centre": "centres"}
    parts = [f"{sum(v)} of {len(v)} at {variant} ({words[measure]})" for (variant, measure), v in won.items()]
    return heads, lines, f"Short run inference has the lower MSE in {'; '.join(parts)}."
