"""Learn, use and look into deep generative models without an encoder. `shortrun COMMAND --help` has examples."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import tyro
from tyro.conf import Positional

from shortrun import data, tasks
from shortrun.config import Method, Preset, ScaleName, Target, Terms, TrainConfig, preset
from shortrun.data import Images, Split
from shortrun.entropy import Entropy, Estimator
from shortrun.langevin import DivergenceError
from shortrun.masks import make_mask
from shortrun.parallel import accelerator, processes
from shortrun.runs import Pretrained, from_pretrained
from shortrun.tune import candidates_of

CHECKED_ERRORS = (ValueError, TypeError, OSError, DivergenceError)


@dataclass
class _Use:
    """What every task takes."""

    run: Positional[str]
    """A run folder, a saved model, or the name of a shipped one."""
    out: Path
    """Folder for pictures and numbers."""
    data: str | None = None
    """Images to use, by name; by default those that the model was trained on."""
    data_root: str | None = None
    """Folder with the data sets; by default the environment variable SHORTRUN_DATA."""
    images: int = 10
    """How many held-out images."""
    seed: int = 0

    def open(self) -> tuple[Pretrained, torch.Generator]:
        trained = from_pretrained(self.run).to(processes().device)
        return trained, torch.Generator().manual_seed(self.seed)

    def data_name(self, trained: Pretrained) -> str:
        return self.data or trained.info.get("data", "embedded")

    def load_set(self, trained: Pretrained, split: Split) -> Images:
        name = self.data_name(trained)
        sized = name.partition(":")[0] in ("celeba", "folder", "zip", "hf")
        same = name == trained.info.get("data")  # then cut and chosen as in training
        images = data.load(
            name, split, root=self.data_root, size=trained.image[1] if sized else None,
            crop=trained.info.get("crop") if same else None,
            limit=trained.info.get("train_images") if same and split == "train" else None,
        )  # fmt: skip
        if images.shape != trained.image:
            raise data.DataError(
                f"{name} has images of shape {images.shape} but the model makes {trained.image} "
                "(colours, height, width)"
            )
        return images

    def load(self, trained: Pretrained) -> torch.Tensor:
        """The first held-out images."""
        if self.images < 1:
            raise ValueError(f"images is {self.images}; expected one or more")
        images = self.load_set(trained, "test")
        return images.batch(slice(0, min(self.images, len(images))))

    def load_fitted(self, trained: Pretrained, count: int | None) -> torch.Tensor | None:
        """Training images whose latents the law of samples is fitted to, if any."""
        if count is None:
            return None
        if count < 1:
            raise ValueError(f"fitted is {count}; expected the number of training images, one or more")
        images = self.load_set(trained, "train")
        return images.batch(images.some(count))

    def write(self, name: str, values: dict[str, Any]) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(values, indent=1)
        (self.out / f"{name}.json").write_text(text + "\n")
        print(text)


@dataclass
class Train:
    """Train a model into a run folder.

    Ten minutes on the embedded digits: shortrun train --out runs/digits

    House numbers for half an hour: shortrun train --data svhn --minutes 30 --out runs/svhn

    Your own images: shortrun train --data folder:photos --size 64 --out runs/photos

    Your own generator: shortrun train --model.kind mypackage.models:Decoder --out runs/own

    As published, on four GPUs: accelerate launch --num_processes 4 -m shortrun.cli train --preset paper
    --data celeba --out runs/celeba
    """

    out: Path
    """The run folder; it must be new or empty."""
    preset: Preset = "cpu"
    """smoke: seconds; cpu: minutes; paper: as published; authors-script: the published script's variant."""
    dry_run: bool = False
    """Only print sizes, parameter count, memory and time per update."""
    config: Annotated[TrainConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=TrainConfig)
    """Single settings, on top of the preset."""


def _train(arguments: Train) -> None:
    from shortrun.train import prepare_folder, train

    config = arguments.config
    prepare_folder(arguments.out, resume=False)
    if arguments.dry_run:
        _dry_run(config)
        return
    print(train(config, arguments.out))


