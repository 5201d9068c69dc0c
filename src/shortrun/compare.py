"""Train several methods on equal terms, and put their numbers into one table and one picture.

Each method has a folder of its own with its run and its result; what is finished is not done again, so a comparison can
be stopped and continued.
"""

from __future__ import annotations

import csv
import functools
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shortrun import metrics, tasks
from shortrun.config import Method, Terms
from shortrun.learners.base import NotPossibleError
from shortrun.masks import make_mask
from shortrun.pictures import save_bars, save_grid
from shortrun.report import markdown_table
from shortrun.runs import Pretrained, from_pretrained, write_atomically, write_json
from shortrun.train import load_images, train

COLUMNS = {
    "method": "method",
    "mse": "MSE",
    "mse_by_dynamics": "MSE by dynamics",
    "hidden_mse": "hidden MSE",
    "hidden_mse_by_dynamics": "hidden MSE by dynamics",
    "fid": "FID",
    "kid": "KID",
    "lower_bound_bits": "bits/dim, bound",
    "importance_weighted_bits": "bits/dim, importance-weighted",
    "annealed_bits": "bits/dim, AIS",
    "updates": "updates",
    "seconds": "seconds",
    "parameters": "parameters",
}

INFERENCES: dict[str, tasks.By] = {"": "method", "_by_dynamics": "dynamics"}
INPAINTED, FILLS = 100, 4


