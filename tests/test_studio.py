"""What the studio computes and refuses, without a browser."""

import io
import struct
import threading
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

import shortrun as sr
from shortrun.core.latents import flatten
from shortrun.studio import snippets, work
from shortrun.studio.server import is_loopback
from shortrun.studio.shared import Studio, whole_number
from shortrun.studio.sources import MOST_UPLOAD_BYTES, hidden_places, open_source, read_upload


@pytest.fixture(scope="module")
def digits():
    return open_source("mnist-small")


@pytest.fixture(scope="module")
def faces():
    return open_source("faces-small")


def png(image, **options):
    file = io.BytesIO()
    image.save(file, options.pop("format", "PNG"), **options)
    return file.getvalue()


def run(snippet):
    """The names that a snippet leaves behind, run as a user would."""
    names = {}
    exec(snippet.python, names)
    return names


# --- snippets do what the page does -------------------------------------------------------------------


def test_the_python_of_inpainting_gives_the_fills_of_the_page(digits):
    x = digits.images[3:4]
    visible = sr.make_mask("lower-half", x)
    *_, last = work.inpaint(digits, x, visible, 5, threading.Event())
    found = run(snippets.inpaint(digits, 3, "lower-half", 5, work.FILLS))
    assert torch.equal(found["fills"], last.images)
    hidden = (last.images.mean(0) - x[0])[~visible[0].expand_as(x[0])]
    assert last.error == pytest.approx(float(hidden.square().mean()))
    assert torch.equal(last.images[:, :, :14], x[:, :, :14].expand(work.FILLS, -1, -1, -1))


def test_the_python_of_the_other_tabs_gives_what_the_page_shows(faces, capsys):
    x = faces.images[2:3]
    rows = work.resample_layers(faces, x, 4)
    found = run(snippets.layers(faces, 2, 4, False))
    for (_, shown), row in zip(rows, found["rows"], strict=True):
        assert torch.equal(shown[1:], row)
    sampled = work.resample_layers(faces, None, 4)
    assert torch.equal(sampled[1][1][1:], run(snippets.layers(faces, None, 4, True))["rows"][1])
    path = work.interpolate(faces, x, faces.images[5:6])
    assert torch.equal(path, run(snippets.interpolate(faces, 2, 5))["row"])
    shown = dict(work.samples(faces, 7))
    found = run(snippets.samples(faces, 7, 16))
    assert torch.equal(shown["N(0, I)"], found["normal"])
    assert torch.equal(shown[f"learned prior ({faces.trained.prior.kind})"], found["learned"])
    film = work.watch_chain(faces, x, 3, False)
    found = run(snippets.chain(faces, 2, 3, False))
    assert torch.allclose(film.images[-1:], found["image"], atol=1e-5)
    told = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert told == pytest.approx(film.log_joint, rel=1e-4)


def test_command_lines_of_snippets_are_accepted(digits):
    import tyro

    from shortrun.cli import COMMANDS, use
    from shortrun.cli.samples import Sample, Traverse

    made = snippets.inpaint(digits, 2, "right-half", 0, 8).shell.split()
    assert tyro.cli(use.Inpaint, args=made[2:]).images == 3
    for kind, text in (
        (Traverse, snippets.layers(digits, 1, 0, True)), (Sample, snippets.samples(digits, 0, 16)),
        (use.Tune, snippets.step_sizes(digits)), (use.Reconstruct, snippets.chain(digits, 0, 1, True)),
    ):  # fmt: skip
        tyro.cli(kind, args=text.shell.split()[2:])
    assert len(COMMANDS) > 5


# --- chains and step sizes ----------------------------------------------------------------------------


def test_a_film_shows_the_chain(faces):
    """The end is that of ``infer``, and s * lambda is the curvature that autograd's full Hessian has."""
    x = faces.images[:1]
    film = work.watch_chain(faces, x, 1, True)
    dynamics = faces.trained.dynamics
    z = sr.infer(faces.trained.model, x, dynamics, rng=torch.Generator().manual_seed(1))
    assert torch.allclose(film.images[-1:], faces.trained.decode(z), atol=1e-4)
    assert len(film.images) == len(film.log_joint) == dynamics.steps + 1
    model, shapes = faces.trained.model, [layer.shape for layer in z]
    sizes = [shape.numel() for shape in shapes]

    def log_joint(flat):
        parts = tuple(part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True))
        return (model.log_prior(parts) + model.log_likelihood(x, parts)).sum()

    flat = flatten(z)[0].double().float()
    hessian = torch.autograd.functional.hessian(log_joint, flat)
    largest = float(torch.linalg.eigvalsh(-hessian.double())[-1])
    expected = dynamics.step_size * largest / (1 + dynamics.momentum)
    assert film.stability[-1] == pytest.approx(expected, rel=0.05)
    quiet = [work.watch_chain(faces, x, 1, False) for _ in range(2)]
    assert quiet[0].log_joint == quiet[1].log_joint != film.log_joint