def _dry_run(config: TrainConfig) -> None:
    from shortrun.learners import METHODS
    from shortrun.learners.base import Batch
    from shortrun.train import load_images

    images = load_images(config, "train")
    print(images.describe())
    method = METHODS[config.method]
    model = method.build(config.model, images.shape, config.sigma[0])
    count = sum(p.numel() for p in model.parameters())
    shapes: Any = model.latent_shapes
    print(f"latents {[tuple(s) for s in shapes]}, {count:,} parameters ({count * 16 / 1e6:.0f} MB with Adam)")
    learner = method(model, config, accelerator(config.mixed_precision), images)
    generator = torch.Generator().manual_seed(0)
    x = images.batch(slice(0, config.batch))
    times = []
    for _ in range(2):
        begun = time.perf_counter()
        learner.update(Batch(x, None, torch.arange(len(x))), 0.0, generator)
        times.append(time.perf_counter() - begun)
    per = min(times)
    print(f"{per:.2f} s per iteration of {config.batch} images, K = {config.steps}, m = {config.learn_last}")
    if config.iterations:
        print(f"{config.iterations} iterations would take about {per * config.iterations / 3600:.1f} hours")
    if config.minutes:
        print(f"about {60 * config.minutes / per:.0f} iterations in {config.minutes:g} minutes")


@dataclass
class Compare:
    """Train several methods on equal terms, and print and plot one table.

    All of them, two minutes each: shortrun compare --data embedded --minutes 2 --out runs/compare

    Two with equal updates: shortrun compare --methods short-run ladder-vae --data svhn --updates 5000 --out runs/two
    """

    out: Path
    """Folder for the runs and the table; a comparison that was stopped is continued."""
    methods: tuple[Method, ...] = get_args(Method)
    """Which methods."""
    terms: Annotated[Terms, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Terms)


def _compare(arguments: Compare) -> None:
    from shortrun.compare import compare, markdown

    terms = arguments.terms
    if terms.minutes is not None and terms.updates is not None:
        raise ValueError("both minutes and updates are set; equal terms are either equal time or equal updates")
    if terms.minutes is None and terms.updates is None:
        terms = dataclasses.replace(terms, minutes=2.0)
    print(markdown(compare(arguments.methods, terms, arguments.out)))


@dataclass
class Fid(_Use):
    """FID and KID of samples.

    Example: shortrun fid mnist-small --data mnist --samples 2000 --out results

    As the authors' script does, 40,000 samples against all training images: shortrun fid RUN --protocol paper --out DIR
    """

    samples: int = 2000
    """How many samples, and how many reference images (at most all there are)."""
    protocol: Literal["n", "paper"] = "n"
    """paper: 40,000 samples against all training images."""
    reference: Split = "train"
    """Which images the samples are held against."""
    fitted: int | None = None
    """Draw latents from a Gaussian fitted to the inferred latents of so many training images, not from the prior."""


def _fid(arguments: Fid) -> None:
    from shortrun import metrics

    trained, generator = arguments.open()
    network = metrics.inception(device=trained.device)
    paper = arguments.protocol == "paper"
    samples = metrics.PAPER_SAMPLES if paper else arguments.samples
    if samples < 2:
        raise ValueError(f"samples is {samples}; expected two or more")
    known = arguments.load_set(trained, "train" if paper else arguments.reference)
    reference = known.array if paper else known.part(samples)
    fitted_to = arguments.load_fitted(trained, arguments.fitted)
    begun = time.perf_counter()
    values = tasks.score(trained, reference, samples, generator, network, fitted_to=fitted_to)
    facts = {
        "reference": f"{known.name} ({known.split})",
        "reference_checksum": known.checksum,
        "protocol": arguments.protocol,
        "fitted": None if fitted_to is None else len(fitted_to),  # as many as there were
        "seed": arguments.seed,
        "seconds": round(time.perf_counter() - begun, 1),
    }
    arguments.write("fid", values | facts)


@dataclass
class Resume:
    """Continue an interrupted run to the bit.

    Example: shortrun resume runs/digits
    """

    run: Positional[Path]
    """The run folder."""
    minutes: float | None = None
    """New limit of training time."""
    iterations: int | None = None
    """New limit of iterations."""


def _resume(arguments: Resume) -> None:
    from shortrun.train import prepare_folder, train

    prepare_folder(arguments.run, resume=True)
    config = TrainConfig.load(arguments.run / "config.yaml")
    changes = {k: v for k in ("minutes", "iterations") if (v := getattr(arguments, k)) is not None}
    print(train(dataclasses.replace(config, **changes), arguments.run, resume=True))


