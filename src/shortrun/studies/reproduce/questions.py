"""What a reader of the paper wants to know, answered from what was measured: held, not held, or undecided.

One seed decides where the numbers are 15 % or more apart; where they are closer, three seeds decide, if they agree.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shortrun.learners.adapt import Rules
from shortrun.learners.chain_settings import ShortRunSettings
from shortrun.studies.reproduce.claims import Row, figure_claims, show
from shortrun.studies.reproduce.place import Place
from shortrun.studies.reproduce.published import (
    DATA_SETS,
    SCENES,
    SCENES_HIERARCHY,
    STEP_SIZE_RUNS,
    WITHOUT,
    Training,
)
from shortrun.training.config import Config

HELD, NOT_HELD, UNDECIDED = "held", "not held", "undecided"
DECISIVE = 0.15
SEEDS = 3
LAYERS = (1, 3, 5)
STEPS = (10, 25, 50)
MEASURES = {
    "mse": "MSE of draws", "mse_centre": "MSE of centres", "fid": "FID from N(0, I)",
    "fid_learned": "FID from the learned prior", "kid_learned": "KID from the learned prior",
}  # fmt: skip
COSTS = {"seconds": "time", "updates": "updates", "images": "images seen", "passes": "passes through the generator"}


class Answer(NamedTuple):
    claim: str
    verdict: str
    evidence: str


def below(low: Sequence[float], high: Sequence[float]) -> str:
    """Whether the first numbers, one for each seed, are below the second ones."""
    if min(len(low), len(high)) >= SEEDS:
        if max(low) < min(high):
            return HELD
        return NOT_HELD if min(low) > max(high) else UNDECIDED
    first, second = sum(low) / len(low), sum(high) / len(high)
    if abs(first - second) < DECISIVE * max(first, second):
        return UNDECIDED
    return HELD if first < second else NOT_HELD


def together(verdicts: Sequence[str]) -> str:
    """Of a claim with several steps."""
    return NOT_HELD if NOT_HELD in verdicts else UNDECIDED if UNDECIDED in verdicts else HELD


def at(curve: Sequence[Mapping[str, float]], cost: str, spent: float, measure: str) -> float:
    """A curve where so much was spent: linear between its points, its ends beyond them."""
    points = [(line[cost], line[measure]) for line in curve if line.get(measure) is not None]
    before = [point for point in points if point[0] <= spent]
    after = [point for point in points if point[0] > spent]
    if not before or not after:
        return (before[-1] if before else after[0])[1]
    (x0, y0), (x1, y1) = before[-1], after[0]
    return y0 + (y1 - y0) * (spent - x0) / (x1 - x0)


def passes(config: Config) -> float:
    """Forward and backward passes through the generator for each image that is learned from.

    A chain of K steps visits K + 1 points, some of which also give updates; the price of steepness takes three passes
    for a share of the images. Encoders and codes take one pass.
    """
    settings = config.settings
    if isinstance(settings, ShortRunSettings) and config.method == "short-run":
        return settings.steps + 1 + (3 * Rules().share if settings.step_control == "bound" else 0)
    return settings.steps + 1 if config.method == "abp" else 1


class Known:
    """Results by model, whatever cell shows them."""

    def __init__(self, rows: Sequence[Row], place: Place) -> None:
        self.results = {row.cell.training: row.result for row in rows}
        self.place = place

    def value(self, training: Training, measure: str) -> float | None:
        found = self.results.get(training)
        return None if found is None else found["measured"].get(measure)

    def curve(self, training: Training) -> list[dict[str, Any]]:
        each = passes(self.place.config(training))
        return [line | {"passes": each * line["images"]} for line in self.results.get(training, {}).get("curve", [])]


def falling(known: Known) -> list[Answer]:
    """Do errors fall with the layers L, and with the steps K at equal minutes?"""
    chains = {f"{name}, L = {', '.join(map(str, LAYERS))}": [Training(name, layers=n) for n in LAYERS]
              for name in DATA_SETS}  # fmt: skip
    chains["celeba 64x64, L = 1, 3, 5"] = [Training("celeba", layers=n, size=64) for n in LAYERS]
    chains["celeba, L = 5, K = 10, 25, 50 at equal minutes"] = [Training("celeba", layers=5, steps=k) for k in STEPS]
    found = []
    for name, models in chains.items():
        for measure, label in MEASURES.items():
            values = [known.value(model, measure) for model in models]
            numbers = [value for value in values if value is not None]
            if len(numbers) < len(values):
                continue
            verdict = together([below([b], [a]) for a, b in itertools.pairwise(numbers)])
            evidence = ", ".join(show(value, measure.removesuffix("_learned")) for value in numbers)
            found.append(Answer(f"{name}: {label} falls at every step", verdict, evidence))
    return found


def ahead_of_ladder(known: Known) -> list[Answer]:
    """Where is short run inference ahead of Ladder-VAE: at equal time, updates, images seen, passes?

    From the curves of the same runs, on fewer images than the tables. A run that is read before its end has not had its
    learning rate fall yet.
    """
    found = []
    for name in DATA_SETS:
        for layers in LAYERS:
            ours, theirs = (known.curve(Training(name, method, layers)) for method in ("short-run", "ladder-vae"))
            if not ours or not theirs:
                continue
            for cost, label in COSTS.items():
                spent = min(ours[-1][cost], theirs[-1][cost])
                for measure in ("mse", "mse_centre"):
                    pair = [at(curve, cost, spent, measure) for curve in (ours, theirs)]
                    claim = f"{name}, L = {layers}: lower {MEASURES[measure]} at equal {label} ({spent:,.0f})"
                    evidence = f"{show(pair[0], 'mse')} against {show(pair[1], 'mse')}"
                    found.append(Answer(claim, below([pair[0]], [pair[1]]), evidence))
    return found


def settling(place: Place, known: Known) -> list[Answer]:
    """Does the tuned step settle, and do the criteria agree?"""
    verdicts = {"yes": HELD, "no": NOT_HELD}
    found = [Answer(c, verdicts[v], e) for c, e, v in figure_claims(place) if c.startswith("tuned by")]
    last: dict[str, list[float]] = {}
    for training in STEP_SIZE_RUNS:
        path = place.result(training)
        tuned = json.loads(path.read_text()).get("tuned", []) if path.is_file() else []
        if tuned:
            last.setdefault(str(training.tune), []).append(tuned[-1][1])
    if len(last) > 1:
        ends = {tune: (min(values), max(values)) for tune, values in last.items()}
        agree = max(low for low, _ in ends.values()) <= min(high for _, high in ends.values())
        evidence = "; ".join(f"{t}: {low:.3f} to {high:.3f}, {len(last[t])} seeds" for t, (low, high) in ends.items())
        found.append(Answer("grid and gradient end at the same delta", HELD if agree else NOT_HELD, evidence))
    path = place.result(STEP_SIZE_RUNS[0])
    moments = json.loads(path.read_text()).get("objective", []) if path.is_file() else []
    if moments:
        best = {
            name: [min((v, d) for v, d in zip(m[name], m["delta"], strict=True) if v is not None)[1] for m in moments]
            for name in ("conditional", "marginal")
        }
        same = all(b == a for a, b in zip(*best.values(), strict=True))
        evidence = "; ".join(f"{name}: {', '.join(f'{d:.3f}' for d in values)}" for name, values in best.items())
        claim = "the paper's criterion and ours are lowest at the same delta, at each of the moments of one run"
        found.append(Answer(claim, HELD if same else NOT_HELD, evidence))
    return found


def controlling(place: Place) -> list[Answer]:
    """Which layer controls what, against the paper's order?"""
    path = place.drawn("figure-hierarchy")
    shares = json.loads(path.read_text()).get("shares", {}) if path.is_file() else {}
    roles = {"background": 2, "digit": 1, "style": 0, "position": 0}  # of the layers top, middle, bottom
    found = []
    for training, kind in ((SCENES_HIERARCHY, "independent layers"), (SCENES, "top-down generator")):
        for factor, layer in roles.items() if training.name in shares else ():
            values = [share[factor] for share in shares[training.name]]
            others = [value for i, value in enumerate(values) if i != layer]
            claim = f"scenes, {kind}: z_{len(values) - layer} has the largest share in {factor}"
            found.append(
                Answer(claim, below([max(others)], [values[layer]]), f"z_3, z_2, z_1: {_listed(values, '.2f')}")
            )
    return found


