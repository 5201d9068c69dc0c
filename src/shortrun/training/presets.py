"""Presets: the same code at several sizes, as data.

``smoke`` takes seconds, ``cpu`` minutes on two cores, ``paper`` is as published, ``authors-script`` the public script.
docs/networks.md says where each published number comes from, and what was chosen where the text is silent.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from shortrun.data import DataSettings
from shortrun.learners import Method, learner_class
from shortrun.training.config import Config, RunSettings, names_of

Preset = Literal["smoke", "cpu", "paper", "authors-script"]
ONE_LAYER = ("abp", "glo", "vae", "vae-iaf")
SCRIPT_EPOCH = 400  # updates in an epoch of the authors' script: 40,000 images in batches of 100
GLOW_WARM_UP = math.ceil(10 * 50_000 / 64)  # ten epochs of 50,000 images (n_train of the official code), 64 at a time
SIZED = ("celeba", "folder", "zip", "hf")  # sets that are cropped

Values = dict[str, Any]
_PAPER: Values = {
    "iterations": 300_000, "minutes": None, "batch": 100, "learning_rates": (1e-4, 5e-5, 1e-5), "decay": False,
    "warm_up": 0, "start_at_mean": False, "betas": (0.9, 0.999), "sigma": (0.25, 0.15),
    "anneal_from": 5 * SCRIPT_EPOCH / 300_000,
    "anneal": 1.0, "anneal_shape": "linear", "evaluate_every": 1000, "evaluate_images": 1000, "checkpoint_every": 1000,
    "steps": 25, "step_size": 0.05**2 / 2, "cool_down": 0, "speed_up": 0, "momentum": 0.0, "tune_every": 3000,
    "tune_images": 4, "tune_chains": 1,
    "tune_deltas": tuple(i / 100 for i in range(1, 16)), "entropy": "conditional", "estimator": "exact",
    "step_control": "tuned", "learn_last": 1, "loss": "log-joint", "prior": "normal",
}  # fmt: skip
# Settings of data, loop and short run inference, in one list: their names are unique.
SETTINGS: dict[Preset, Values] = {
    "smoke": {
        "iterations": 6, "minutes": None, "batch": 8, "warm_up": 2, "evaluate_every": 3, "evaluate_images": 8,
        "checkpoint_every": 3, "steps": 5, "cool_down": 1, "learn_last": 3, "tune_every": 3,
        "prior_images": 100,
    },
    "cpu": {"minutes": 10.0},
    "paper": _PAPER,
    "authors-script": _PAPER | {
        "seed": 2, "train_images": 40_000, "order": "epochs", "iterations": 601 * SCRIPT_EPOCH, "tune": "off",
        "loss": "sum-of-squares", "learning_rates": (8e-5, 4e-5, 2e-5, 1e-5), "betas": (0.5, 0.999),
        "sigma": (0.15, 0.15), "anneal_from": 0.0,
        "rate_changes": (50 * SCRIPT_EPOCH, 100 * SCRIPT_EPOCH, 300 * SCRIPT_EPOCH),
    },
}  # fmt: skip
_PAPER_NETWORK: Values = {
    "latent_sizes": (64, 64, 64, 96, 128), "channels": 64, "head_channels": "latent", "last_block": False,
    "encoder_channels": 64,
}  # fmt: skip
# Grey images of 28x28 and coloured ones have other maps inside.
NETWORKS: dict[Preset, tuple[Values, Values, Values]] = {
    "smoke": (
        {"latent_sizes": (4, 8), "channels": 8, "encoder_channels": 4, "flow_width": 8, "levels": 2, "depth": 2,
         "width": 8}, {"base": 7}, {"base": 8},
    ),
    "cpu": ({"latent_sizes": (32, 64, 128), "depth": 4, "width": 48}, {"channels": 16, "base": 7},
            {"channels": 24, "base": 8}),
    "paper": (_PAPER_NETWORK, {}, {}),
    "authors-script": (_PAPER_NETWORK | {"last_block": True, "activated": True}, {}, {}),
}  # fmt: skip


def preset(name: Preset, data: str = "embedded", method: Method = "short-run") -> Config:
    """The settings of a preset for a data set and a method.

    >>> preset("paper", "svhn").network.latent_sizes
    (64, 64, 64, 96, 128)
    >>> preset("paper", "svhn", "glo").network.latent_sizes
    (128,)
    """
    if name not in SETTINGS:
        raise ValueError(f"preset is {name!r}; accepted: {', '.join(get_args(Preset))}")
    kind = data.partition(":")[0]
    values = SETTINGS[name] | {"data": data}
    if name in ("paper", "authors-script") and kind in SIZED:
        values["crop"] = "whole"
    common, grey, coloured = NETWORKS[name]
    network = common | (grey if kind in ("embedded", "mnist") else coloured)
    if method != "short-run":
        values, network = values | baseline(name, method), network | baseline_network(name, method)
    learner = learner_class(method)

    def of(part: Any, given: Values) -> Any:
        return part(**{key: value for key, value in given.items() if key in names_of(part)})

    return Config(
        method, of(DataSettings, values), of(RunSettings, values), of(learner.Settings, values),
        of(learner.Network, network),
    )  # fmt: skip


def baseline(name: Preset, method: Method) -> Values:
    """What the methods of comparison change: data, budget and observation noise stay."""
    if name == "authors-script":
        raise ValueError(f"the authors' script has no {method}; use the preset paper")
    values: Values = {"cool_down": 0, "speed_up": 0, "momentum": 0.0, "learn_last": 1, "tune": "off"}
    if method == "abp":  # 40 steps of delta = 0.3, sigma = 0.3 in the paper's appendix
        if name == "paper":
            return values | {"steps": 40, "step_size": 0.045, "sigma": (0.3, 0.3)}
        return values | {"steps": 5 if name == "smoke" else 20, "step_size": 0.045}
    if name == "cpu":
        rate = 2e-3 if method in ("glo", "glow") else 1e-3
        values |= {"batch": 64, "learning_rates": (rate,), "step_size": 0.01}
    if method == "glo" and name == "paper":  # Bojanowski et al. 2018; see learners/glo.py for the rate of the codes
        values |= {"optimiser": "sgd", "batch": 128, "learning_rates": (1.0,), "code_rate": 10 / 128}
    if method == "ladder-vae":
        values |= {"kl_warm_up": 0.1}
    if method == "glow":
        values |= {"betas": (0.9, 0.999)}
        if name == "paper":
            values |= {"batch": 64, "learning_rates": (1e-3,), "warm_up": GLOW_WARM_UP}
    return values


def baseline_network(name: Preset, method: Method) -> Values:
    """The generator stays, except that some methods have one layer of latents."""
    return {"latent_sizes": (8 if name == "smoke" else 128,)} if method in ONE_LAYER else {}