@dataclass
class Evaluate(_Use):
    """Held-out reconstruction error (MSE per pixel, images in [-1, 1], same K and step size as in training).

    Example: shortrun evaluate mnist-small --data mnist --images 10000 --out results
    """

    images: int = 10_000
    likelihood_images: int = 0
    """Also estimate log p(x) of so many images by annealed importance sampling; for encoders also the ELBO and the
    importance-weighted estimate, for glow the density itself. Each comes with its standard error over the images."""
    stages: int = 200
    """Stages of annealed importance sampling."""
    by: tasks.By = "method"
    """The method's own inference (an encoder's centre, where there is one), a draw from its q(z | x), or short run
    dynamics on the decoder."""
    quiet_steps: int = 0
    """So many of the last steps of the dynamics without noise: the centre of q(z | x) instead of a draw from it."""


def _evaluate(arguments: Evaluate) -> None:
    trained, generator = arguments.open()
    x = arguments.load(trained)
    begun = time.perf_counter()
    inferred = tasks.reconstruct(trained, x, generator, by=arguments.by, quiet_steps=arguments.quiet_steps)
    errors = tasks.mse_per_image(inferred.images, x)
    deviations = [round(float(layer.std()), 4) for layer in inferred.z]
    likelihood = {}
    if arguments.likelihood_images:
        likelihood = tasks.log_likelihood(trained, x[: arguments.likelihood_images], generator, arguments.stages)
    arguments.write(
        "evaluate",
        {
            "method": trained.name,
            "by": "dynamics" if arguments.quiet_steps else arguments.by,
            "mse": float(errors.mean()),
            "standard_error": float(errors.std() / len(errors) ** 0.5),
            "images": len(x),
            "data": arguments.data_name(trained),
            "steps": trained.dynamics.steps,
            "quiet_steps": arguments.quiet_steps,
            "longest_step": trained.dynamics.longest,
            "divergent": int(inferred.divergent.sum()),
            "latent_std": deviations,
            "parameters": trained.parameters,
            "seconds": round(time.perf_counter() - begun, 1),
            "seed": arguments.seed,
            "convention": "mean square error per pixel, images in [-1, 1]",
            **likelihood,
        },
    )


@dataclass
class Sample(_Use):
    """Draw images from the model.

    Example: shortrun sample mnist-small --images 64 --out pictures

    After a short training: shortrun sample runs/svhn --fitted 2000 --out pictures
    """

    images: int = 64
    fitted: int | None = None
    """Draw latents from a Gaussian fitted to the inferred latents of so many training images, not from the prior."""


def _sample(arguments: Sample) -> None:
    from shortrun.pictures import save_grid

    trained, generator = arguments.open()
    images = tasks.sample(trained, arguments.images, generator, arguments.load_fitted(trained, arguments.fitted))
    save_grid(arguments.out / "samples.png", [("", row) for row in images.split(10)])
    print(arguments.out / "samples.png")


@dataclass
class Reconstruct(_Use):
    """Infer held-out images and decode them again.

    Example: shortrun reconstruct mnist-small --data embedded --out pictures
    """

    quiet_steps: int = 0
    """So many of the last steps of the dynamics without noise: the centre of q(z | x) instead of a draw from it."""


def _reconstruct(arguments: Reconstruct) -> None:
    from shortrun.pictures import save_grid

    trained, generator = arguments.open()
    x = arguments.load(trained)
    inferred = tasks.reconstruct(trained, x, generator, quiet_steps=arguments.quiet_steps)
    errors = tasks.mse_per_image(inferred.images, x)
    rows = []
    for originals, images in zip(x.split(10), inferred.images.split(10), strict=True):
        rows += [("original", originals), ("reconstruction", images)]
    save_grid(arguments.out / "reconstructions.png", rows[:12], f"mean MSE {errors.mean():.4f}")
    arguments.write("reconstruct", {"mse": float(errors.mean()), "per_image": [round(float(e), 6) for e in errors]})