def additions(known: Known) -> list[Answer]:
    """What does each of our additions to the paper's algorithm bring?"""
    found = []
    for without in WITHOUT:
        for measure in ("mse", "mse_centre"):
            ours, theirs = (
                [
                    v
                    for seed in range(SEEDS)
                    if (v := known.value(Training("svhn", seed=seed, without=w, half=True), measure))
                ]
                for w in (None, without)
            )
            if ours and theirs:
                claim = f"svhn: {ADDITIONS[without]} lower the {MEASURES[measure]}"
                evidence = f"with: {_listed(ours, '.4f')}; without: {_listed(theirs, '.4f')}"
                found.append(Answer(claim, below(ours, theirs), evidence))
    for training in known.results:
        learned, normal = (known.value(training, key) for key in ("kid_learned", "kid"))
        if training.method == "short-run" and learned is not None and normal is not None:
            claim = f"{training.name}: samples from the learned prior have a lower KID than from N(0, I)"
            found.append(Answer(claim, below([learned], [normal]), f"{learned:.4f} against {normal:.4f}"))
    return list(dict.fromkeys(found))


ADDITIONS = {
    "along": "updates along the chain", "marginal": "tuning by the marginal entropy", "momentum": "steps with momentum",
}  # fmt: skip


def answers(place: Place, rows: Sequence[Row]) -> dict[str, list[Answer]]:
    """All questions with what is known; those about which nothing is known yet have an empty list."""
    known = Known(rows, place)
    return {
        "1. Do errors fall with L, and with K?": falling(known),
        "2. Where is short run inference ahead of Ladder-VAE?": ahead_of_ladder(known),
        "3. Does the tuned step settle, and do the criteria agree?": settling(place, known),
        "4. Which layer controls what?": controlling(place),
        "5. What does each of our additions bring?": additions(known),
    }


def _listed(values: Sequence[float], how: str) -> str:
    return ", ".join(f"{value:{how}}" for value in values)
