"""Scenes with known causes, the share of layers in them, and every table and figure at smoke size."""

import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shortrun import GaussianModel, Langevin, data, metrics
from shortrun.data import DataError
from shortrun.data.scenes import GLYPH, REACH, SIZE, Factors, draw_factors, paint, scenes
from shortrun.files import write_json
from shortrun.studies.hierarchy import FACTORS, layer_shares, train_reader
from shortrun.studies.reproduce import claims, figures, models, report
from shortrun.studies.reproduce import published as pub
from shortrun.studies.reproduce.place import Place
from shortrun.studies.reproduce.run import reproduce
from shortrun.trained import Trained
from shortrun.training.model_folder import Description

SMOKE = pub.SCALES["smoke"]


def place(folder, scale=SMOKE, **options):
    return Place(folder / "out", folder / "runs", "smoke", scale, quiet=True, **options)


def quietly(target, here, only="*", **options):
    return reproduce(target, here, only, lambda text: None, **options)


def refuse(*arguments, **options):
    raise AssertionError("what is finished must not be done again")


def configs(here):
    """The different settings among all cells and figures."""
    trainings = [cell.training for cell in here.cells] + [t for models in pub.FIGURES.values() for t in models]
    return {json.dumps(here.config(t).flat()) for t in trainings}


# --- scenes -----------------------------------------------------------------------------------------


def test_scenes_show_their_factors():
    centre = torch.zeros(2, dtype=torch.long)
    base = Factors(torch.tensor([3]), torch.tensor([1]), centre[None], torch.tensor([[0.2, 0.4, 0.6]]))
    image = paint(base)[0]
    assert image.shape == (3, SIZE, SIZE)
    assert image[:, 0, 0].tolist() == [51, 102, 153]
    assert int(image.max()) == 255
    moved = paint(base._replace(position=torch.tensor([[REACH, -2]])))[0]
    torch.testing.assert_close(moved, image.roll((-2, REACH), (1, 2)))  # nothing but background wraps around
    other = paint(base._replace(digit=torch.tensor([4])))[0]
    edge = (SIZE - GLYPH) // 2
    assert not torch.equal(other, image)
    assert torch.equal(other[:, :edge], image[:, :edge])


def test_scenes_are_a_data_set_like_any_other():
    train, test = data.load("scenes:50"), data.load("scenes:50", "test")
    assert train.array.shape == (50, 3, 32, 32)
    assert len(test) == 5
    assert torch.equal(train.array, scenes(50, 0)[0])
    assert train.checksum == data.load("scenes:50").checksum != test.checksum
    with pytest.raises(DataError, match="ten or more"):
        data.load("scenes:many")


@pytest.mark.slow
def test_the_reader_learns_to_read():
    _, quality = train_reader(updates=250, batch=64)
    assert quality["digit"] > 0.5  # a guess is right in 0.1
    assert quality["position"] < 0.5 * math.sqrt(REACH * (REACH + 1) / 3)  # the deviation of a uniform position
    assert quality["background"] < 0.1


def test_shares_of_layers_whose_roles_are_known():
    """The top layer sets digit and style, the second nothing, the bottom one background and half of the position."""

    def prior(count):
        rng = torch.Generator().manual_seed(prior.calls)
        prior.calls += 1
        return tuple(torch.randn(count, 4, generator=rng) for _ in range(3))

    prior.calls = 0

    def decode(z):
        return torch.cat([z[0], z[2]], 1)

    def read(codes):
        def one_hot(values, classes):
            return torch.nn.functional.one_hot((values > 0).long(), classes).float()

        position = torch.stack([codes[:, 2], codes[:, 4]], 1)
        return {
            "digit": one_hot(codes[:, 0], 10),
            "style": one_hot(codes[:, 1], 4),
            "position": position,
            "background": codes[:, 5:8],
        }

    top, middle, bottom = layer_shares(decode, prior, read, pairs=4000)
    assert [middle[name] for name in FACTORS] == [0, 0, 0, 0]
    assert top["digit"] == top["style"] == 1
    assert bottom["digit"] == bottom["style"] == top["background"] == 0
    assert bottom["background"] == pytest.approx(1)
    assert top["position"] == pytest.approx(0.5, abs=0.05)
    assert top["position"] + bottom["position"] == pytest.approx(1)


# --- the paper's tables and figures -----------------------------------------------------------------


