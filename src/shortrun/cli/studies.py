"""Studies: methods on equal terms, the paper's tables and figures, the speed of this machine, the demonstration."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro
from tyro.conf import Positional

from shortrun.learners import Method
from shortrun.studies.compare import Terms
from shortrun.studies.reproduce import ScaleName, Target


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

    def __call__(self) -> None:
        from shortrun.studies.compare import compare, markdown

        terms = self.terms
        if terms.minutes is not None and terms.updates is not None:
            raise ValueError("both minutes and updates are set; equal terms are either equal time or equal updates")
        if terms.minutes is None and terms.updates is None:
            terms = dataclasses.replace(terms, minutes=2.0)
        print(markdown(compare(self.methods, terms, self.out)))


@dataclass
class Reproduce:
    """Every table and figure of the paper: train, measure, draw, and report beside the paper's numbers.

    Seconds, on embedded and generated images: shortrun reproduce all --preset smoke --out smoke

    One table on two cores: shortrun reproduce table-K --preset cpu

    Evidence at a budget that means something, eight to nine hours on two cores: shortrun reproduce all --preset night

    One cell of it: shortrun reproduce table-K --preset cpu --only '*/K=25/*'

    What is finished is not done again: the same command continues where it was stopped.
    """

    target: Positional[Target]
    preset: ScaleName = "cpu"
    """smoke: seconds; cpu: minutes per model; night: 20 minutes per model, fewer models; paper: as published."""
    out: Path | None = None
    """Folder for numbers, pictures and the report; by default results/PRESET."""
    runs: Path | None = None
    """Folder for the trained models; by default runs/reproduce-PRESET."""
    only: str = "*"
    """Only cells (table-1/short-run_L=3/svhn), models (svhn-short-run-L3-K25) or figures that match this pattern."""
    minutes_per_cell: float | None = None
    """Training time of each model of 32x32 images, instead of the preset's; 64x64: four times as much, night: twice."""
    jobs: int | None = None
    """Number of models that are trained or measured at a time: one, at night one for each core."""
    fid: bool = True
    """Take FID and KID; without a GPU they need more time than training, and can be added later."""
    originals: bool = True
    """Show images of the data sets in figures, beside what models make of them. Images of CelebA may not be passed on:
    turn this off for what you publish."""
    data_root: str | None = None
    """Folder with the data sets; by default the environment variable SHORTRUN_DATA."""

    def __call__(self) -> None:
        from shortrun.studies.reproduce.place import Place
        from shortrun.studies.reproduce.published import SCALES
        from shortrun.studies.reproduce.run import reproduce

        scale = SCALES[self.preset]
        if self.minutes_per_cell is not None:
            if not self.minutes_per_cell > 0:
                raise ValueError(f"minutes-per-cell is {self.minutes_per_cell}; expected more than zero")
            scale = dataclasses.replace(scale, minutes=self.minutes_per_cell)
        out = self.out or Path("results") / self.preset
        runs = self.runs or Path("runs") / f"reproduce-{self.preset}"
        jobs = self.jobs if self.jobs is not None else (os.cpu_count() or 1) if self.preset == "night" else 1
        originals = self.originals and self.preset != "night"  # whose results are made to be published
        place = Place(out, runs, self.preset, scale, self.data_root, fid=self.fid, jobs=jobs, originals=originals)
        failed = reproduce(self.target, place, self.only)
        print(f"wrote {out / 'report.html'}")
        if failed:
            raise ValueError("these failed, the others are done: " + "; ".join(failed))


@dataclass
class Bench:
    """Measure speed and memory on this machine: against its matrix multiplication, a plain loop and a VAE.

    Takes about fifteen minutes; do nothing else with the machine meanwhile.

    Example: shortrun bench --out bench.json
    """

    out: Path | None = None
    """Also write the figures to this JSON file."""
    quick: bool = False
    """One repeat of everything."""
    sizes: tuple[Literal["cpu", "paper", "authors-script"], ...] = ("cpu", "authors-script")
    """Presets to measure; the two of published size take most of the time."""

    def __call__(self) -> None:
        from shortrun.files import write_json
        from shortrun.studies.bench import bench

        out = self.out
        if out is not None and out.is_dir():
            raise ValueError(f"out is the folder {out}; expected the name of a JSON file")

        def save(result: dict[str, Any]) -> None:
            if out is not None:
                write_json(out, result)

        bench(self.sizes, self.quick, save=save)


@dataclass
class Demo:
    """Train a three-layer model on 4,500 embedded digits for 3 minutes, and write a report with pictures.

    Example: shortrun demo --out demo
    """

    out: Path = Path("demo")
    """Folder for the run, the pictures and the report."""
    minutes: float = 3.0
    """Time for all of it."""
    seed: int = 0
    """Seed of everything random."""
    smoke: bool = False
    """Seconds instead of minutes, to see that everything runs."""

    def __call__(self) -> None:
        from shortrun.studies.demo import demo

        demo(self.out, self.minutes, self.seed, self.smoke)