@dataclass
class Inpaint(_Use):
    """Hide part of each image, infer from the rest, paint what is hidden, several times.

    Example: shortrun inpaint mnist-small --mask lower-half --fills 5 --out pictures
    """

    mask: str = "lower-half"
    """lower-half (or upper-, left-, right-half), random:SHARE, blocks:SIDE:COUNT, box:TOP,LEFT,HEIGHT,WIDTH or
    file:PATH (black hides)."""
    fills: int = 4
    """How many fills per image."""
    keep_known: bool = True
    """Copy the visible pixels instead of re-generating them."""
    by: tasks.By = "method"
    """The method's own inference (an encoder's centre, where there is one), a draw from its q(z | x), or short run
    dynamics on the decoder."""


def _inpaint(arguments: Inpaint) -> None:
    from shortrun.pictures import save_grid

    trained, generator = arguments.open()
    x = arguments.load(trained)
    mask = make_mask(arguments.mask, len(x), x.shape[2], x.shape[3], generator)
    result = tasks.inpaint(trained, x, mask, generator, arguments.fills, arguments.keep_known, arguments.by)
    shown = torch.where(mask.expand_as(x), x, torch.zeros(()))
    rows = [("original", x[:10]), ("visible", shown[:10])]
    rows += [(f"fill {i + 1}", fill[:10]) for i, fill in enumerate(result.fills)]
    rows.append(("mean", result.fills.mean(0)[:10]))
    if arguments.fills > 1:
        spread = result.fills.std(0)
        rows.append(("spread", (2 * spread / spread.max().clamp_min(1e-6) - 1)[:10]))
    save_grid(arguments.out / "inpainting.png", rows, f"mask {arguments.mask}")
    baseline = tasks.mean_image_error(arguments.load_set(trained, "train"), x, mask)
    arguments.write(
        "inpaint",
        {
            "hidden_mse": result.hidden_mse_single,
            "hidden_mse_of_mean_fill": result.hidden_mse,
            "hidden_mse_of_mean_image": baseline,
            "mask": arguments.mask,
            "fills": arguments.fills,
            "images": len(x),
        },
    )


@dataclass
class Traverse(_Use):
    """Change one layer of latents at a time while the others stay fixed.

    Example: shortrun traverse mnist-small --out pictures
    """

    images: int = 4
    layer: int | None = None
    """Layer to change, 0 at the top; by default each in turn."""
    amount: float | None = None
    """Move along a random direction from -amount to +amount instead of drawing anew."""


def _traverse(arguments: Traverse) -> None:
    from shortrun.pictures import save_grid

    trained, generator = arguments.open()
    x = arguments.load(trained)
    z = tasks.reconstruct(trained, x, generator).z
    layers = range(len(z)) if arguments.layer is None else [arguments.layer]
    for layer in layers:
        images = tasks.traverse(trained, z, layer, 10, generator, arguments.amount)
        path = arguments.out / f"traverse_layer_{len(z) - layer}.png"
        title = f"only z_{len(z) - layer} changes" + (" (top layer)" if layer == 0 else "")
        save_grid(path, [(f"image {i + 1}", images[:, i]) for i in range(len(x))], title)
        print(path)


@dataclass
class Interpolate(_Use):
    """Walk through the latents from one held-out image to another.

    Example: shortrun interpolate mnist-small --out pictures
    """


def _interpolate(arguments: Interpolate) -> None:
    from shortrun.pictures import save_grid

    trained, generator = arguments.open()
    x = arguments.load(trained)
    z = tasks.reconstruct(trained, x, generator).z
    first, last = tuple(layer[0::2] for layer in z), tuple(layer[1::2] for layer in z)
    count = len(last[0])
    images = tasks.interpolate(trained, tuple(layer[:count] for layer in first), last, 10)
    path = arguments.out / "interpolation.png"
    save_grid(path, [("", images[:, i]) for i in range(count)])
    print(path)


@dataclass
class Tune(_Use):
    """The free energy of a trained model over step sizes.

    Example: shortrun tune mnist-small --images 16 --out pictures

    By the paper's criterion: shortrun tune RUN --entropy conditional --estimator lanczos --deltas 0.02 0.04 0.06 0.1
    --out pictures
    """

    images: int = 16
    entropy: Entropy = "marginal"
    """conditional is the paper's; averaged its Eq. 17 to the letter; marginal also counts the injected noise."""
    estimator: Estimator = "endpoint"
    """exact: a Hessian at each step; lanczos: products with it; endpoint: the curvature where the chain ends."""
    chains: int = 4
    """Chains of each image."""
    deltas: tuple[float, ...] = ()
    """Candidates as delta = sqrt(2 s), instead of thirteen around the step of the model."""