@pytest.mark.slow
def test_every_table_and_figure(tmp_path):
    here = place(tmp_path)
    assert quietly("all", here) == []
    for cell in here.cells:
        row = json.loads(here.result(cell.training).read_text())
        assert "mse" in row["measured"] or cell.training.method == "glow"
        assert "mse_centre" in row["measured"] or cell.training.method in ("glo", "glow")
        assert row["training"]["train_checksum"]
        assert row["command"] == f"shortrun reproduce all --preset smoke --only '{here.model(cell.training).name}'"
    assert len(list((here.out / "models").iterdir())) == len(list(here.runs.iterdir())) == len(configs(here))
    for pattern in pub.PICTURES.values():
        assert list(here.out.glob(pattern))
    page, text = (here.out / "report.html").read_text(), (here.out / "report.md").read_text()
    for words in (
        "35.23",
        "Which layer controls what",
        "order by MSE agrees",
        "MSE falls from K = 5 to 10",
        "MSE falls with every step of L = 1, 3, 5",
        "tuned by gradient, the step settles near 0.05",
        "the bottom layer represents the background colour",
        "shortrun reproduce table-K",
    ):
        assert words in page
        assert words in text
    assert page.count("data:image/png;base64") >= 14
    assert {"table-1.png", "table-K.png"} <= {path.name for path in here.out.iterdir()}
    assert 'src="http' not in page
    assert (here.out / "table-1.csv").read_text().count("\n") == 1 + sum(
        c.target == "table-1" for c in pub.table_cells()
    )

    (here.out / "notes.md").write_text("What it means:\nmuch.\n\nMore <b>.\n")
    assert quietly("all", here, do_model=refuse, do_figure=refuse) == []
    assert "<p>What it means: much.</p><p>More &lt;b&gt;.</p>" in (here.out / "report.html").read_text()
    without = replace(here, originals=False)
    assert [without.is_drawn(name) for name in ("figure-inpainting", "figure-samples")] == [False, True]
    elsewhere = replace(here, runs=tmp_path / "gone")  # what is measured does not need its model any more
    assert quietly("table-1", elsewhere, do_model=refuse) == []

    other = replace(here, scale=replace(SMOKE, updates=20))
    with pytest.raises(ValueError, match=r"'updates': 6.*'updates': 20.*name another --out"):
        reproduce("table-1", other)
    other = replace(other, out=tmp_path / "other")
    failed = quietly("table-1", other, "*short-run_L=1,_equal_updates/mnist")
    assert "other settings (iterations" in failed[0]


@pytest.mark.slow
def test_the_step_size_figure_compares_both_objectives(tmp_path):
    here = place(tmp_path)
    assert quietly("figure-step-size", here) == []
    note = json.loads(here.drawn("figure-step-size").read_text())
    (moment,) = note["objective"]
    assert moment["estimator"] == "exact"
    assert (here.out / "step-size-objective.png").is_file()
    paper, ours = figures.objective_panels(note["objective"]).values()
    assert paper == [(f"iteration {moment['iteration']}", moment["delta"], moment["conditional"])]
    assert ours == [(f"iteration {moment['iteration']}", moment["delta"], moment["marginal"])]
    gains = [a - b for a, b in zip(moment["conditional"], moment["marginal"], strict=True)]
    assert min(gains) > 0  # counting the noise adds entropy,
    assert gains == sorted(gains)  # the more the longer the steps
    trained = here.trained(pub.STEP_SIZE_RUNS[0])
    assert [run["tune"] for run in note["tuned"]] == ["grid"] * 3 + ["gradient"] * 3
    assert {run["iterations"] for run in note["tuned"]} == {trained.info["iterations"]}
    assert all(len(run["delta"]) == len(run["iteration"]) > 0 for run in note["tuned"])


