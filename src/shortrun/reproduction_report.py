"""The report on a reproduction: the paper's numbers beside the measured ones, as HTML, Markdown, CSV and pictures."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shortrun import hierarchy, metrics
from shortrun.pictures import Line, save_panels
from shortrun.published import (
    COLOUR_SETS,
    DATA_SETS,
    PAPER_DELTA,
    PICTURES,
    QUIET_STEPS,
    SCENES_HIERARCHY,
    TABLE_1,
    TABLE_2,
    TABLE_K,
    Cell,
    Equal,
    Training,
    table_cells,
)
from shortrun.report import markdown_table, page, paragraph, picture, section, table
from shortrun.runs import write_atomically

if TYPE_CHECKING:
    from shortrun.reproduce import Place

PAPER_LINE = ("0.6", ":")
Claim = tuple[str, str, str]
"""What the paper concludes, the numbers measured here, and whether they bear it out: yes or no."""


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
             "Ladder-VAE, centre", "short run, quiet end", "lower"]  # fmt: skip
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


class _Document:
    """The same headings, paragraphs, tables and pictures as HTML and as Markdown."""

    def __init__(self) -> None:
        self.html: list[str] = []
        self.text: list[str] = []

    def add(self, title: str, content: Sequence[str | Path | tuple[Sequence[str], Sequence[Sequence[Any]]]]) -> None:
        """Paragraphs, paths of pictures, and tables as (heads, rows)."""
        parts, self.text = [], [*self.text, f"## {title}"]
        for item in content:
            if isinstance(item, str):
                parts.append(paragraph(item))
                self.text.append(item)
            elif isinstance(item, Path):
                parts.append(picture(item, item.stem))
                self.text.append(f"![{item.stem}]({item.name})")
            else:
                parts.append(table(item[1], item[0]))
                self.text.append(markdown_table(item[1], item[0]))
        self.html.append(section(title, "".join(parts)))


def draw_tables(place: Place, rows: Sequence[Row]) -> dict[str, Path]:
    """Tables as pictures, where all of what they show is finished."""
    known: dict[Training, Any] = {row.cell.training: row.result["measured"].get("mse") for row in rows}
    blue, orange = "tab:blue", "tab:orange"
    shown: dict[str, tuple[tuple[str, str], Training]] = {
        "short-run, equal updates": ((blue, "-"), Training("", equal="updates")),
        "the same, more images": ((blue, "-."), Training("", equal="updates", fresh=True)),
        "short-run, equal minutes": ((blue, "--"), Training("")),
        "ladder-vae, equal updates": ((orange, "-"), Training("", "ladder-vae", equal="updates")),
        "ladder-vae, equal minutes": ((orange, "--"), Training("", "ladder-vae")),
    }
    layers, steps = (1, 3, 5), list(TABLE_K)
    by_layers: dict[str, list[Line]] = {}
    for name in DATA_SETS:
        by_layers[name] = []
        for label, (style, training) in shown.items():
            values = [known.get(replace(training, data=name, layers=count)) for count in layers]
            by_layers[name].append((label, style, layers, values))
        paper = [TABLE_1["short-run", count][name][0] for count in layers]
        by_layers[name].append(("short-run, paper", PAPER_LINE, layers, paper))
    measured = [known.get(Training("celeba", layers=5, steps=k, equal="updates")) for k in steps]
    by_steps: list[Line] = [
        ("measured", (blue, "-"), steps, measured),
        ("paper", PAPER_LINE, steps, [mse for mse, _ in TABLE_K.values()]),
    ]
    drawn = {}
    for target, panels, label in (
        ("table-1", by_layers, "latent layers L"),
        ("table-K", {"celeba, L = 5": by_steps}, "Langevin steps K"),
    ):
        if all(None not in values for lines in panels.values() for *_, values in lines):
            drawn[target] = place.out / f"{target}.png"
            save_panels(drawn[target], panels, (label, "held-out MSE"), log_x=target == "table-K")
    return drawn


def write_report(place: Place, failed: dict[str, str]) -> None:
    """``report.html``, ``report.md``, and ``<table>.csv`` for what is finished.

    What people have to say about the results, in paragraphs of ``notes.md`` beside them, comes first.
    """
    rows = finished(place)
    document = _Document()
    notes = place.out / "notes.md"
    if notes.is_file():
        document.add("Reading the results", [" ".join(part.split()) for part in notes.read_text().split("\n\n")])
    curves = draw_tables(place, rows)
    held = [*claims(rows), *figure_claims(place)]
    if held:
        borne_out = sum(verdict == "yes" for _, _, verdict in held)
        document.add(
            "What the paper concludes, and what was measured here",
            [f"{borne_out} of {len(held)} hold at this size.", (["claim", "measured", "holds"], held)],
        )
    heads, lines, summary = against_ladder(rows)
    if lines:
        note = (
            "Each number is an error per pixel. A draw from q(z | x) carries its noise into the image, the centre does "
            f"not; for chains, the centre is where the last {QUIET_STEPS} steps lead without noise. The paper does not "
            "say which of the two it measures of an encoder."
        )
        document.add("Short run inference against Ladder-VAE", [summary, note, (heads, lines)])
    for target in dict.fromkeys(cell.target for cell in table_cells()):
        part = [row for row in rows if row.cell.target == target]
        if not part:
            continue
        heads = ["row", "data", "MSE", "MSE, paper", "MSE, centre", "FID", "FID, paper", "KID",
                 "updates", "batches", "seconds"]  # fmt: skip
        lines = [
            [row.cell.row, row.cell.column, show(row.measured("mse"), "mse"), show(row.cell.paper["mse"], "mse"),
             show(row.measured("mse_centre"), "mse"), show(row.measured("fid"), "fid"),
             show(row.cell.paper["fid"], "fid"), show(row.measured("kid"), "kid"),
             f"{row.result['training'].get('updates', 0):,}", f"{row.result['training'].get('iterations', 0):,}",
             f"{row.result['training'].get('seconds', 0):.0f}"]
            for row in part
        ]  # fmt: skip
        with (place.out / f"{target}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([heads, *lines])
        remarks = []
        for column in dict.fromkeys(row.cell.column for row in part):
            for measure, variant in itertools.product(("mse", "fid"), VARIANTS):
                same = [row for row in part if row.cell.column == column and of_variant(row.cell.training, variant)]
                total, agreeing, against = agreement(same, measure)
                if total:
                    note = f"{column}, {variant}: order by {measure.upper()} "
                    note += f"agrees with the paper in {agreeing} of {total} pairs"
                    remarks.append(note + (f"; the paper has {'; '.join(against)}" if against else ""))
        curve = [curves[target]] if target in curves else []
        document.add(f"{target}: {place.command(target)}", [*curve, (heads, lines), *remarks])
    for target, pattern in PICTURES.items():
        if place.drawn(target).is_file():
            pictures = sorted(place.out.glob(pattern))
            content = [item for path in pictures for item in (path.stem, path)]
            document.add(f"{target}: {place.command(target)}", content)
    if place.drawn("figure-hierarchy").is_file():
        numbers = json.loads(place.drawn("figure-hierarchy").read_text())
        shares = [
            [name, f"z_{len(layers) - i}", *(f"{share[factor]:.2f}" for factor in hierarchy.FACTORS)]
            for name, layers in numbers["shares"].items()
            for i, share in enumerate(layers)
        ]
        quality = ", ".join(f"{name} {value:.3f}" for name, value in numbers["reader"].items())
        note = (
            "Share of each factor's variation when one layer alone is freshly drawn, on scenes. The network that reads "
            f"the factors is right in this share (digit, style) or off by so much (position, background): {quality}."
        )
        document.add("Which layer controls what", [note, (["model", "layer", *hierarchy.FACTORS], shares)])
    sources = [
        [path.stem, result["command"], result["training"].get("train_checksum", "")[:16],
         result["training"].get("seed", ""), f"{result['training'].get('seconds', 0):.0f}", result["machine"],
         result["measured"].get("images", "-"), result["measured"].get("samples", "-")]
        for path in sorted((place.out / "models").glob("*.json"))
        for result in [json.loads(path.read_text())]
    ]  # fmt: skip
    heads = ["model", "command", "sha256 of data", "seed", "seconds", "machine", "held-out images", "samples"]
    document.add("Where each number comes from", [(heads, sources)])
    if failed:
        document.add("What failed", [(["what", "why"], list(failed.items()))])
    scale = place.scale
    budget = "as published" if scale.minutes is None else f"{scale.minutes:g} minutes of training per model"
    large = "" if scale.minutes is None else f" ({4 * scale.minutes:g} for 64x64)"
    layers = "; ".join(f"L = {count}: {', '.join(map(str, sizes))}" for count, sizes in scale.layers.items())
    introduction = (
        f"Preset {place.scale_name}: {budget}{large}, or {scale.updates:,} updates where updates are equal; MSE per "
        f"pixel in [-1, 1] on {scale.images:,} held-out images, of a draw from q(z | x) unless it says 'centre'; FID "
        f"and KID of {scale.samples:,} samples against as many training images ({metrics.RESIZE}). Latents: {layers}. "
        "The paper trains 300,000 updates and takes FID of 40,000 samples, so compare orders rather than values."
    )
    title = "The paper's tables and figures, measured"
    text = "\n\n".join([f"# {title}", introduction, *document.text]) + "\n"
    write_atomically(place.out / "report.html", page(title, paragraph(introduction), document.html).encode())
    write_atomically(place.out / "report.md", text.encode())
