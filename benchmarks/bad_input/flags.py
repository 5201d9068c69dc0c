"""Flags with values that make no sense."""

from __future__ import annotations

from collections.abc import Iterator

from bad_input.case import MODEL, Case

NUMBERS = ("nan", "-1", "x", "")
COUNTS = (*NUMBERS, "0", "1.5")
REALS = (*NUMBERS, "inf")
POSITIVE = (*REALS, "0")
CHOICES = ("", "no-such", "None")

TRAIN: dict[str, tuple[str, ...]] = {
    "--preset": CHOICES,
    "--method": CHOICES,
    "--size": (*COUNTS, "7"),
    "--crop": (*COUNTS, "half"),
    "--train-images": COUNTS,
    "--order": CHOICES,
    "--seed": ("nan", "x", "", "1.5", "99999999999999999999999"),
    "--iterations": COUNTS,
    "--minutes": POSITIVE,
    "--batch": (*COUNTS, "100000000000000"),
    "--learning-rates": POSITIVE,
    "--rate-changes": NUMBERS,
    "--warm-up": ("nan", "-5", "x", "1.5"),
    "--betas": ("nan", "0.9", "1.5 0.9", "-1 0.9", "0.9 1", "x y"),
    "--sigma": ("nan nan", "0 0.1", "0.3", "-1 0.2", "inf 0.2", "x"),
    "--anneal": (*REALS, "2"),
    "--anneal-from": (*REALS, "2"),
    "--anneal-shape": CHOICES,
    "--mask": (
        "nan",
        "lower",
        "random:2",
        "random:nan",
        "random:x",
        "box:1,2",
        "box:30,30,9,9",
        "box:0,0,0,0",
        "file:",
        "file:nowhere.png",
        "blocks:99:1",
        "blocks:a:b",
        "blocks:3",
        "blocks:3:-1",
        "blocks:0:1",
        "random:0",
    ),
    "--evaluate-every": POSITIVE,
    "--evaluate-images": COUNTS,
    "--checkpoint-every": POSITIVE,
    "--mixed-precision": CHOICES,
    "--compile": CHOICES,
    "--prior": CHOICES,
    "--prior-images": COUNTS,
    "--steps": COUNTS,
    "--step-size": POSITIVE,
    "--cool-down": ("nan", "-1", "x", "25", "1.5"),
    "--speed-up": ("nan", "-1", "x", "25", "1.5"),
    "--tune": CHOICES,
    "--tune-every": COUNTS,
    "--tune-images": COUNTS,
    "--tune-chains": COUNTS,
    "--tune-deltas": POSITIVE,
    "--entropy": CHOICES,
    "--estimator": CHOICES,
    "--step-control": CHOICES,
    "--tune-per": CHOICES,
    "--learn-last": (*COUNTS, "99"),
    "--learn-last-later": (*COUNTS, "99"),
    "--loss": CHOICES,
    "--model.kind": ("", "no-such", "nowhere.at:All", "os:getcwd", "json:JSONDecoder"),
    "--model.latent-sizes": (*COUNTS, "4 0", "4 -1"),
    "--model.channels": COUNTS,
    "--model.base": (*COUNTS, "3", "99"),
    "--model.head-channels": ("nan", "-1", "0", "x"),
    "--model.coordinates": CHOICES,
    "--no-such": ("1",),
    "--data": (
        "",
        "no-such",
        "mnist:x",
        "svhn:1",
        "celeba:x",
        "embedded:3",
        "scenes:x",
        "scenes:-5",
        "scenes:5",
        "scenes:1.5",
        "folder:",
        "folder:nowhere",
        "zip:",
        "zip:nowhere.zip",
        "npz:",
        "npz:nowhere.npz",
        "hf:",
        "mnist",
        "svhn",
        "celeba",
    ),
    "--data-root": ("nowhere --data mnist", "nowhere --data svhn", "nowhere --data celeba"),
}
OTHER_METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    "vae": {
        "--kl-warm-up": (*REALS, "2"),
        "--steps": COUNTS,
        "--step-size": POSITIVE,
        "--model.latent-sizes": ("0", "4 0"),
        "--model.encoder-channels": COUNTS,
    },
    "vae-iaf": {"--model.flow-width": COUNTS},
    "ladder-vae": {"--kl-warm-up": ("nan", "-1")},
    "glo": {"--code-rate": POSITIVE, "--optimiser": CHOICES, "--model.latent-sizes": ("4 4", "0")},
    "glow": {"--model.levels": (*COUNTS, "9"), "--model.depth": COUNTS, "--model.width": COUNTS},
    "abp": {"--model.latent-sizes": ("0", "-1"), "--step-size": POSITIVE},
}
USE: dict[str, dict[str, tuple[str, ...]]] = {
    "evaluate": {
        "--images": COUNTS,
        "--likelihood-images": ("-1", "nan", "x"),
        "--stages": ("-1", "nan", "x", "1.5"),
        "--by": CHOICES,
        "--quiet-steps": ("-1", "26", "nan", "x"),
        "--data": ("no-such", "mnist:x", "svhn", "scenes:20"),
        "--seed": ("x", "1.5", "nan"),
        "--decoder": ("os:getcwd", "nowhere:At", "x"),
    },
    "sample": {"--images": COUNTS, "--prior": CHOICES},
    "reconstruct": {"--images": COUNTS, "--quiet-steps": ("-1", "26")},
    "inpaint": {
        "--images": COUNTS,
        "--fills": COUNTS,
        "--mask": TRAIN["--mask"][:-1],
        "--by": CHOICES,
        "--steps": COUNTS,
    },
    "traverse": {"--images": COUNTS, "--layer": ("-1", "3", "x", "nan"), "--amount": REALS},
    "interpolate": {"--images": (*COUNTS, "1")},
    "tune": {
        "--images": COUNTS,
        "--chains": COUNTS,
        "--deltas": POSITIVE,
        "--entropy": CHOICES,
        "--estimator": CHOICES,
    },
    "fid": {"--samples": (*COUNTS, "1"), "--protocol": CHOICES, "--reference": CHOICES},
    "prior": {"--images": COUNTS, "--kind": CHOICES, "--save": ("/proc/nowhere",)},
}
STUDIES: dict[str, dict[str, tuple[str, ...]]] = {
    "compare": {
        "--methods": CHOICES,
        "--minutes": POSITIVE,
        "--updates": COUNTS,
        "--data": ("no-such", "mnist:x"),
        "--minutes 1 --updates": ("5",),
    },
    "reproduce table-K": {
        "--preset": CHOICES,
        "--minutes-per-cell": POSITIVE,
        "--jobs": COUNTS,
        "--only": ("no-such",),
    },
    "reproduce no-such": {"--preset": ("smoke",)},
    "data no-such": {"--size": ("32",)},
    "data embedded": {"--size": (*COUNTS, "7"), "--crop": ("0", "-1", "x")},
    "demo": {"--minutes": POSITIVE, "--seed": ("x", "nan")},
    "resume nowhere": {"--minutes": ("1",)},
    "bench": {"--sizes": CHOICES},
}


