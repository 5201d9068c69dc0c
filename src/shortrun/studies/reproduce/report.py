"""The report on a reproduction: the paper's numbers beside the measured ones, as HTML, Markdown, CSV and pictures."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shortrun import metrics
from shortrun.files import write_atomically
from shortrun.pictures import Line, save_curves, save_panels
from shortrun.studies.hierarchy import FACTORS
from shortrun.studies.report import markdown_table, page, paragraph, picture, section, table
from shortrun.studies.reproduce.claims import (
    VARIANTS,
    Row,
    against_ladder,
    agreement,
    claims,
    figure_claims,
    finished,
    of_variant,
    show,
)
from shortrun.studies.reproduce.place import Place
from shortrun.studies.reproduce.published import (
    DATA_SETS,
    PICTURES,
    TABLE_1,
    TABLE_K,
    Training,
    table_cells,
)
from shortrun.studies.reproduce.questions import HELD, NOT_HELD, UNDECIDED, Known, answers

PAPER_LINE = ("0.6", ":")


Content = str | Path | tuple[Sequence[str], Sequence[Sequence[Any]]]
"""A paragraph, the path of a picture, or a table as (heads, rows)."""


class _Document:
    """The same headings, paragraphs, tables and pictures as HTML and as Markdown."""

    def __init__(self) -> None:
        self.html: list[str] = []
        self.text: list[str] = []

    def add(self, title: str, content: Sequence[Content]) -> None:
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


SHOWN_CURVES: dict[str, tuple[tuple[str, str], Training]] = {
    "short-run, L = 3": (("tab:blue", "-"), Training("")),
    "Ladder-VAE, L = 3": (("tab:orange", "-"), Training("", "ladder-vae")),
    "VAE": (("tab:green", "-"), Training("", "ladder-vae", 1)),
    "short-run, L = 1": (("tab:blue", "--"), Training("", layers=1)),
    "GLO": (("tab:gray", "-"), Training("", "glo", 1)),
}


def draw_curves(place: Place, rows: Sequence[Row]) -> Path | None:
    """Error of draws over the time of training, a panel for each data set of which there is a curve."""
    known = Known(rows, place)
    panels: dict[str, list[Line]] = {}
    for name in DATA_SETS:
        for label, (style, training) in SHOWN_CURVES.items():
            curve = [line for line in known.curve(replace(training, data=name)) if line.get("mse") is not None]
            if curve:
                minutes = [line["seconds"] / 60 for line in curve]
                panels.setdefault(name, []).append((label, style, minutes, [line["mse"] for line in curve]))
    if not panels:
        return None
    path = place.out / "curves.png"
    save_curves(path, panels, ("minutes of training", "held-out MSE of draws"))
    return path


def _questions(place: Place, rows: Sequence[Row], document: _Document) -> None:
    for question, found in answers(place, rows).items():
        counts = ", ".join(f"{sum(a.verdict == v for a in found)} {v}" for v in (HELD, NOT_HELD, UNDECIDED))
        content: list[Content] = [f"{counts}."] if found else ["Not measured yet."]
        if found:
            content.append((["claim", "verdict", "evidence"], [list(answer) for answer in found]))
        document.add(question, content)
    curves = draw_curves(place, rows)
    if curves is not None:
        note = f"On {place.scale.watched} held-out images; the learning rate falls in the last 40 % of each run."
        document.add("Learning curves", [note, curves])


def _left_out(place: Place, document: _Document) -> None:
    missing = [t.name for t in place.planned if not place.result(t).is_file()]
    if missing and place.scale.left_out:
        document.add(f"Not measured yet: {len(missing)} of {len(place.planned)} models", [", ".join(missing)])
    if place.scale.left_out:
        lines = [[pattern, reason] for pattern, reason in place.scale.left_out.items()]
        document.add("Left out at this size, and why", [(["what", "why"], lines)])


def _real(place: Place, document: _Document) -> None:
    """How far real images are from other real ones: what FID and KID would say of perfect samples."""
    lines = [
        [path.stem.removeprefix("real-"), f"{found['samples']:,}", show(found["fid"], "fid"),
         f"{found['kid']:.5f}", f"{found['kid_deviation']:.5f}"]
        for path in sorted(place.out.glob("real-*.json"))
        for found in [json.loads(path.read_text())]
    ]  # fmt: skip
    if lines:
        note = "Training images against as many other training images: FID is biased for so few, KID is not."
        heads = ["data", "images", "FID", "KID", "deviation of KID over its subsets"]
        document.add("Real images against real ones", [note, (heads, lines)])


def _conclusions(place: Place, rows: Sequence[Row], document: _Document) -> None:
    held = [*claims(rows), *figure_claims(place)]
    if held:
        holding = sum(verdict == "yes" for _, _, verdict in held)
        document.add(
            "What the paper concludes, and what was measured here",
            [f"{holding} of {len(held)} hold at this size.", (["claim", "measured", "holds"], held)],
        )
    heads, lines, summary = against_ladder(rows)
    if lines:
        note = (
            "Each number is an error per pixel. A draw from q(z | x) carries its noise into the image, the centre does "
            "not; for chains, the centre is where they end if their steps take no noise. The paper does not say which "
            "of the two it measures of an encoder."
        )
        document.add("Short run inference against Ladder-VAE", [summary, note, (heads, lines)])


def _tables(place: Place, rows: Sequence[Row], document: _Document) -> None:
    """Each table in the document and as CSV, with its curves and how far its orders agree with the paper's."""
    curves = draw_tables(place, rows)
    heads = ["row", "data", "MSE", "MSE, paper", "MSE, centre", "FID", "FID, paper", "KID", "FID, learned prior",
             "KID, learned prior", "updates", "batches", "seconds"]  # fmt: skip
    for target in dict.fromkeys(cell.target for cell in table_cells()):
        part = [row for row in rows if row.cell.target == target]
        if not part:
            continue
        lines = [
            [row.cell.row, row.cell.column, show(row.measured("mse"), "mse"), show(row.cell.paper["mse"], "mse"),
             show(row.measured("mse_centre"), "mse"), show(row.measured("fid"), "fid"),
             show(row.cell.paper["fid"], "fid"), show(row.measured("kid"), "kid"),
             show(row.measured("fid_learned"), "fid"), show(row.measured("kid_learned"), "kid"),
             f"{row.result['training'].get('updates', 0):,}", f"{row.result['training'].get('iterations', 0):,}",
             f"{row.result['training'].get('seconds', 0):.0f}"]
            for row in part
        ]  # fmt: skip
        with (place.out / f"{target}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([heads, *lines])
        curve = [curves[target]] if target in curves else []
        document.add(f"{target}: {place.command(target)}", [*curve, (heads, lines), *_orders(part)])


def _orders(rows: Sequence[Row]) -> list[str]:
    remarks = []
    for column in dict.fromkeys(row.cell.column for row in rows):
        for measure, variant in itertools.product(("mse", "fid"), VARIANTS):
            same = [row for row in rows if row.cell.column == column and of_variant(row.cell.training, variant)]
            total, agreeing, against = agreement(same, measure)
            if total:
                note = f"{column}, {variant}: order by {measure.upper()} "
                note += f"agrees with the paper in {agreeing} of {total} pairs"
                remarks.append(note + (f"; the paper has {'; '.join(against)}" if against else ""))
    return remarks


def _figures(place: Place, document: _Document) -> None:
    for target, pattern in PICTURES.items():
        if place.drawn(target).is_file():
            pictures = sorted(place.out.glob(pattern))
            content = [item for path in pictures for item in (path.stem, path)]
            document.add(f"{target}: {place.command(target)}", content)
    if place.drawn("figure-hierarchy").is_file():
        numbers = json.loads(place.drawn("figure-hierarchy").read_text())
        shares = [
            [name, f"z_{len(layers) - i}", *(f"{share[factor]:.2f}" for factor in FACTORS)]
            for name, layers in numbers["shares"].items()
            for i, share in enumerate(layers)
        ]
        quality = ", ".join(f"{name} {value:.3f}" for name, value in numbers["reader"].items())
        note = (
            "Share of each factor's variation when one layer alone is freshly drawn, on scenes. The network that reads "
            f"the factors is right in this share (digit, style) or off by so much (position, background): {quality}."
        )
        document.add("Which layer controls what", [note, (["model", "layer", *FACTORS], shares)])


def _sources(place: Place, document: _Document) -> None:
    heads = ["model", "command", "sha256 of data", "seed", "seconds", "machine", "held-out images", "samples"]
    sources = [
        [path.stem, result["command"], result["training"].get("train_checksum", "")[:16],
         result["training"].get("seed", ""), f"{result['training'].get('seconds', 0):.0f}", result["machine"],
         result["measured"].get("images", "-"), result["measured"].get("samples", "-")]
        for path in sorted((place.out / "models").glob("*.json"))
        for result in [json.loads(path.read_text())]
    ]  # fmt: skip
    document.add("Where each number comes from", [(heads, sources)])


def _introduction(place: Place) -> str:
    scale = place.scale
    time = "minutes" if scale.clock == "wall" else "minutes of processor time, on one thread,"
    budget = "as published" if scale.minutes is None else f"{scale.minutes:g} {time} of training per model"
    large = "" if scale.minutes is None else f" ({scale.large * scale.minutes:g} for 64x64)"
    layers = "; ".join(f"L = {count}: {', '.join(map(str, sizes))}" for count, sizes in scale.layers.items())
    return (
        f"Preset {place.scale_name}: {budget}{large}, or {scale.updates:,} updates where updates are equal; MSE per "
        f"pixel in [-1, 1] on {scale.images:,} held-out images, of a draw from q(z | x) unless it says 'centre'; FID "
        f"and KID of {scale.samples:,} samples against as many training images ({metrics.RESIZE}). Latents: {layers}. "
        "The paper trains 300,000 updates and takes FID of 40,000 samples, so compare orders rather than values."
    )


def write_report(place: Place, failed: dict[str, str]) -> None:
    """``report.html``, ``report.md``, and ``<table>.csv`` for what is finished.

    What people write about the results, in paragraphs of ``notes.md`` beside them, comes first.
    """
    rows, document = finished(place), _Document()
    notes = place.out / "notes.md"
    if notes.is_file():
        document.add("Reading the results", [" ".join(part.split()) for part in notes.read_text().split("\n\n")])
    _questions(place, rows, document)
    _conclusions(place, rows, document)
    _real(place, document)
    _tables(place, rows, document)
    _figures(place, document)
    _left_out(place, document)
    _sources(place, document)
    if failed:
        document.add("What failed", [(["what", "why"], list(failed.items()))])
    title, introduction = "The paper's tables and figures, measured", _introduction(place)
    text = "\n\n".join([f"# {title}", introduction, *document.text]) + "\n"
    write_atomically(place.out / "report.html", page(title, paragraph(introduction), document.html).encode())
    write_atomically(place.out / "report.md", text.encode())
