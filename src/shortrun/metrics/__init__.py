"""Measures: FID and KID of samples (here), and estimates of log p(x) (:mod:`shortrun.metrics.likelihood`)."""

from shortrun.metrics.scores import (
    INCEPTION_SHA256,
    KID_SUBSETS,
    PAPER_SAMPLES,
    RESIZE,
    FeatureNetwork,
    MetricError,
    compare_sets,
    features,
    fid,
    inception,
    kid,
    kid_subset,
    to_bytes,
)

__all__ = [
    "INCEPTION_SHA256",
    "KID_SUBSETS",
    "PAPER_SAMPLES",
    "RESIZE",
    "FeatureNetwork",
    "MetricError",
    "compare_sets",
    "features",
    "fid",
    "inception",
    "kid",
    "kid_subset",
    "to_bytes",
]
