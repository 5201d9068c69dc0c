"""Train several methods on equal terms, and put their numbers into one table and one picture.

Each method has a folder of its own with its run and its result; what is finished is not done again, so a comparison can
be stopped and continued.
"""

from __future__ import annotations

import csv
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shortrun import data, metrics, tasks
from shortrun.config import Method, Terms
from shortrun.learners.base import NotPossibleError
from shortrun.pictures import save_bars, save_grid
from shortrun.runs import from_pretrained, write_atomically
from shortrun.train import train

COLUMNS = {
    "method": "method",
    "mse": "MSE",
    "mse_by_dynamics": "MSE by dynamics",
    "fid": "FID",
    "kid": "KID",
    "lower_bound_bits": "bits/dim, bound",
    "annealed_bits": "bits/dim, AIS",
    "updates": "updates",
    "seconds": "seconds",
    "parameters": "parameters",
}


def measure(method: Method, terms: Terms, folder: Path, network: metrics.FeatureNetwork | None) -> dict[str, Any]:
    """Train one method if it is not trained yet, and take all measures that it has."""
    result = folder / "result.json"
    if result.is_file():
        return json.loads(result.read_text())
    config = terms.config(method)
    run = folder / "run"
    if train(config, run, resume=(run / "config.yaml").is_file()).stopped:
        raise KeyboardInterrupt  # half-trained methods are not measured
    trained = from_pretrained(run)
    generator = torch.Generator().manual_seed(terms.seed)
    options: dict[str, Any] = {"root": terms.data_root, "size": config.size, "crop": config.crop}
    held_out, seen = data.load(terms.data, "test", **options), data.load(terms.data, "train", **options)
    x = held_out.batch(slice(0, min(terms.images, len(held_out))))
    begun = time.perf_counter()
    row: dict[str, Any] = {"method": method, "parameters": trained.parameters, **trained.info}
    for key, by in (("mse", "method"), ("mse_by_dynamics", "dynamics")):
        try:
            shown = tasks.reconstruct(trained, x, generator, by=by)  # type: ignore[arg-type]
        except (NotPossibleError, AttributeError):
            continue
        row[key] = float(tasks.mse_per_image(shown.images, x)[~shown.divergent].mean())
        row[f"{key}_divergent"] = int(shown.divergent.sum())
        if by == "method":
            pairs = [("held out", x[:10]), ("reconstruction", shown.images[:10])]
            save_grid(folder / "reconstructions.png", pairs)
    save_grid(folder / "samples.png", [("", part) for part in tasks.sample(trained, 40, generator).split(10)])
    if terms.likelihood_images:
        row |= tasks.log_likelihood(trained, x[: terms.likelihood_images], generator)
    if terms.samples:
        order = torch.randperm(len(seen), generator=torch.Generator().manual_seed(0))
        reference = seen.array[order[: terms.samples]]
        row |= tasks.score(trained, reference, terms.samples, generator, network)
        row["reference_split"] = "train"
    row["measuring_seconds"] = round(time.perf_counter() - begun, 1)
    row["machine"] = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    write_atomically(result, (json.dumps(row, indent=1) + "\n").encode())
    return row


def compare(methods: Sequence[Method], terms: Terms, folder: Path) -> list[dict[str, Any]]:
    """All methods, one after the other; a method that fails is reported in its row, and the others go on."""
    network = metrics.inception() if terms.samples else None
    terms_file = folder / "terms.json"
    stated = {"methods": list(methods), **{key: value for key, value in vars(terms).items() if key != "data_root"}}
    if terms_file.is_file():
        before = json.loads(terms_file.read_text())
        changed = [key for key in stated if key != "methods" and before.get(key) != stated[key]]
        if changed:
            raise ValueError(
                f"{folder} holds a comparison on other terms ({', '.join(changed)} differ); name another folder"
            )
    write_atomically(terms_file, (json.dumps(stated, indent=1) + "\n").encode())
    rows = []
    for method in methods:
        try:
            rows.append(measure(method, terms, folder / method, network))
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
    if isinstance(value, float):
        return f"{value:.{ {'fid': 1, 'seconds': 0, 'lower_bound_bits': 2, 'annealed_bits': 2}.get(key, 4) }f}"
    return str(value)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cell(row, key) for key in COLUMNS) + " |" for row in rows]
    return "\n".join(lines)


def write_tables(rows: Sequence[dict[str, Any]], folder: Path, terms: Terms) -> None:
    """``table.md``, ``table.csv``, ``table.json`` and ``comparison.png``."""
    budget = f"{terms.updates} updates" if terms.updates is not None else f"{terms.minutes} minutes"
    note = (
        f"{terms.data}, preset {terms.preset}, {budget} each, seed {terms.seed}. MSE: {terms.images} held-out images, "
        f"per pixel in [-1, 1]. FID and KID: {terms.samples} samples against as many training images, "
        f"{metrics.RESIZE}. "
        f"Bits per dimension of 8-bit images: {terms.likelihood_images} held-out images."
    )
    write_atomically(folder / "table.md", f"{markdown(rows)}\n\n{note}\n".encode())
    write_atomically(folder / "table.json", (json.dumps(list(rows), indent=1) + "\n").encode())
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([row.get(key, "") for key in COLUMNS] for row in rows)
    panels = {
        COLUMNS[key]: {r["method"]: r[key] for r in rows if r.get(key) is not None} for key in ("mse", "fid", "kid")
    }
    save_bars(folder / "comparison.png", {title: values for title, values in panels.items() if values})