@pytest.mark.parametrize("chosen", [0.02, [0.02, 0.01], [[0.005, 0.02], [0.01, 0.001]]])
def test_the_chosen_step_is_read_from_lines_of_any_version(chosen):
    assert models.chosen_delta(chosen) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "paper" else pytest.mark.slow) for name in pub.SCALES]
)
def test_no_model_is_planned_twice(tmp_path, name):
    """Models with the same settings are one, whatever they are called, and every cell finds its result."""
    here = Place(tmp_path / "out", tmp_path / "runs", name, pub.SCALES[name], fid=False)
    trained = []

    def pretend(place, training):
        trained.append(training)
        note = {
            "budget": place.budget,
            "measured": {"mse": 1.0, "mse_centre": 1.0},
            "training": {},
            "command": "",
            "machine": "",
        }
        write_json(place.result(training), note)
        return "done"

    seams = {"do_model": pretend, "do_figure": lambda place, figure: "drawn", "check": lambda place, models: None}
    assert quietly("all", here, **seams) == []
    planned = {json.dumps(here.config(training).flat()) for training in trained}
    assert len(trained) == len(planned) == len(configs(here))
    assert [row.cell for row in claims.finished(here)] == here.cells
    assert all(here.result(training).is_file() for models in pub.FIGURES.values() for training in models)
    assert len(list((here.out / "models").iterdir())) == len(planned)
    lines = (here.out / "table-1.csv").read_text().splitlines()
    assert len(lines) == 1 + sum(cell.target == "table-1" for cell in here.cells)


class Grey(torch.nn.Module):
    """Paints the same grey over images of a given size, whatever the latents."""

    def __init__(self, shape):
        super().__init__()
        self.level = torch.nn.Parameter(torch.full((1, *shape), 0.25))

    def forward(self, z):
        return self.level + 0.0 * z[0].view(-1, 1, 1, 1)


@pytest.mark.parametrize("originals", [True, False])
def test_figures_without_images_that_may_not_be_passed_on(tmp_path, originals):
    """All pixels that are shown come from the model (here: grey), except for scenes, which are the project's own."""

    def grey(folder):
        model = GaussianModel(Grey((3, 32, 32)), [(1,)])
        return Trained(model, Description("short-run", None, (3, 32, 32), Langevin(2, 0.01)))

    here = place(tmp_path, originals=originals, open_model=grey)
    for faces, scenes_alone, rows_of in (
        (pub.FACES, {"short-run": pub.SCENES}, figures.reconstruction_rows),
        (pub.FACES["short-run"], pub.SCENES, figures.inpainting_rows),
    ):
        for shown in (faces, scenes_alone):
            values = {value for _, images in rows_of(here, shown) for value in images.unique().tolist()}
            assert (values <= {0.0, 0.25, 1.0}) == (shown is faces and not originals)
    assert ("--no-originals" in here.command("all")) != originals


@pytest.mark.slow
def test_a_failing_cell_does_not_stop_the_others(tmp_path):
    here = place(tmp_path)

    def sometimes(place, training):
        if training.method == "glo":
            raise RuntimeError("out of luck")
        models.do_training(place, training)

    do_model = functools.partial(models.do_model, train=sometimes)
    failed = quietly("table-2", here, "*/gl*/svhn", do_model=do_model)
    assert failed == ["svhn-glo-L1-K25: out of luck"]
    failed = quietly("table-2", here, "*/[gv]*/svhn", do_model=do_model)
    assert failed == ["svhn-glo-L1-K25: out of luck"]
    assert here.result(pub.Training("svhn", "ladder-vae", 1)).is_file()  # which is the VAE of the table
    assert "out of luck" in (here.out / "report.html").read_text()


@pytest.mark.slow
def test_two_jobs_at_a_time(tmp_path):
    here = replace(place(tmp_path), jobs=2)
    assert quietly("table-2", here, "*/vae*/svhn") == []
    assert [row.cell.row for row in claims.finished(here)] == [
        "ladder-vae L=1",
        "ladder-vae L=1, equal updates",
        "vae",
        "vae-iaf",
    ]


STARTER = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from shortrun.studies.reproduce.run import begin_worker

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), begin_worker, (1,))
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 600)
    time.sleep(600)