def _tune(arguments: Tune) -> None:
    from shortrun.pictures import save_curve

    trained, generator = arguments.open()
    if any(not delta > 0 for delta in arguments.deltas):
        raise ValueError(f"deltas is {arguments.deltas}; expected positive numbers")
    candidates = candidates_of(trained.dynamics, arguments.deltas) or None
    result = tasks.tune(
        trained, arguments.load(trained), generator, candidates, entropy=arguments.entropy,
        estimator=arguments.estimator, samples=arguments.chains,
    )  # fmt: skip
    print(result)
    save_curve(arguments.out / "free_energy.png", result)
    arguments.write(
        "tune",
        {
            "entropy": arguments.entropy,
            "estimator": arguments.estimator,
            "step_size": result.dynamics.step_size,
            "step_sizes": result.step_sizes,
            "free_energy": result.free_energy.tolist(),
            "standard_error": result.standard_error.tolist(),
            "stability": result.stability.tolist(),
            "divergent": result.divergent.tolist(),
            "ruled_out": result.ruled_out.tolist(),
        },
    )


@dataclass
class Data:
    """Look at a data set: number, size and checksum, and a picture of it.

    Example: shortrun data svhn --out pictures
    """

    name: Positional[str]
    """embedded, scenes:COUNT, mnist, svhn, celeba, folder:PATH, zip:PATH, npz:PATH or hf:NAME."""
    out: Path | None = None
    """Folder for a picture of the first images."""
    data_root: str | None = None
    size: int | None = None
    crop: data.Crop = None
    """Side of the centre square that is cut out before resizing, or whole (see shortrun train --help)."""


def _data(arguments: Data) -> None:
    from shortrun.pictures import save_grid

    for split in ("train", "test"):
        images = data.load(
            arguments.name,
            split,
            root=arguments.data_root,
            size=arguments.size,
            crop=arguments.crop,
        )
        print(images.describe())
        if arguments.out is not None:
            shown = images.batch(slice(0, 40))
            save_grid(arguments.out / f"{split}.png", [("", row) for row in shown.split(10)])


@dataclass
class Demo:
    """Train a three-layer model on 4,500 embedded digits for 3 minutes, and write a report with pictures.

    Example: shortrun demo --out demo
    """

    out: Path = Path("demo")
    minutes: float = 3.0
    seed: int = 0
    smoke: bool = False
    """Seconds instead of minutes, to see that everything runs."""


def _demo(arguments: Demo) -> None:
    from shortrun.demo import demo

    demo(arguments.out, arguments.minutes, arguments.seed, arguments.smoke)


@dataclass
class Reproduce:
    """Every table and figure of the paper: train, measure, draw, and report beside the paper's numbers.

    Seconds, on embedded and generated images: shortrun reproduce all --preset smoke --out smoke

    One table on two cores: shortrun reproduce table-K --preset cpu

    One cell of it: shortrun reproduce table-K --preset cpu --only '*/K=25/*'

    What is finished is not done again: the same command continues where it was stopped.
    """

    target: Positional[Target]
    preset: ScaleName = "cpu"
    """smoke: seconds; cpu: minutes per model; paper: as published."""
    out: Path | None = None
    """Folder for numbers, pictures and the report; by default results/PRESET."""
    runs: Path | None = None
    """Folder for the trained models; by default runs/reproduce-PRESET."""
    only: str = "*"
    """Only cells (table-1/short-run_L=3/svhn), models (svhn-short-run-L3-K25) or figures that match this pattern."""
    minutes_per_cell: float | None = None
    """Training time of each model of 32x32 images (64x64: four times as much), instead of the preset's."""
    jobs: int = 1
    """How many models are trained or measured at a time."""
    fid: bool = True
    """Take FID and KID; without a GPU they need more time than training, and can be added later."""
    originals: bool = True
    """Show images of the data sets in figures, beside what models make of them. Images of CelebA may not be passed on:
    leave them out of what you publish."""
    data_root: str | None = None
    """Folder with the data sets; by default the environment variable SHORTRUN_DATA."""


