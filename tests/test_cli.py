"""Each command on a small trained run: files appear, numbers are right, errors are one clear line."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from shortrun import Langevin, data, free_energy, tasks
from shortrun.cli import Evaluate, main
from shortrun.compare import Ground
from shortrun.config import Terms, preset
from shortrun.demo import samples_text
from shortrun.masks import make_mask
from shortrun.runs import from_pretrained
from shortrun.train import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "smoke"
    train(preset("smoke", "embedded"), folder, quiet=True)
    return folder


def call(*words):
    main([str(word) for word in words])


def read(path):
    return json.loads(path.read_text())


def test_train_and_resume(tmp_path, capsys):
    call("train", "--preset", "smoke", "--iterations", "2", "--out", tmp_path / "run", "--tensorboard")
    assert "2 iterations" in capsys.readouterr().out
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    call("resume", tmp_path / "run", "--iterations", "3")
    assert "3 iterations" in capsys.readouterr().out


def test_dry_run_trains_nothing(tmp_path, capsys):
    call("train", "--preset", "smoke", "--dry-run", "--out", tmp_path / "run")
    text = capsys.readouterr().out
    assert "16,481 parameters" in text
    assert "s per iteration" in text
    assert "checksum" in text
    assert not (tmp_path / "run").exists()


def test_evaluate_and_reconstruct_agree_with_a_second_computation(run, tmp_path):
    call("evaluate", run, "--images", "12", "--out", tmp_path)
    call("reconstruct", run, "--images", "12", "--out", tmp_path)
    numbers = read(tmp_path / "evaluate.json")
    trained = from_pretrained(run)
    x = torch.from_numpy(data.load("embedded", "test").array[:12].numpy()).float() / 127.5 - 1
    images = tasks.reconstruct(trained, x, torch.Generator().manual_seed(0)).images
    expected = np.mean((images.numpy().astype(np.float64) - x.numpy()) ** 2)
    assert numbers["mse"] == pytest.approx(expected, rel=1e-5)
    assert read(tmp_path / "reconstruct.json")["mse"] == pytest.approx(expected, rel=1e-5)
    assert numbers["images"] == 12
    with Image.open(tmp_path / "reconstructions.png") as picture:
        assert picture.size[0] > 500


@pytest.mark.parametrize(
    ("words", "files"),
    [
        (["sample", "--images", "12"], ["samples.png"]),
        (["sample", "--images", "12", "--fitted", "100"], ["samples.png"]),
        (["traverse", "--images", "2"], ["traverse_layer_1.png", "traverse_layer_2.png"]),
        (["traverse", "--images", "2", "--layer", "0", "--amount", "2"], ["traverse_layer_2.png"]),
        (["interpolate", "--images", "4"], ["interpolation.png"]),
        (["tune", "--images", "2"], ["free_energy.png", "tune.json"]),
        (["inpaint", "--images", "3", "--fills", "2", "--mask", "blocks:6:2"], ["inpainting.png", "inpaint.json"]),
    ],
)
def test_tasks_write_their_files_and_repeat_with_the_seed(run, tmp_path, words, files):
    for folder in ("a", "b"):
        call(words[0], run, *words[1:], "--out", tmp_path / folder, "--seed", "3")
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_tune_by_the_criterion_of_the_paper(run, tmp_path):
    deltas = (0.02, 0.05, 0.1)
    for entropy, estimator in (("conditional", "exact"), ("conditional", "lanczos"), ("marginal", "exact")):
        words = ("--images", "2", "--chains", "4", "--deltas", *deltas, "--out", tmp_path)
        call("tune", run, "--entropy", entropy, "--estimator", estimator, *words)
        found = read(tmp_path / "tune.json")
        assert (found["entropy"], found["estimator"]) == (entropy, estimator)
        assert [max(size) for size in found["step_sizes"]] == [pytest.approx(delta**2 / 2) for delta in deltas]
        trained = from_pretrained(run)
        x = data.load("embedded", "test").batch(slice(0, 2))
        energy = free_energy(
            trained.model, x, Langevin(5, found["step_sizes"][1]), entropy=entropy, estimator=estimator, samples=4,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        assert found["free_energy"][1] == pytest.approx(
            float(energy.mean()), abs=0.5 if estimator == "lanczos" else 0.05
        )


def test_tasks_use_the_images_that_training_used(tmp_path):
    """The first ones alone (so that FID is against those), cut out in the same way."""
    (tmp_path / "photos").mkdir()
    for i in range(30):
        pixels = np.random.default_rng(i).integers(0, 256, (40, 28, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{i:02d}.png")
    name = f"folder:{tmp_path / 'photos'}"
    config = replace(preset("smoke", name), size=16, crop="whole", train_images=12, iterations=1)
    train(config, tmp_path / "run", quiet=True)
    use = Evaluate(str(tmp_path / "run"), tmp_path)
    seen = use.load_set(from_pretrained(tmp_path / "run"), "train")
    assert len(seen) == 12
    assert seen.checksum == data.load(name, size=16, crop="whole", limit=12).checksum
    assert seen.checksum != data.load(name, size=16, limit=12).checksum
    assert len(use.load_set(from_pretrained(tmp_path / "run"), "test")) == 3


def test_tasks_take_a_folder_of_images(run, tmp_path):
    (tmp_path / "mine").mkdir()
    for i in range(3):
        Image.new("L", (40, 50), 80 * i).save(tmp_path / "mine" / f"{i}.png")
    call("reconstruct", run, "--data", f"folder:{tmp_path / 'mine'}", "--out", tmp_path / "out")
    assert (tmp_path / "out" / "reconstructions.png").exists()


def test_data_command(tmp_path, capsys):
    call("data", "embedded", "--out", tmp_path)
    assert "4500 images 28x28x1, checksum" in capsys.readouterr().out
    assert (tmp_path / "train.png").exists()


def test_demo_writes_a_report_that_stands_alone(tmp_path):
    call("demo", "--smoke", "--out", tmp_path / "demo")
    report = (tmp_path / "demo" / "report.html").read_text()
    assert report.count("data:image/png;base64,") == 11
    assert "src='http" not in report
    assert read(tmp_path / "demo" / "numbers.json")["images"] == 20
    spread = from_pretrained(tmp_path / "demo" / "run").spread
    widths = ", ".join(f"{width:.2f}" for width in spread)
    assert len(spread) == 2
    assert f"each layer times the width that its latents had in training ({widths}; top layer first)" in report
    assert samples_text(()) == "Latents drawn from the prior, decoded."


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate", "nothing-here"], "neither a run folder"),
        (["reconstruct", "{run}", "--data", "folder:/nowhere"], "/nowhere does not exist"),
        (["reconstruct", "{run}", "--images", "0"], "images is 0"),
        (["sample", "{run}", "--fitted", "0"], "fitted is 0"),
        (["inpaint", "{run}", "--mask", "spiral"], "mask is 'spiral'"),
        (["inpaint", "{run}", "--mask", "box:0,0,99,2"], "must lie within 28x28"),
        (["traverse", "{run}", "--layer", "7"], "layer is 7"),
    ],
)
def test_errors_are_one_clear_line(run, tmp_path, capsys, words, message):
    with pytest.raises(SystemExit) as caught:
        call(*(word.replace("{run}", str(run)) for word in words), "--out", tmp_path)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("shortrun: ")
    assert message in error
    assert "Traceback" not in error


def test_inpainting_keeps_known_pixels_and_never_sees_hidden_ones(run):
    trained = from_pretrained(run)
    x = data.load("embedded", "test").batch(slice(0, 3))
    mask = make_mask("lower-half", 3, 28, 28, torch.Generator())
    spoiled = torch.where(mask.expand_as(x), x, -x)
    results = [
        tasks.inpaint(trained, images, mask, torch.Generator().manual_seed(0), fills=2).fills for images in (x, spoiled)
    ]
    hidden = ~mask.expand_as(x)
    assert torch.equal(results[0][:, hidden], results[1][:, hidden])
    assert torch.equal(results[0][0][~hidden], x[~hidden])
    assert not torch.equal(results[0][0], results[0][1])


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("lower-half", 0.5),
        ("left-half", 0.5),
        ("random:0.3", 0.3),
        ("blocks:7:1", 1 - 49 / 784),
        ("box:0,0,14,28", 0.5),
    ],
)
def test_masks_hide_what_they_say(name, share):
    mask = make_mask(name, 50, 28, 28, torch.Generator().manual_seed(0))
    assert mask.shape == (50, 1, 28, 28)
    assert float(mask.float().mean()) == pytest.approx(share, abs=0.01)


def test_mask_from_a_file(tmp_path):
    picture = np.full((56, 56), 255, np.uint8)
    picture[:28] = 0
    Image.fromarray(picture).save(tmp_path / "mask.png")
    mask = make_mask(f"file:{tmp_path / 'mask.png'}", 2, 28, 28, torch.Generator())
    assert not mask[0, 0, :14].any()
    assert mask[0, 0, 14:].all()


def test_a_comparison_measures_with_the_images_that_it_trains_on(tmp_path):
    folder = tmp_path / "celeba" / "img_align_celeba"
    folder.mkdir(parents=True)
    for i in range(8):
        pixels = np.random.default_rng(i).integers(0, 256, (54, 44, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    for name in ("paper", "cpu"):
        terms = Terms("celeba", str(tmp_path), name, samples=0)
        ground, config = Ground(terms), terms.config("short-run")
        options = {"root": tmp_path, "crop": config.crop}
        assert ground.seen.checksum == data.load("celeba", **options).checksum
        assert torch.equal(ground.held_out, data.load("celeba", "test", **options).batch(slice(None)))
    assert preset("paper", "celeba").crop != preset("cpu", "celeba").crop


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "authors-script", "--method", "vae"], "the authors' script has no vae"),
        (["--preset", "smoke", "--tune-deltas", "nan"], "tune_deltas is (nan,)"),
        (["--preset", "smoke", "--data", "folder:docs", "--crop", "0"], "crop is 0"),
        (["--preset", "smoke", "--train-images", "0"], "train_images is 0"),
        (["--preset", "smoke", "--rate-changes", "5", "3"], "rate_changes is (5, 3)"),
    ],
)
def test_bad_settings_of_a_run_are_one_sentence_before_it_begins(tmp_path, capsys, words, message):
    with pytest.raises(SystemExit):
        call("train", *words, "--out", tmp_path / "run")
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
