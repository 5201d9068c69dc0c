"""One model of a reproduction: train it, and measure what its cells show."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shortrun.core.free_energy import Entropy, Estimation, Estimator, free_energy_details, mean_free_energy
from shortrun.core.langevin import Langevin
from shortrun.core.latents import dimensions
from shortrun.core.model import NotPossibleError
from shortrun.files import append_line, read_lines, write_json
from shortrun.fitting import fit as fit_model
from shortrun.fitting import not_interrupted
from shortrun.metrics.errors import mse_per_image
from shortrun.processes import processes
from shortrun.studies.reproduce.claims import show
from shortrun.studies.reproduce.place import Place
from shortrun.studies.reproduce.published import FIGURES, QUIET_STEPS, STEP_SIZE_RUNS, Training, table_cells
from shortrun.studies.sources import machine, training_of
from shortrun.trained import Trained
from shortrun.training.config import Config

ENCODERS, CHAINS = ("vae", "vae-iaf", "ladder-vae"), ("short-run", "abp")
OBJECTIVES: dict[Entropy, str] = {
    "conditional": "the paper's objective (conditional entropy)",
    "marginal": "ours (marginal entropy)",
}


def do_training(place: Place, training: Training, fit: Callable[..., Trained] = fit_model) -> None:
    """Train, or continue; what is finished stays as it is."""
    folder, config = place.run(training), place.config(training)
    started = (folder / "config.yaml").is_file()
    if started:
        before, now = Config.load(folder / "config.yaml").flat(), config.flat()
        changed = sorted(key for key in now if key != "data_root" and before.get(key) != now[key])
        if changed:
            raise ValueError(f"{folder} holds a run with other settings ({', '.join(changed)}); name another --runs")
    if (folder / "finished.json").is_file():
        return
    callback = None
    if place.model(training) == place.model(STEP_SIZE_RUNS[0]):
        callback = Objective(folder / "objective.jsonl", place.held_out(training, Objective.IMAGES))
    trained = fit(
        None, place.load(training, "train"), validation=place.load(training, "test"), config=config, folder=folder,
        resume=started, quiet=place.quiet, callback=callback,
    )  # fmt: skip
    not_interrupted(trained)
    write_json(folder / "finished.json", {"seconds": trained.info["seconds"], "mse": trained.info["mse"]})


class Objective:
    """Free energy for a fixed grid of step sizes as the generator learns (paper, step size figure, right).

    With the paper's entropy and with ours, of the same chains; ``x`` are the images that are inferred.
    """

    DELTAS = tuple(0.01 * 1.5**j for j in range(9))
    IMAGES, MOMENTS, MOST_EXACT = 8, 5, 64

    def __init__(self, path: Path, x: Tensor) -> None:
        self.path, self.x = path, x

    def __call__(self, trained: Trained) -> None:
        if trained.info["share"] < (len(read_lines(self.path)) + 1) / self.MOMENTS:
            return  # not yet: each moment takes as long as many iterations
        x = self.x.to(trained.device)
        exact = dimensions(trained.model.latent_shapes) <= self.MOST_EXACT
        estimator: Estimator = "exact" if exact else "endpoint"
        line: dict[str, Any] = {"iteration": trained.info["iterations"], "estimator": estimator, "images": len(x)}
        line["delta"] = self.DELTAS
        for entropy in OBJECTIVES:
            how = Estimation(entropy, estimator, chains=1)
            line[entropy] = []
            for delta in self.DELTAS:
                rng = torch.Generator().manual_seed(0)  # the same chains each time
                dynamics = Langevin.from_delta(delta, trained.dynamics.steps)
                value = float(mean_free_energy(free_energy_details(trained.model, x, dynamics, how, rng=rng)))
                line[entropy].append(value if math.isfinite(value) else None)
        append_line(self.path, line)


def do_model(place: Place, training: Training, train: Callable[[Place, Training], None] = do_training) -> str:
    """Train what is not trained, measure what is not measured, and return what came out."""
    train(place, training)
    trained, path = place.trained(training).to(processes().device), place.result(training)
    result = json.loads(path.read_text()) if path.is_file() else {}
    if result.get("training") != training_of(trained.info):  # nothing was measured yet, or of another training
        result = describe(place, training, trained) | {"measured": measure_error(place, training, trained)}
        write_json(path, result)
    if place.wants_fid(training) and "fid" not in result["measured"]:
        result["measured"] |= measure_samples(place, training, trained)
        write_json(path, result)
    found = result["measured"]
    return ", ".join(f"{name.upper()} {show(found[name], name)}" for name in ("mse", "fid") if name in found)


def describe(place: Place, training: Training, trained: Trained) -> dict[str, Any]:
    """What is needed to repeat the numbers of a model."""
    command = place.command("all", training.name)
    if not any(cell.training == training for cell in table_cells()):
        command = place.command(next(name for name in FIGURES if training in place.models(name)))
    return {
        "command": command, "machine": machine(), "budget": place.budget, "parameters": trained.parameter_count,
        "training": training_of(trained.info),
    }  # fmt: skip


def measure_error(place: Place, training: Training, trained: Trained) -> dict[str, Any]:
    """MSE of held-out images, from a draw from q(z | x) and from its centre, where the method has both.

    Draws are compared with draws and centres with centres: the end of a chain is a draw, and with d latents that the
    posterior leaves free its noise alone adds up to ``d sigma^2 / pixels`` to the MSE.
    """
    x = place.held_out(training, place.scale.images)

    def mse(**options: Any) -> tuple[float, int]:
        shown = trained.reconstruction(x, seed=training.seed, **options)  # the same chains each time
        return float(mse_per_image(shown.images, x)[~shown.divergent].mean()), int(shown.divergent.sum())

    try:
        error, divergent = mse(by="draw")
    except NotPossibleError as reason:
        return {"no_mse": str(reason)}
    found: dict[str, Any] = {"mse": error, "images": len(x), "divergent": divergent}
    if training.method in ENCODERS:
        found["mse_centre"] = mse(by="method")[0]
    elif training.method in CHAINS:
        found["mse_centre"] = mse(quiet_steps=min(QUIET_STEPS, trained.dynamics.steps))[0]
    return found


SCORES = ("fid", "kid", "kid_deviation")


def measure_samples(place: Place, training: Training, trained: Trained) -> dict[str, Any]:
    """FID and KID of samples from N(0, I), as in the paper, and of samples from the learned prior."""
    reference = place.load(training, "train").part(place.scale.samples)
    network = place.network(device=trained.device)
    scores = trained.score(reference, place.scale.samples, seed=training.seed, network=network, quiet=place.quiet)
    found = {key: scores[key] for key in ("samples", "reference_images", "resize")}
    if trained.prior is None:
        return found | {key: scores[key] for key in SCORES}
    learned = {f"{key}_learned": scores[key] for key in SCORES}
    return found | {key: scores[f"{key}_normal"] for key in SCORES} | learned | {"prior": trained.prior.kind}