def flag_cases() -> Iterator[Case]:
    for flag, values in TRAIN.items():
        for value in values:
            yield _case("train", ["train", "--preset", "smoke", "--out", "out"], flag, value)
    for method, flags in OTHER_METHODS.items():
        for flag, values in flags.items():
            for value in values:
                words = ["train", "--preset", "smoke", "--method", method, "--out", "out"]
                yield _case(f"train {method}", words, flag, value)
    for command, flags in USE.items():
        for flag, values in flags.items():
            for value in values:
                words = [command, MODEL, "--data", "embedded", "--out", "out"]
                yield _case(command, words, flag, value)
    for command, flags in STUDIES.items():
        for flag, values in flags.items():
            for value in values:
                out = [] if command.startswith(("data", "resume", "bench")) else ["--out", "out"]
                yield _case(command.split()[0], [*command.split(), *out], flag, value)


def _case(command: str, words: list[str], flag: str, value: str) -> Case:
    """A flag that the words have already is given with its bad value alone."""
    flag, *before = flag.split()[::-1]
    if flag in words:
        place = words.index(flag)
        words = words[:place] + words[place + 2 :]
    name = flag.lstrip("-").split(".")[-1]
    command_words = [word for word in words[1:] if word in ("no-such", "nowhere")]
    said = (name, name.replace("-", "_"), name.replace("-", " "), name.split("-")[0], "unrecognized", *command_words)
    parts = value.split(" ") if value else [""]
    return Case(
        "flags",
        f"{command} {flag} {value!r}",
        [*words, *before[::-1], flag, *parts],
        names=(*said, *({value, value.split(":")[-1], value.split()[0]} - {""} if value else ())),
    )
