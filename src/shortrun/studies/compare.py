"""Train several methods on equal terms, and put their numbers into one table and one picture.

Each method has a folder of its own with its run and its result; what is finished is not done again, so a comparison can
be stopped and continued.
"""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shortrun import metrics
from shortrun.core.model import NotPossibleError
from shortrun.files import write_atomically, write_json
from shortrun.fitting import fit, not_interrupted
from shortrun.learners import Method
from shortrun.masks import make_mask
from shortrun.metrics.errors import hidden_errors, mean_image_error, mse_per_image
from shortrun.metrics.likelihood import WEIGHTS
from shortrun.pictures import sample_rows, save_bars, save_grid
from shortrun.settings import Count, CountOrZero, Positive, check
from shortrun.studies.report import markdown_table
from shortrun.studies.sources import machine, training_of
from shortrun.trained import By, Trained, load
from shortrun.training.config import Config
from shortrun.training.presets import Preset, preset

COLUMNS = {
    "method": "method",
    "mse": "MSE",
    "mse_by_dynamics": "MSE by dynamics",
    "hidden_mse": "hidden MSE",
    "hidden_mse_by_dynamics": "hidden MSE by dynamics",
    "fid": "FID",
    "kid": "KID",
    "fid_normal": "FID, N(0, I)",
    "kid_normal": "KID, N(0, I)",
    "lower_bound_bits": "bits/dim, bound",
    "importance_weighted_bits": "bits/dim, importance-weighted",
    "annealed_bits": "bits/dim, AIS",
    "updates": "updates",
    "seconds": "seconds",
    "parameters": "parameters",
}

INFERENCES: dict[str, By] = {"": "method", "_by_dynamics": "dynamics"}
INPAINTED, FILLS = 100, 4


@dataclass(frozen=True)
class Terms:
    """What is equal for all methods of a comparison."""

    data: str = "embedded"
    data_root: str | None = None
    preset: Preset = "cpu"
    minutes: Positive | None = None
    """Training time of each."""
    updates: Count | None = None
    """Or: updates of the generator of each."""
    images: Count = 500
    """Held-out images for the MSE."""
    mask: str = "lower-half"
    """What is hidden for inpainting."""
    samples: CountOrZero = 500
    """Samples for FID and KID against equally many training images; 0 for neither."""
    likelihood_images: CountOrZero = 16
    """Held-out images for bounds, importance weights and annealed importance sampling; 0 for none of these."""
    seed: int = 0

    def __post_init__(self) -> None:
        check(self)
        if self.samples == 1:
            raise ValueError("samples is 1; expected none or at least two")
        for name in ("minutes", "updates"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; expected more than zero")

    def config(self, method: Method) -> Config:
        config = preset(self.preset, self.data, method).changed(data_root=self.data_root, seed=self.seed)
        if self.updates is not None:
            iterations = config.iterations_for(self.updates)
            every = max(iterations // 5, 1)
            return config.changed(iterations=iterations, minutes=None, evaluate_every=every, checkpoint_every=every)
        if self.minutes is not None:
            return config.changed(minutes=self.minutes, iterations=None, evaluate_every=30.0, checkpoint_every=30.0)
        return config


class Ground:
    """What all methods are measured with, loaded and checked once, before anything is trained."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.network = metrics.inception() if terms.samples else None
        images = terms.config("short-run").data  # all methods have the same ones
        self.seen, self.unseen = images.load("train"), images.load("test")
        self.held_out = self.unseen.batch(slice(0, min(terms.images, len(self.unseen))))
        self.mask = make_mask(terms.mask, self.held_out[:INPAINTED], torch.Generator().manual_seed(terms.seed))


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
        trained = fit(
            None, self.ground.seen, validation=self.ground.unseen, config=self.terms.config(self.method), folder=run,
            resume=(run / "config.yaml").is_file(),
        )  # fmt: skip
        not_interrupted(trained)  # half-trained methods are not measured
        return {"parameters": trained.parameter_count, **training_of(trained.info), "machine": machine()}

    @functools.cached_property
    def trained(self) -> Trained:
        return load(self.folder / "run")

    def reconstruct(self) -> dict[str, Any]:
        x = self.ground.held_out
        found: dict[str, Any] = {}
        for key, by in INFERENCES.items():
            try:
                shown = self.trained.reconstruction(x, by=by, seed=self.terms.seed)
            except NotPossibleError:
                continue
            found[f"mse{key}"] = float(mse_per_image(shown.images, x)[~shown.divergent].mean())
            found[f"mse{key}_divergent"] = int(shown.divergent.sum())
            if by == "method":
                pairs = [("held out", x[:10]), ("reconstruction", shown.images[:10])]
                save_grid(self.folder / "reconstructions.png", pairs)
        return found

    def inpaint(self) -> dict[str, Any]:
        """Error of the mean of a few fills on hidden pixels; the mean image beside it."""
        x, mask = self.ground.held_out[:INPAINTED], self.ground.mask
        found: dict[str, Any] = {"hidden_mse_mean_image": mean_image_error(self.ground.seen, x, mask)}
        rows = [("original", x[:10]), ("visible", torch.where(mask, x, 0.0)[:10])]
        for key, by in INFERENCES.items():
            try:
                fills = self.trained.inpaint(x, mask, FILLS, by=by, seed=self.terms.seed)
            except NotPossibleError:
                continue
            found[f"hidden_mse{key}"] = hidden_errors(fills, x, mask).mean_fill
            rows += [(f"by {by}", fills[0][:10])]
        if len(rows) > 2:
            save_grid(self.folder / "inpainting.png", rows)
        return found

    def sample(self) -> dict[str, Any]:
        save_grid(self.folder / "samples.png", sample_rows(self.trained, 40, self.terms.seed))
        return {"prior": "normal" if self.trained.prior is None else self.trained.prior.kind}

    def likelihood(self) -> dict[str, Any]:
        if not self.terms.likelihood_images:
            return {}
        return self.trained.log_likelihood(self.ground.held_out[: self.terms.likelihood_images], seed=self.terms.seed)

    def score(self) -> dict[str, Any]:
        if not self.terms.samples:
            return {}
        count = self.terms.samples
        reference = self.ground.seen.part(count)
        values = self.trained.score(reference, count, seed=self.terms.seed, network=self.ground.network)
        return {**values, "reference_split": "train"}


def measure(method: Method, ground: Ground, folder: Path) -> dict[str, Any]:
    """Train a method and measure it, or what is missing of that."""
    return Measuring(method, ground, folder).finish()


def compare(
    methods: Sequence[Method],
    terms: Terms,
    folder: Path,
    log: Callable[[str], None] = print,
    *,
    measure: Callable[[Method, Ground, Path], dict[str, Any]] = measure,
) -> list[dict[str, Any]]:
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
            rows.append(measure(method, ground, folder / method))
        except (ValueError, RuntimeError, ArithmeticError) as error:
            rows.append({"method": method, "error": str(error)})
            log(f"{method} failed: {error}")
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
        return f"{value:.{ {'fid': 1, 'fid_normal': 1, 'seconds': 0}.get(key, 4) }f}"
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
        f"{WEIGHTS} importance weights. Chains and codes have no bound: AIS is their likelihood. AIS is with "
        "the learned prior, the bounds with N(0, I)."
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
