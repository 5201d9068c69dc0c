"""One model of a reproduction: train it, and measure what its cells show."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shortrun import metrics
from shortrun.core.free_energy import Entropy, Estimation, Estimator, free_energy_details, mean_free_energy
from shortrun.core.langevin import Langevin
from shortrun.core.latents import dimensions
from shortrun.core.model import NotPossibleError
from shortrun.files import append_line, read_lines, write_json, write_lines
from shortrun.fitting import fit as fit_model
from shortrun.fitting import not_interrupted
from shortrun.metrics.errors import mse_per_image
from shortrun.processes import processes
from shortrun.studies.reproduce.claims import show
from shortrun.studies.reproduce.place import Place
from shortrun.studies.reproduce.published import FIGURES, STEP_SIZE_RUNS, Training, table_cells
from shortrun.studies.sources import machine, training_of
from shortrun.trained import By, Trained
from shortrun.training.config import Config
from shortrun.training.run_folder import METRICS

CURVE, OBJECTIVE = "curve.jsonl", "objective.jsonl"  # in the folder of a run
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
    watchers: list[Callable[[Trained], None]] = [
        Curve(folder / CURVE, place.held_out(training, place.scale.watched), config)
    ]
    if place.model(training) == place.model(STEP_SIZE_RUNS[0]):
        watchers.append(Objective(folder / OBJECTIVE, place.held_out(training, Objective.IMAGES)))

    def watch(trained: Trained) -> None:
        for watcher in watchers:
            watcher(trained)

    trained = fit(
        None, place.load(training, "train"), validation=place.load(training, "test"), config=config, folder=folder,
        resume=started, quiet=place.quiet, callback=watch,
    )  # fmt: skip
    not_interrupted(trained)
    write_json(folder / "finished.json", {"seconds": trained.info["seconds"], "mse": trained.info["mse"]})


class Curve:
    """Held-out error of draws and of centres at each evaluation, with what it has cost until then."""

    def __init__(self, path: Path, x: Tensor, config: Config) -> None:
        self.path, self.x, self.batch = path, x, config.run.batch

    def __call__(self, trained: Trained) -> None:
        info = trained.info
        line = {key: info[key] for key in ("seconds", "iterations", "updates")}
        known = [point for point in read_lines(self.path) if point["iterations"] < info["iterations"]]
        with contextlib.suppress(NotPossibleError):
            line |= errors_of(trained, self.x, info["seed"])
        write_lines(self.path, [*known, line | {"images": info["iterations"] * self.batch}])


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
        measure_real(place, training)
    found = result["measured"]
    return ", ".join(f"{name.upper()} {show(found[name], name)}" for name in ("mse", "fid") if name in found)


def describe(place: Place, training: Training, trained: Trained) -> dict[str, Any]:
    """What is needed to repeat the numbers of a model, and what happened while it learned."""
    command = place.command("all", training.name)
    if not any(cell.training == training for cell in table_cells()):
        command = place.command(next(name for name in FIGURES if training in place.models(name)))
    return {
        "command": command, "machine": machine(), "budget": place.budget, "parameters": trained.parameter_count,
        "training": training_of(trained.info), "curve": read_lines(place.run(training) / CURVE),
        **step_sizes(place, training, trained),
    }  # fmt: skip


def step_sizes(place: Place, training: Training, trained: Trained) -> dict[str, Any]:
    """What the step size figure shows of a run; nothing for others."""
    if place.model(training) not in place.models("figure-step-size"):
        return {}
    lines = read_lines(place.run(training) / METRICS)
    tuned = [line for line in lines if line.get("event") == "tuned" and "chosen" in line]
    return {
        "tuned": [[line["iteration"], chosen_delta(line["chosen"])] for line in tuned],
        "objective": read_lines(place.run(training) / OBJECTIVE),
    }


def chosen_delta(step_size: float | Sequence[Any]) -> float:
    """``delta = sqrt(2 s)`` of the longest step; older lines of ``metrics.jsonl`` hold all of them, in lists."""
    return math.sqrt(2 * float(torch.tensor(step_size).max()))


def measure_error(place: Place, training: Training, trained: Trained) -> dict[str, Any]:
    """MSE of held-out images, from a draw from q(z | x) and from its centre, where the method has both.

    Draws are compared with draws and centres with centres: the end of a chain is a draw, and with d latents that the
    posterior leaves free its noise alone adds up to ``d sigma^2 / pixels`` to the MSE.
    """
    try:
        x = place.held_out(training, place.scale.images)
        return errors_of(trained, x, training.seed) | {"images": len(x)}
    except NotPossibleError as reason:
        return {"no_mse": str(reason)}


def errors_of(trained: Trained, x: Tensor, seed: int) -> dict[str, Any]:
    """MSE of draws and, where the method has them, of centres; chains that got lost are counted and left out."""
    found: dict[str, Any] = {}
    ways: dict[str, By] = {"mse": "draw", "mse_centre": "centre"}
    for name, by in ways.items():
        if by == "centre" and trained.method not in (*ENCODERS, *CHAINS):
            continue
        shown = trained.reconstruction(x, by=by, seed=seed)  # the same chains each time
        found[name] = float(mse_per_image(shown.images, x)[~shown.divergent].mean())
        found |= {"divergent": int(shown.divergent.sum())} if by == "draw" else {}
    return found


SCORES = ("fid", "kid", "kid_deviation")


def measure_real(place: Place, training: Training) -> None:
    """FID and KID of training images against as many others, once for each data set: the bias for so few images."""
    path = place.out / f"real-{training.data}{training.size or ''}.json"
    count = place.scale.samples
    images = place.load(training, "train")
    if path.is_file() or len(images) < 2 * count:
        return
    real = images.part(2 * count)
    scores = metrics.compare_sets(real[:count], real[count:], place.network(), quiet=place.quiet)
    write_json(path, scores | {"machine": machine(), "checksum": images.checksum})


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