def test_step_sizes_come_from_the_tuned_one_outwards_and_can_be_stopped(digits):
    stop = threading.Event()
    steps = work.step_sizes(digits, stop)
    found = [next(steps), next(steps)]
    stop.set()
    with pytest.raises(work.Stopped):
        list(steps)
    assert found[0].step_size == pytest.approx(digits.trained.dynamics.step_size)
    assert found[0].images.shape == (8, 1, 28, 28)
    assert found[0].ours < found[0].paper  # ours counts entropy that the paper's leaves out


def test_work_ends_when_nobody_listens():
    ended = threading.Event()

    def forever(tell):
        try:
            while True:
                tell(1)
        finally:
            ended.set()

    stream = work.as_it_goes(forever, threading.Event())
    assert next(stream) == 1
    stream.close()
    assert ended.wait(5)


def test_errors_of_work_reach_the_page():
    def broken(tell):
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        list(work.as_it_goes(broken, threading.Event()))


# --- what users bring ---------------------------------------------------------------------------------


def test_uploads_become_images_of_the_model():
    levels = np.zeros((40, 60, 3), np.uint8)
    levels[:, :, 0] = 255
    for shape in ((3, 32, 32), (1, 28, 28)):
        found = read_upload(png(Image.fromarray(levels)), shape)
        assert found.shape == (1, *shape)
        expected = [1, -1, -1] if shape[0] == 3 else [2 * 0.299 - 1]
        assert torch.allclose(found[0, :, 5, 5], torch.tensor(expected, dtype=torch.float), atol=0.01)
    deep = Image.fromarray(np.full((28, 28), 40000, np.uint16))
    assert float(read_upload(png(deep), (1, 28, 28)).mean()) == pytest.approx(2 * 40000 / 65535 - 1, abs=0.01)


def of_size(width, height):
    """The beginning of a PNG that says it is so large."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)) + b"\0\0\0\0IDAT"
    )


def wrong_uploads():
    moving = [Image.new("L", (20, 20), level) for level in (0, 128)]
    return {
        "text": (b"hello, this is no image", "not an image"),
        "empty": (b"", "not an image"),
        "cut off": (png(Image.effect_noise((300, 300), 90))[:500], "cannot be read"),
        "large": (b"\x89PNG" + b"0" * MOST_UPLOAD_BYTES, "bytes; images of up to"),
        "many pixels": (of_size(6000, 5000), "6000 x 5000 pixels"),
        "a bomb": (of_size(60000, 60000), "60000 x 60000 pixels|not an image"),
        "moving": (png(moving[0], format="GIF", save_all=True, append_images=moving[1:]), "2 frames"),
        "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
    }


@pytest.mark.parametrize("name", list(wrong_uploads()))
def test_wrong_uploads_get_a_sentence(name):
    content, message = wrong_uploads()[name]
    with pytest.raises(ValueError, match=message):
        read_upload(content, (3, 32, 32))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "not one of 2 x 2"), ("01", "not one of"), ("01x0", "not one of"), ([0, float("nan")], "not one of"),
        ("0000", "Nothing is hidden"), ("1111", "Everything is hidden"),
    ],
)  # fmt: skip
def test_wrong_masks_get_a_sentence(text, message):
    with pytest.raises(ValueError, match=message):
        hidden_places(text, (1, 2, 2))


def test_a_painted_mask_is_read_row_by_row():
    assert hidden_places("0100", (3, 2, 2))[0, 0].tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize("seed", [None, -1, 0.5, float("nan"), 2**40, "7"])
def test_wrong_seeds_get_a_sentence(seed):
    with pytest.raises(ValueError, match="The seed is"):
        whole_number(seed)


def test_names_that_are_not_on_show(digits, tmp_path):
    studio = Studio([digits], tmp_path, any_folder=False)
    with pytest.raises(ValueError, match="no model 'x' here; there are mnist-small"):
        studio.source("x")
    for chosen in (99, -1, "2"):
        with pytest.raises(ValueError, match="There is no image"):
            studio.image(digits, {"chosen": chosen}, None)
    with pytest.raises(ValueError, match=r"holds no metrics\.jsonl"):
        work.read_run(tmp_path)
    assert studio.folders() == []


def test_addresses():
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "0.0.0.0", "example.org")] == [True, True, False, False]


def test_the_command_names_what_is_wrong(capsys):
    from shortrun.cli import main

    for words, message in (
        (["studio", "nowhere"], "nowhere is neither"), (["studio", "--port", "0"], "port is 0; expected 1 to 65535"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