def _reproduce(arguments: Reproduce) -> None:
    from shortrun.published import SCALES
    from shortrun.reproduce import Place, reproduce

    name = arguments.preset
    scale = SCALES[name]
    if arguments.minutes_per_cell is not None:
        if not arguments.minutes_per_cell > 0:
            raise ValueError(f"minutes-per-cell is {arguments.minutes_per_cell}; expected more than zero")
        scale = dataclasses.replace(scale, minutes=arguments.minutes_per_cell)
    out = arguments.out or Path("results") / name
    runs = arguments.runs or Path("runs") / f"reproduce-{name}"
    place = Place(
        out,
        runs,
        name,
        scale,
        arguments.data_root,
        fid=arguments.fid,
        jobs=arguments.jobs,
        originals=arguments.originals,
    )
    failed = reproduce(arguments.target, place, arguments.only)
    print(f"wrote {out / 'report.html'}")
    if failed:
        raise ValueError("these failed, the others are done: " + "; ".join(failed))


@dataclass
class Bench:
    """Measure speed and memory on this machine: against its matrix multiplication, a plain loop and a VAE.

    Takes about fifteen minutes; leave the machine alone meanwhile.

    Example: shortrun bench --out bench.json
    """

    out: Path | None = None
    """Also write the figures to this JSON file."""
    quick: bool = False
    """One repeat of everything."""
    sizes: tuple[Literal["cpu", "paper", "authors-script"], ...] = ("cpu", "authors-script")
    """Presets to measure; the two of published size take most of the time."""


def _bench(arguments: Bench) -> None:
    from shortrun.bench import bench
    from shortrun.runs import write_json

    if arguments.out is not None and arguments.out.is_dir():
        raise ValueError(f"out is the folder {arguments.out}; expected the name of a JSON file")

    def save(result: dict[str, Any]) -> None:
        if arguments.out is not None:
            write_json(arguments.out, result)

    bench(arguments.sizes, arguments.quick, save=save)


COMMANDS = {
    Train: _train,
    Resume: _resume,
    Compare: _compare,
    Fid: _fid,
    Evaluate: _evaluate,
    Sample: _sample,
    Reconstruct: _reconstruct,
    Inpaint: _inpaint,
    Traverse: _traverse,
    Interpolate: _interpolate,
    Tune: _tune,
    Data: _data,
    Reproduce: _reproduce,
    Bench: _bench,
    Demo: _demo,
}


@contextlib.contextmanager
def _one_voice(arguments: Any) -> Iterator[None]:
    """Of several processes that share a task, only the first one writes and prints."""
    if not isinstance(arguments, _Use) or processes().is_main_process:
        yield
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments.out = Path(folder)
        yield


def _flag(words: Sequence[str], name: str, default: str) -> str:
    """The value of ``--name`` among the words, read ahead because the defaults of others depend on it."""
    for i, word in enumerate(words):
        if word == name and i + 1 < len(words):
            return words[i + 1]
        if word.startswith(name + "="):
            return word.partition("=")[2]
    return default


def _commands(words: Sequence[str]) -> Any:
    """All commands as one type for tyro; the defaults of train depend on its preset, data and method."""
    union: Any = None
    for command in COMMANDS:
        kwargs: dict[str, Any] = {"name": command.__name__.lower()}
        if command is Train and words[:1] == ["train"]:
            name, chosen = _flag(words, "--data", "embedded"), _flag(words, "--preset", "cpu")
            method = _flag(words, "--method", "short-run")
            config = TrainConfig(data=name)
            if chosen in get_args(Preset) and method in get_args(Method):  # else tyro says what is accepted
                config = preset(chosen, name, method)  # type: ignore[arg-type]
            kwargs["default"] = Train(tyro.MISSING, config=config)
        member = Annotated[command, tyro.conf.subcommand(**kwargs)]  # type: ignore[valid-type]
        union = member if union is None else union | member
    return union


def main(words: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if words is None else words)
    try:
        arguments: Any = tyro.cli(_commands(words), prog="shortrun", description=__doc__, args=words)
        with _one_voice(arguments):
            COMMANDS[type(arguments)](arguments)  # type: ignore[operator]
    except CHECKED_ERRORS as error:
        print(f"shortrun: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("shortrun: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