class Ground:
    """What all methods are measured with, loaded and checked once, before anything is trained."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.network = metrics.inception() if terms.samples else None
        config = terms.config("short-run")  # all methods have the same images
        self.seen, held_out = load_images(config, "train"), load_images(config, "test")
        self.held_out = held_out.batch(slice(0, min(terms.images, len(held_out))))
        count, _, height, width = self.held_out[:INPAINTED].shape
        self.mask = make_mask(terms.mask, count, height, width, torch.Generator().manual_seed(terms.seed))


class Measuring:
    """One method: its run, and every measure that it has, each taken once and saved at once."""

    def __init__(self, method: Method, ground: Ground, folder: Path) -> None:
        self.method, self.ground, self.terms, self.folder = method, ground, ground.terms, folder
        self.path = folder / "result.json"
        self.row: dict[str, Any] = {"method": method, "measured": []}
        if self.path.is_file():
            self.row = json.loads(self.path.read_text())

    def finish(self) -> dict[str, Any]:
        """Whatever is still missing."""
        parts = {
            "training": self.train, "reconstruction": self.reconstruct, "inpainting": self.inpaint,
            "samples": self.sample, "likelihood": self.likelihood, "fid": self.score,
        }  # fmt: skip
        for name, part in parts.items():
            if name not in self.row["measured"]:
                self.row |= part()
                self.row["measured"] = [*self.row["measured"], name]
                write_json(self.path, self.row)
        return self.row

    def train(self) -> dict[str, Any]:
        run = self.folder / "run"
        if train(self.terms.config(self.method), run, resume=(run / "config.yaml").is_file()).stopped:
            raise KeyboardInterrupt  # half-trained methods are not measured
        machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
        return {"parameters": self.trained.parameters, **self.trained.info, "machine": machine}

    @functools.cached_property
    def trained(self) -> Pretrained:
        return from_pretrained(self.folder / "run")

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.terms.seed)

    def reconstruct(self) -> dict[str, Any]:
        x = self.ground.held_out
        found: dict[str, Any] = {}
        for key, by in INFERENCES.items():
            try:
                shown = tasks.reconstruct(self.trained, x, self.generator(), by=by)
            except NotPossibleError:
                continue
            found[f"mse{key}"] = float(tasks.mse_per_image(shown.images, x)[~shown.divergent].mean())
            found[f"mse{key}_divergent"] = int(shown.divergent.sum())
            if by == "method":
                pairs = [("held out", x[:10]), ("reconstruction", shown.images[:10])]
                save_grid(self.folder / "reconstructions.png", pairs)
        return found

    def inpaint(self) -> dict[str, Any]:
        """Error of the mean of a few fills on hidden pixels; the mean image beside it."""
        x, mask = self.ground.held_out[:INPAINTED], self.ground.mask
        found: dict[str, Any] = {"hidden_mse_mean_image": tasks.mean_image_error(self.ground.seen, x, mask)}
        rows = [("original", x[:10]), ("visible", torch.where(mask, x, 0.0)[:10])]
        for key, by in INFERENCES.items():
            try:
                result = tasks.inpaint(self.trained, x, mask, self.generator(), FILLS, by=by)
            except NotPossibleError:
                continue
            found[f"hidden_mse{key}"] = result.hidden_mse
            rows += [(f"by {by}", result.fills[0][:10])]
        if len(rows) > 2:
            save_grid(self.folder / "inpainting.png", rows)
        return found

    def sample(self) -> dict[str, Any]:
        images = tasks.sample(self.trained, 40, self.generator())
        save_grid(self.folder / "samples.png", [("", part) for part in images.split(10)])
        return {}

    def likelihood(self) -> dict[str, Any]:
        if not self.terms.likelihood_images:
            return {}
        return tasks.log_likelihood(
            self.trained, self.ground.held_out[: self.terms.likelihood_images], self.generator()
        )

    def score(self) -> dict[str, Any]:
        if not self.terms.samples:
            return {}
        reference = self.ground.seen.part(self.terms.samples)
        values = tasks.score(self.trained, reference, self.terms.samples, self.generator(), self.ground.network)
        return {**values, "reference_split": "train"}


def compare(methods: Sequence[Method], terms: Terms, folder: Path) -> list[dict[str, Any]]:
    """All methods, one after the other; a method that fails is reported in its row, and the others go on."""
    ground = Ground(terms)
    terms_file = folder / "terms.json"
    stated = {"methods": list(methods), **{key: value for key, value in vars(terms).items() if key != "data_root"}}
    if terms_file.is_file():
        before = json.loads(terms_file.read_text())
        changed = [key for key in stated if key != "methods" and before.get(key) != stated[key]]
        if changed:
            raise ValueError(
                f"{folder} holds a comparison on other terms ({', '.join(changed)} differ); name another folder"
            )
    write_json(terms_file, stated)
    rows = []
    for method in methods:
        try:
            rows.append(Measuring(method, ground, folder / method).finish())
        except (ValueError, RuntimeError, ArithmeticError) as error:
            rows.append({"method": method, "error": str(error)})
            print(f"{method} failed: {error}")
        write_tables(rows, folder, terms)
    return rows


def cell(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if value is None:
        return "error" if "error" in row and key == "mse" else "-"
    if key in ("updates", "parameters"):
        return f"{value:,}"
    if key.endswith("_bits"):
        error = row.get(f"{key}_error")
        return f"{value:.2f}" if error is None else f"{value:.2f} ± {error:.2f}"
    if isinstance(value, float):
        return f"{value:.{ {'fid': 1, 'seconds': 0}.get(key, 4) }f}"
    return str(value)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    return markdown_table([[cell(row, key) for key in COLUMNS] for row in rows], list(COLUMNS.values()))


def write_tables(rows: Sequence[dict[str, Any]], folder: Path, terms: Terms) -> None:
    """``table.md``, ``table.csv``, ``table.json`` and ``comparison.png``."""
    budget = f"{terms.updates} updates" if terms.updates is not None else f"{terms.minutes} minutes"
    note = (
        f"{terms.data}, preset {terms.preset}, {budget} each, seed {terms.seed}. MSE: {terms.images} held-out images, "
        f"per pixel in [-1, 1]. Hidden MSE: mean of {FILLS} fills, mask {terms.mask}, {min(terms.images, INPAINTED)} "
        f"images. FID and KID: {terms.samples} samples against as many training images, "
        f"{metrics.RESIZE}. "
        f"Bits per dimension of 8-bit images: {terms.likelihood_images} held-out images ± one standard error, "
        f"{tasks.WEIGHTS} importance weights. Chains and codes have no bound: AIS is their likelihood."
    )
    write_atomically(folder / "table.md", f"{markdown(rows)}\n\n{note}\n".encode())
    write_json(folder / "table.json", list(rows))
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([row.get(key, "") for key in COLUMNS] for row in rows)
    panels = {
        COLUMNS[key]: {r["method"]: r[key] for r in rows if r.get(key) is not None} for key in ("mse", "fid", "kid")
    }
    save_bars(folder / "comparison.png", {title: values for title, values in panels.items() if values})
