"""Each command on a small trained run: files appear, numbers are right, errors are one clear line."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import shortrun as sr
from shortrun import cli, data
from shortrun.cli.samples import Sample
from shortrun.cli.use import Evaluate
from shortrun.studies.compare import Ground, Terms
from shortrun.training.config import Config
from shortrun.training.presets import preset


def train(config, folder):
    images = config.data
    return sr.fit(None, images.load("train"), validation=images.load("test"), config=config, folder=folder, quiet=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "smoke"
    train(preset("smoke", "embedded"), folder)
    return folder


def call(*words):
    cli.main([str(word) for word in words])


def fail(*words, code=2):
    with pytest.raises(SystemExit) as caught:
        call(*words)
    assert caught.value.code == code


def read(path):
    return json.loads(path.read_text())


# --- the command line itself --------------------------------------------------------------------------

LOOP = (
    "--data svhn --data-root here --size 32 --crop whole --train-images 40 --order epochs --seed 3 --iterations 5"
    " --minutes 2 --batch 16 --learning-rates 1e-3 1e-4 --rate-changes 3 --no-decay --warm-up 3 --betas 0.5 0.9"
    " --sigma 0.3 0.2 --anneal 0.5 --anneal-from 0.1 --anneal-shape linear --mask lower-half --evaluate-every 5"
    " --evaluate-images 10 --checkpoint-every 4 --mixed-precision bf16 --compile off --tensorboard"
)
CHAINS = (
    " --steps 10 --step-size 0.01 --cool-down 2 --tune gradient --tune-every 50 --tune-images 2 --tune-chains 3"
    " --tune-deltas 0.1 0.2 --entropy conditional --estimator lanczos --step-control tuned --tune-per layer"
    " --prior gaussian --prior-images 50 --learn-last 3 --learn-last-later 2 --loss log-joint"
)
GENERATOR = (
    " --model.kind hierarchical --model.latent-sizes 9 --model.channels 8 --model.base 7 --model.head-channels latent"
    " --model.coordinates latent --model.no-last-block --model.activated"
)
ENCODER = " --steps 9 --step-size 0.02 --kl-warm-up 0.1" + GENERATOR + " --model.encoder-channels 8"
TRAIN = {
    "short-run": CHAINS + GENERATOR,
    "abp": CHAINS + GENERATOR,
    "glo": " --code-rate 0.5 --optimiser sgd" + GENERATOR,
    "vae": ENCODER,
    "vae-iaf": ENCODER + " --model.flows 3 --model.flow-width 16 --model.gate affine",
    "ladder-vae": ENCODER + " --model.no-batch-norm",
    "glow": " --model.levels 2 --model.depth 3 --model.width 16 --model.no-additive --model.no-published-glow",
}


def flags(line):
    """Each flag of a command line with its words: yes or no are those without any."""
    for part in line.split(" --"):
        name, *values = part.removeprefix("--").split()
        *group, name = name.split(".")
        if name.startswith("no-"):
            name, values = name.removeprefix("no-"), ["False"]
        yield group, name.replace("-", "_"), values or ["True"]


@pytest.mark.parametrize("method", TRAIN)
def test_every_flag_of_every_method_arrives(method):
    line = LOOP + TRAIN[method]
    given = cli.parse(["train", "--method", method, "--preset", "smoke", *line.split(), "--out", "somewhere"])
    config = Config(given.method, given.data, given.run, given.settings, given.network)
    found = config.flat()
    assert found["method"] == method
    for group, name, words in flags(line):
        value = (found["model"] if group else found)[name]
        values = value if isinstance(value, list) else [value]
        assert [str(v) if isinstance(v, bool) else type(v)(w) for v, w in zip(values, words, strict=True)] == (
            [str(v) if isinstance(v, bool) else v for v in values]
        ), name
        if isinstance(value, bool):
            assert words == [str(value)]


def test_the_flags_of_train_are_those_of_its_method(capsys):
    fail("train", "--method", "vae", "--help", code=0)
    shown = capsys.readouterr().out
    assert "--kl-warm-up" in shown
    assert "--model.encoder-channels" in shown
    assert "--learn-last" not in shown
    assert "--model.levels" not in shown
    for method, foreign in (("vae", "--learn-last"), ("short-run", "--kl-warm-up"), ("glow", "--model.channels")):
        fail("train", f"--method={method}", foreign, "1", "--out", "nowhere")
        assert foreign in capsys.readouterr().err
    fail("train", "--method", "gan", "--out", "nowhere")
    assert "ladder-vae" in capsys.readouterr().err


def test_defaults_are_those_of_preset_data_and_method():
    for name, images, method in (("paper", "celeba", "short-run"), ("cpu", "svhn", "glow"), ("smoke", "mnist", "vae")):
        words = ["train", "--preset", name, f"--data={images}", "--method", method, "--out", "somewhere"]
        given = cli.parse(words)
        assert Config(given.method, given.data, given.run, given.settings, given.network) == preset(
            name, images, method
        )


@pytest.mark.parametrize(
    "line",
    [
        "resume RUN --minutes 3 --iterations 50 --decoder a.b:C",
        "evaluate RUN --out O --data mnist --data-root R --images 5 --seed 1 --decoder a.b:C --likelihood-images 2"
        " --stages 10 --by draw --quiet-steps 3",
        "sample RUN --out O --images 5 --prior normal",
        "prior RUN --out O --kind flow --images 500 --save S --seed 2",
        "reconstruct RUN --out O --quiet-steps 2",
        "inpaint RUN --out O --mask random:0.5 --fills 2 --no-keep-known --by dynamics",
        "traverse RUN --out O --layer 1 --amount 2.5",
        "interpolate RUN --out O --images 4",
        "tune RUN --out O --entropy averaged --estimator exact --chains 3 --deltas 0.1 0.2",
        "fid RUN --out O --samples 50 --protocol paper --reference test",
        "data svhn --out O --data-root R --size 32 --crop 20",
        "compare --out O --methods short-run vae --data svhn --data-root R --preset smoke --minutes 2 --images 5"
        " --mask left-half --samples 0 --likelihood-images 0 --seed 1",
        "compare --out O --updates 50",
        "reproduce table-K --preset smoke --out O --runs R --only a* --minutes-per-cell 2 --jobs 2 --no-fid"
        " --no-originals --data-root R",
        "bench --out O --quick --sizes cpu paper",
        "demo --out O --minutes 2 --seed 1 --smoke",
    ],
)
def test_flags_of_the_other_commands_arrive(line):
    name, *words = line.split()
    given = cli.parse([name, *words])
    assert type(given).__name__.lower() == name
    values = {**vars(given), **(vars(given.terms) if name == "compare" else {})}
    for _, flag, words in flags(line.partition(" --")[2]):
        value = values[flag]
        found = [str(v) for v in value] if isinstance(value, tuple) else [str(value)]
        assert found == [str(float(w)) if isinstance(value, float) else w for w in words]


@pytest.mark.parametrize("command", [command.__name__.lower() for command in cli.COMMANDS])
def test_help_has_an_example(command, capsys):
    fail(command, "--help", code=0)
    shown = capsys.readouterr().out
    assert f": shortrun {command} " in shown


def test_help_lists_the_commands_in_one_sentence_each(capsys):
    fail("--help", code=0)
    shown = capsys.readouterr().out
    assert "Draw images from the model." in shown
    assert "mnist-small" not in shown


@pytest.mark.slow
def test_the_module_is_a_command():
    words = [sys.executable, "-m", "shortrun.cli", "data", "nothing-like-it"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("shortrun: ")
    assert "Traceback" not in ended.stderr


def test_ctrl_c_ends_a_command(run, tmp_path, monkeypatch, capsys):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Sample, "__call__", interrupted)
    fail("sample", run, "--out", tmp_path, code=130)
    assert capsys.readouterr().err == "shortrun: interrupted\n"


@pytest.mark.parametrize("main", [True, False])
def test_only_the_first_process_writes(run, tmp_path, monkeypatch, capsys, main):
    monkeypatch.setattr(cli, "processes", lambda: SimpleNamespace(is_main_process=main))
    call("sample", run, "--images", "3", "--out", tmp_path / "out")
    assert (tmp_path / "out" / "samples.png").exists() is main
    assert bool(capsys.readouterr().out) is main


def test_warnings_are_one_line(run, tmp_path, capsys):
    trained = sr.load(run)
    trained.dynamics = replace(trained.dynamics, step_size=1e30)
    trained.save(tmp_path / "wild")
    call("evaluate", tmp_path / "wild", "--images", "4", "--out", tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("shortrun: warning: 4 of 4")
    assert read(tmp_path / "evaluate.json")["divergent"] == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate", "nothing-here"], "neither a run folder"),
        (["reconstruct", "{run}", "--data", "folder:/nowhere"], "/nowhere does not exist"),
        (["reconstruct", "{run}", "--images", "0"], "images is 0"),
        (["prior", "{run}", "--images", "0"], "images is 0"),
        (["prior", "mnist-small"], "name a folder with --save"),
        (["inpaint", "{run}", "--mask", "spiral"], "mask is 'spiral'"),
        (["inpaint", "{run}", "--mask", "box:0,0,99,2"], "must lie within 28x28"),
        (["traverse", "{run}", "--layer", "7"], "layer is 7"),
        (["tune", "{run}", "--deltas", "-1"], "deltas is (-1.0,)"),
        (["evaluate", "{run}", "--quiet-steps", "99"], "quiet_steps is 99"),
        (["sample", "{run}", "--decoder", f"{__name__}:OneLayer"], "takes no decoder"),
        (["fid", "{run}", "--samples", "1"], "samples is 1"),
        (["compare", "--minutes", "1", "--updates", "5"], "both minutes and updates are set"),
        (["reproduce", "all", "--minutes-per-cell", "0"], "minutes-per-cell is 0"),
    ],
)
def test_errors_are_one_clear_line(run, tmp_path, capsys, words, message):
    fail(*(word.replace("{run}", str(run)) for word in words), "--out", tmp_path)
    error = capsys.readouterr().err
    assert error.startswith("shortrun: ")
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "authors-script", "--method", "vae"], "the authors' script has no vae"),
        (["--preset", "smoke", "--tune-deltas", "nan"], "tune_deltas is (nan,)"),
        (["--preset", "smoke", "--data", "folder:docs", "--crop", "0"], "crop is 0"),
        (["--preset", "smoke", "--train-images", "0"], "train_images is 0"),
        (["--preset", "smoke", "--rate-changes", "5", "3"], "rate_changes is (5, 3)"),
        (["--preset", "smoke", "--model.kind", "upside-down"], "model kind is 'upside-down'"),
        (["--preset", "smoke", "--model.kind", "no.such.module:Decoder"], "cannot import no.such.module:Decoder"),
        (["--preset", "smoke", "--model.kind", "torch.nn:Identity"], "must be an nn.Module with the attribute"),
        (["--preset", "smoke", "--model.kind", "a:B", "--model.coordinates", "latent"], "need the top-down generator"),
    ],
)
def test_bad_settings_of_a_run_are_one_sentence_before_it_begins(tmp_path, capsys, words, message):
    fail("train", *words, "--out", tmp_path / "run")
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# --- training -----------------------------------------------------------------------------------------


def test_train_and_resume(tmp_path, capsys):
    call("train", "--preset", "smoke", "--iterations", "2", "--out", tmp_path / "run", "--tensorboard")
    assert "2 iterations" in capsys.readouterr().out
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    call("resume", tmp_path / "run", "--iterations", "3")
    assert "3 iterations" in capsys.readouterr().out
    fail("train", "--preset", "smoke", "--out", tmp_path / "run")
    assert f"`shortrun resume {tmp_path / 'run'}`" in capsys.readouterr().err


def test_resume_needs_a_run_whose_data_it_can_load(tmp_path, capsys):
    fail("resume", tmp_path)
    assert "is not a run folder" in capsys.readouterr().err
    model = sr.GaussianModel(OneLayer(), [(2,)])
    sr.fit(model, torch.rand(20, 1, 28, 28), iterations=1, folder=tmp_path / "run", quiet=True)
    fail("resume", tmp_path / "run")
    assert "was started in Python" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["short-run", "glow"])
def test_dry_run_trains_nothing(tmp_path, capsys, method):
    call("train", "--preset", "smoke", "--method", method, "--dry-run", "--out", tmp_path / "run")
    text = capsys.readouterr().out
    assert ("16,481 parameters" in text) is (method == "short-run")
    assert ("K = 5, m = 3" in text) is (method == "short-run")
    assert "s per iteration" in text
    assert "checksum" in text
    assert not (tmp_path / "run").exists()


class OneLayer(torch.nn.Module):
    latent_shapes = ((2,),)

    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(2, 784)

    def forward(self, z):
        return torch.tanh(self.out(z[0])).view(-1, 1, 28, 28)


OWN = f"{__name__}:OneLayer"


@pytest.mark.parametrize("method", ["short-run", "vae"])
def test_a_decoder_of_ones_own_is_named_on_the_command_line(tmp_path, capsys, method):
    run, out = tmp_path / "run", tmp_path / "out"
    call("train", "--preset", "smoke", "--method", method, "--model.kind", OWN, "--iterations", "2", "--out", run)
    for words in (("evaluate", run, "--images", "4", "--out", out), ("resume", run, "--iterations", "3")):
        capsys.readouterr()
        fail(*words)
        assert f"--decoder {OWN}" in capsys.readouterr().err
        call(*words, "--decoder", OWN)
    assert "3 iterations" in capsys.readouterr().out
    expected = sr.load(run, decoder=OneLayer())
    assert expected.model.decoder.out.weight.shape == (784, 2)
    assert read(out / "evaluate.json")["mse"] > 0


def test_the_seed_decides_how_a_decoder_of_ones_own_begins(tmp_path):
    weights = []
    for seed in (0, 0, 1):
        folder = tmp_path / str(len(weights))
        call("train", "--preset", "smoke", "--model.kind", OWN, "--iterations", "1", "--seed", seed, "--out", folder)
        weights.append(sr.load(folder, decoder=OneLayer()).model.decoder.out.weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("old_format", [False, True])
def test_nothing_is_imported_because_a_file_names_it(run, tmp_path, monkeypatch, capsys, old_format):
    """Every path in the files of a run leads to a module that leaves a trace when it is imported."""
    trace = tmp_path / "imported"
    (tmp_path / "trap.py").write_text(f"import pathlib\npathlib.Path({str(trace)!r}).touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "run"
    subprocess.run(["cp", "-r", run, folder], check=True)
    description, path = read(folder / "model" / "config.json"), "trap:Decoder"
    description["model"]["kind"] = path
    if old_format:
        for key in ("format", "own_decoder", "likelihood"):
            del description[key]
        description |= {"image": description["shape"], "spread": []}
    else:
        description |= {"own_decoder": path, "likelihood": path}
    (folder / "model" / "config.json").write_text(json.dumps(description))
    settings = (folder / "config.yaml").read_text()
    assert "kind: top-down" in settings
    (folder / "config.yaml").write_text(settings.replace("kind: top-down", f"kind: {path}"))
    for words in (("sample", folder, "--out", tmp_path), ("resume", folder, "--iterations", "9")):
        fail(*words)
        assert f"--decoder {path}" in capsys.readouterr().err
    assert not trace.exists()
    assert "trap" not in sys.modules
    fail("sample", folder, "--out", tmp_path, "--decoder", path)  # whereas this asks for it
    assert f"cannot import {path}" in capsys.readouterr().err
    assert trace.exists()
    del sys.modules["trap"]


# --- use ----------------------------------------------------------------------------------------------


def test_evaluate_and_reconstruct_agree_with_a_second_computation(run, tmp_path):
    call("evaluate", run, "--images", "12", "--out", tmp_path)
    call("reconstruct", run, "--images", "12", "--out", tmp_path)
    numbers = read(tmp_path / "evaluate.json")
    trained = sr.load(run)
    x = torch.from_numpy(data.load("embedded", "test").array[:12].numpy()).float() / 127.5 - 1
    images = trained.reconstruct(x)
    expected = np.mean((images.numpy().astype(np.float64) - x.numpy()) ** 2)
    assert numbers["mse"] == pytest.approx(expected, rel=1e-5)
    assert read(tmp_path / "reconstruct.json")["mse"] == pytest.approx(expected, rel=1e-5)
    assert numbers["images"] == 12
    assert numbers["method"] == "short-run"
    assert numbers["parameters"] == 16481
    with Image.open(tmp_path / "reconstructions.png") as picture:
        assert picture.size[0] > 500


@pytest.mark.parametrize(
    ("words", "files"),
    [
        (["sample", "--images", "12"], ["samples.png"]),
        (["sample", "--images", "12", "--prior", "normal"], ["samples.png"]),
        (["prior", "--kind", "gaussian", "--images", "100"], ["prior.png", "prior.json"]),
        (["traverse", "--images", "2"], ["traverse_layer_1.png", "traverse_layer_2.png"]),
        (["traverse", "--images", "2", "--layer", "0", "--amount", "2"], ["traverse_layer_2.png"]),
        (["interpolate", "--images", "5"], ["interpolation.png"]),
        (["tune", "--images", "2", "--deltas", "0.05", "0.1"], ["free_energy.png", "tune.json"]),
        pytest.param(["tune", "--images", "2"], ["free_energy.png", "tune.json"], marks=pytest.mark.slow),
        (["inpaint", "--images", "3", "--fills", "2", "--mask", "blocks:6:2"], ["inpainting.png", "inpaint.json"]),
    ],
)
def test_tasks_write_their_files_and_repeat_with_the_seed(run, tmp_path, words, files):
    for folder in ("a", "b"):
        call(words[0], run, *words[1:], "--out", tmp_path / folder, "--seed", "3")
    for name in files:
        first, second = (tmp_path / folder / name for folder in ("a", "b"))
        if name.endswith(".json"):  # the time they took aside
            times = ("seconds", "seconds_in_all")
            first, second = ({k: v for k, v in read(path).items() if k not in times} for path in (first, second))
            assert first == second
        else:
            assert first.read_bytes() == second.read_bytes()


@pytest.mark.slow
def test_tune_by_the_criterion_of_the_paper(run, tmp_path):
    deltas = (0.02, 0.05, 0.1)
    for entropy, estimator in (("conditional", "exact"), ("conditional", "lanczos"), ("marginal", "exact")):
        words = ("--images", "2", "--chains", "4", "--deltas", *deltas, "--out", tmp_path)
        call("tune", run, "--entropy", entropy, "--estimator", estimator, *words)
        found = read(tmp_path / "tune.json")
        assert (found["entropy"], found["estimator"]) == (entropy, estimator)
        assert found["step_sizes"] == [pytest.approx(delta**2 / 2) for delta in deltas]
        assert found["step_size"] in found["step_sizes"]
        trained = sr.load(run)
        x = data.load("embedded", "test").batch(slice(0, 2))
        energy = sr.free_energy(
            trained.model, x, replace(trained.dynamics, step_size=found["step_sizes"][1]),
            sr.Estimation(entropy, estimator, chains=4), rng=torch.Generator().manual_seed(0),
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
    train(preset("smoke", name).changed(size=16, crop="whole", train_images=12, iterations=1), tmp_path / "run")
    with pytest.raises(data.DataError, match="name the images to use with --data"):  # no file is opened unasked
        Evaluate(str(tmp_path / "run"), tmp_path).load_set(sr.load(tmp_path / "run"), "train")
    use = Evaluate(str(tmp_path / "run"), tmp_path, data=name)
    seen = use.load_set(sr.load(tmp_path / "run"), "train")
    assert len(seen) == 12
    assert seen.checksum == data.load(name, size=16, crop="whole", limit=12).checksum
    assert seen.checksum != data.load(name, size=16, limit=12).checksum
    assert len(use.load_set(sr.load(tmp_path / "run"), "test")) == 3


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


def test_inpainting_keeps_known_pixels_and_never_sees_hidden_ones(run):
    trained = sr.load(run)
    x = data.load("embedded", "test").batch(slice(0, 3))
    mask = sr.make_mask("lower-half", x)
    spoiled = torch.where(mask.expand_as(x), x, -x)
    results = [trained.inpaint(images, mask, fills=2) for images in (x, spoiled)]
    hidden = ~mask.expand_as(x)
    assert torch.equal(results[0][:, hidden], results[1][:, hidden])
    assert torch.equal(results[0][0][~hidden], x[~hidden])
    assert not torch.equal(results[0][0], results[0][1])


# --- studies ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_demo_writes_a_report_that_stands_alone(tmp_path):
    call("demo", "--smoke", "--out", tmp_path / "demo")
    report = (tmp_path / "demo" / "report.html").read_text()
    assert report.count("data:image/png;base64,") == 11
    assert "src='http" not in report
    assert read(tmp_path / "demo" / "numbers.json")["images"] == 20
    assert sr.load(tmp_path / "demo" / "run").prior.kind == "mixture"


def test_a_comparison_measures_with_the_images_that_it_trains_on(tmp_path):
    folder = tmp_path / "celeba" / "img_align_celeba"
    folder.mkdir(parents=True)
    for i in range(8):
        pixels = np.random.default_rng(i).integers(0, 256, (54, 44, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    for name in ("paper", "cpu"):
        terms = Terms("celeba", str(tmp_path), name, samples=0)
        ground, config = Ground(terms), terms.config("short-run")
        options = {"root": tmp_path, "crop": config.data.crop}
        assert ground.seen.checksum == data.load("celeba", **options).checksum
        assert torch.equal(ground.held_out, data.load("celeba", "test", **options).batch(slice(None)))
    assert preset("paper", "celeba").data.crop != preset("cpu", "celeba").data.crop