"""


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them(tmp_path):
    (tmp_path / "starter.py").write_text(STARTER)
    starter = subprocess.Popen([sys.executable, tmp_path / "starter.py"], stdout=subprocess.PIPE, text=True)
    worker = int(starter.stdout.readline())
    starter.kill()
    try:
        starter.communicate(timeout=30)  # both have the pipe open, so it ends when both have
    except subprocess.TimeoutExpired:
        os.kill(worker, signal.SIGKILL)
        raise


def test_fid_can_follow_later(tmp_path, monkeypatch):
    monkeypatch.setenv("SHORTRUN_CACHE", str(tmp_path / "cache"))
    colours = metrics.FeatureNetwork(lambda images: images.float().mean((2, 3)), "mean colours", 3)
    here = place(tmp_path, replace(SMOKE, samples=20), network=lambda device="cpu": colours)
    result = here.result(pub.Training("svhn", "ladder-vae", 1))
    assert quietly("table-2", replace(here, fid=False), "*/vae/svhn") == []
    first = json.loads(result.read_text())["measured"]
    assert "fid" not in first
    train = functools.partial(models.do_training, fit=refuse)  # the model is there
    assert quietly("table-2", here, "*/vae/svhn", do_model=functools.partial(models.do_model, train=train)) == []
    both = json.loads(result.read_text())["measured"]
    assert both["fid"] > 0
    assert both["samples"] == both["reference_images"] == 20
    assert {key: both[key] for key in first} == first


def test_patterns_that_match_nothing_and_jobs_of_none_are_refused(tmp_path):
    with pytest.raises(ValueError, match="matches nothing in table-K; names look like table-K/K=5/celeba"):
        reproduce("table-K", place(tmp_path), "K=7")
    with pytest.raises(ValueError, match="jobs is 0"):
        reproduce("table-K", replace(place(tmp_path), jobs=0))
    assert not list(tmp_path.iterdir())


def test_published_settings_reach_the_runs(tmp_path):
    paper, cpu = pub.SCALES["paper"], pub.SCALES["cpu"]
    config = pub.Training("celeba", layers=5, steps=400).config(paper, None)
    assert config.network.latent_sizes == (64, 64, 64, 96, 128)
    settings, run = config.settings, config.run
    assert (settings.steps, settings.learn_last, run.iterations, run.batch) == (400, 1, 300_000, 100)
    assert pub.Training("celeba", layers=3, size=64).config(cpu, None).data.size == 64
    few = pub.Training("celeba", layers=5, steps=5).config(cpu, None).settings
    assert (few.steps, few.learn_last, few.cool_down) == (5, 4, 1)
    ours = pub.Training("svhn", equal="updates").config(cpu, None)
    ladder = pub.Training("svhn", "ladder-vae", equal="updates").config(cpu, None)
    assert ours.run.batch == ladder.run.batch
    assert ladder.run.iterations == cpu.updates
    assert 0 <= ours.run.iterations * ours.settings.learn_last - cpu.updates < ours.settings.learn_last
    fresh = pub.Training("svhn", equal="updates", fresh=True)
    more = fresh.config(cpu, None)
    found = (more.settings.learn_last, more.settings.learn_last_later, more.run.warm_up)
    assert found == (18, 9, ours.run.warm_up) == (18, 9, 40)
    assert more.run.iterations == 183  # 40 chains of 18 updates, 143 of 9: 2,007 updates instead of 2,016
    assert fresh.config(paper, None).updates_along(10**6) == 1  # the paper's algorithm has no fewer
    here = place(tmp_path)
    assert any(cell.training == fresh for cell in here.cells)
    assert not any(cell.training.fresh for cell in replace(here, scale=paper).cells)


def test_the_order_of_methods_is_compared_pair_by_pair():
    def row(name, paper, measured):
        training = pub.Training("data")
        cell = pub.Cell("table", name, "data", training, {"mse": paper})
        return claims.Row(cell, {"measured": {"mse": measured}}, training)

    rows = [row("a", 1.0, 5.0), row("b", 2.0, 6.0), row("c", 3.0, 5.5), row("d", None, 1.0), row("e", 3.0, None)]
    assert claims.agreement(rows, "mse") == (3, 2, ["b before c"])


def finished_row(training, mse, model=None):
    return claims.Row(pub.Cell("table", "", "", training, {}), {"measured": {"mse": mse}}, model or training)


def test_claims_are_compared_with_the_numbers():
    def row(steps, mse):
        return finished_row(pub.Training("celeba", layers=5, steps=steps, equal="updates"), mse)

    assert claims.claims([row(5, 0.03), row(10, 0.02), row(25, 0.025), row(400, 0.01)]) == [
        ("celeba: MSE falls from K = 5 to 10", "0.0300 > 0.0200", "yes"),
        ("celeba: MSE falls from K = 10 to 25", "0.0200 < 0.0250", "no"),
    ]


@pytest.mark.parametrize(
    ("errors", "numbers", "holds"),
    [((0.03, 0.02, 0.01), "0.0300 > 0.0200 > 0.0100", "yes"), ((0.03, 0.01, 0.02), "0.0300 > 0.0100 < 0.0200", "no")],
)
def test_an_order_over_layers_means_every_step(errors, numbers, holds):
    by_minutes = [pub.Training("mnist", layers=layers) for layers in (1, 3, 5)]
    rows = [finished_row(training, error) for training, error in zip(by_minutes, errors, strict=True)]
    expected = [("mnist, equal minutes: MSE falls with every step of L = 1, 3, 5", numbers, holds)]
    assert claims.claims(rows) == expected
    for row in list(rows):  # the same models under another name are no further claim
        other = replace(row.cell.training, equal="updates")
        rows.append(finished_row(other, row.result["measured"]["mse"], row.model))
    assert claims.claims(rows) == expected


def test_claims_of_the_step_size_figure():
    def run(tune, seed, *late):
        deltas = [0.5, 0.3, 0.2, 0.1, *late]  # what comes before the last third does not count
        return {"tune": tune, "seed": seed, "iterations": 60, "iteration": [10, 20, 30, 40, 50, 60], "delta": deltas}

    grid, gradient = claims.step_size_claims(
        [run("grid", 0, 0.045, 0.05), run("grid", 1, 0.05, 0.055), run("gradient", 0, 0.05, 0.05),
         run("gradient", 1, 0.04, 0.06), run("gradient", 2, 0.11, 0.12)]
    )  # fmt: skip
    assert "the step settles near 0.05" in grid[0]
    assert "last third" in grid[0]
    assert grid[1:] == ("seed 0: 0.045 to 0.050, settled; seed 1: 0.050 to 0.055, settled", "yes")
    seeds = "seed 0: 0.050 to 0.050, settled; seed 1: 0.040 to 0.060, not settled; seed 2: 0.110 to 0.120, settled"
    assert gradient[1:] == (seeds, "no")


def test_claims_of_the_hierarchy_figure():
    name = pub.SCENES_HIERARCHY.name
    digit, structure, colour = (
        dict(zip(FACTORS, shares, strict=True)) for shares in ((0.9, 0.2, 0.1, 0), (0.1, 0.9, 0.8, 0), (0, 0, 0, 0.7))
    )

    def verdicts(*layers):
        return [verdict for _, _, verdict in claims.hierarchy_claims({name: list(layers)})]

    assert verdicts(structure, digit, colour) == ["yes", "yes", "yes"]
    assert verdicts(colour, digit, structure) == ["no", "yes", "no"]
    background = claims.hierarchy_claims({name: [structure, digit, colour]})[0]
    assert background[0].startswith("scenes, independent layers: the bottom layer represents the background colour")
    assert background[1] == "background 0.00, 0.00, 0.70 (z_3, z_2, z_1)"
    assert claims.hierarchy_claims({}) == []


def test_the_committed_report_is_that_of_the_committed_numbers(tmp_path):
    committed = Path(__file__).parents[1] / "results" / "cpu"
    out = tmp_path / "cpu"
    shutil.copytree(committed, out)
    here = Place(out, tmp_path / "none", "cpu", pub.SCALES["cpu"], jobs=2, originals=False)
    report.write_report(here, {})
    for path in [committed / "report.md", *committed.glob("*.csv")]:
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    held = [*claims.claims(claims.finished(here)), *claims.figure_claims(here)]
    count = f"{sum(verdict == 'yes' for *_, verdict in held)} of {len(held)}"
    assert f"{count} hold at this size." in (out / "report.md").read_text()
    assert f"{count} of the paper's conclusions" in " ".join(
        (committed.parents[1] / "docs" / "results.md").read_text().split()
    )


def test_the_committed_results_need_nothing_more(tmp_path):
    out = tmp_path / "cpu"
    shutil.copytree(Path(__file__).parents[1] / "results" / "cpu", out)
    jobs = torch.get_num_threads()  # they were measured with one thread per job
    here = Place(out, tmp_path / "none", "cpu", pub.SCALES["cpu"], jobs=jobs, originals=False)
    assert all(here.is_measured(cell.training) for cell in here.cells)
    assert quietly("all", here, do_model=refuse, do_figure=refuse) == []


def test_factors_are_independent_and_cover_their_range():
    factors = draw_factors(4000, torch.Generator().manual_seed(0))
    assert sorted(set(factors.digit.tolist())) == list(range(10))
    assert int(factors.position.min()) == -REACH
    assert int(factors.position.max()) == REACH
    together = torch.stack([factors.digit.float(), factors.style.float(), factors.position[:, 0].float()])
    assert float(torch.corrcoef(together).triu(1).abs().max()) < 0.06
