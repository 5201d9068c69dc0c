"""One file per learning method, each readable beside its paper; all are driven by :mod:`shortrun.train`."""

from shortrun.config import Method
from shortrun.learners.abp import ABP
from shortrun.learners.base import Learner
from shortrun.learners.glo import GLO
from shortrun.learners.glow import Glow
from shortrun.learners.ladder_vae import LadderVAE
from shortrun.learners.short_run import ShortRun
from shortrun.learners.vae import VAE
from shortrun.learners.vae_iaf import VAEWithIAF

METHODS: dict[Method, type[Learner]] = {
    "short-run": ShortRun,
    "abp": ABP,
    "glo": GLO,
    "vae": VAE,
    "vae-iaf": VAEWithIAF,
    "ladder-vae": LadderVAE,
    "glow": Glow,
}

__all__ = ["ABP", "GLO", "METHODS", "VAE", "Glow", "LadderVAE", "Learner", "ShortRun", "VAEWithIAF"]
