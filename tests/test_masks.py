"""Masks hide what their names say, for images, signals and vectors."""

import numpy as np
import pytest
import torch
from PIL import Image

from shortrun.masks import make_mask


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("lower-half", 0.5),
        ("left-half", 0.5),
        ("random:0.3", 0.3),
        ("blocks:7:1", 1 - 49 / 784),
        ("box:0,0,14,28", 0.5),
    ],
)
@pytest.mark.parametrize("colours", [1, 3])
def test_masks_hide_what_they_say(kind, share, colours):
    mask = make_mask(kind, torch.zeros(50, colours, 28, 28))
    assert mask.shape == (50, 1, 28, 28)
    assert mask.dtype == torch.bool
    assert float(mask.float().mean()) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(
    ("kind", "visible"),
    [
        ("lower-half", (slice(0, 2), slice(None))),
        ("upper-half", (slice(2, None), slice(None))),
        ("left-half", (slice(None), slice(3, None))),
        ("right-half", (slice(None), slice(0, 3))),
    ],
)
def test_halves_of_images(kind, visible):
    expected = torch.zeros(4, 6, dtype=torch.bool)
    expected[visible] = True
    for mask in make_mask(kind, torch.zeros(2, 3, 4, 6)):
        assert torch.equal(mask[0], expected)


def test_boxes_and_blocks_are_where_they_should_be(rng):
    mask = make_mask("box:1,2,3,4", torch.zeros(2, 1, 8, 9))
    hidden = torch.zeros(8, 9, dtype=torch.bool)
    hidden[1:4, 2:6] = True
    assert torch.equal(~mask[1, 0], hidden)
    blocks = make_mask("blocks:3:2", torch.zeros(40, 1, 8, 9), rng)
    counts = (~blocks).sum((1, 2, 3))
    assert counts.min() >= 9
    assert counts.max() == 18  # where the two do not overlap
    assert len(blocks.flatten(1).unique(dim=0)) > 30


@pytest.mark.parametrize("shape", [(200, 9), (200, 2, 9)])
def test_vectors_and_signals(shape, rng):
    like = torch.zeros(shape)
    expected_shape = (200, 9) if len(shape) == 2 else (200, 1, 9)
    left, right = make_mask("left-half", like), make_mask("right-half", like)
    assert left.shape == right.shape == expected_shape
    assert left.reshape(200, 9)[7].tolist() == 4 * [False] + 5 * [True]
    assert torch.equal(left, ~right)
    random = make_mask("random:0.8", like, rng)
    assert random.shape == expected_shape
    assert float(random.float().mean()) == pytest.approx(0.8, abs=0.03)
    assert random.float().var(0).min() > 0.05  # examples differ, at each place
    assert (random & like.bool()).shape == like.shape  # it broadcasts


@pytest.mark.parametrize("shape", [(2, 9), (2, 3, 9)])
@pytest.mark.parametrize("kind", ["lower-half", "upper-half", "blocks:2:1", "box:0,0,1,1", "file:mask.png", "spiral"])
def test_kinds_that_need_images_say_so(shape, kind):
    with pytest.raises(ValueError, match=r"are not images\); accepted: left-half, right-half or random") as caught:
        make_mask(kind, torch.zeros(shape))
    assert str(caught.value).startswith(f"mask is {kind!r}")


def test_random_masks_repeat_with_the_seed():
    like = torch.zeros(3, 1, 6, 6)
    for kind in ("random:0.5", "blocks:2:2"):
        first, second, other = (make_mask(kind, like, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
        assert torch.equal(first, second)
        assert torch.equal(first, make_mask(kind, like))  # seed 0 by default
        assert not torch.equal(first, other)


def test_mask_from_a_file(tmp_path):
    picture = np.full((56, 56), 255, np.uint8)
    picture[:28] = 0
    Image.fromarray(picture).save(tmp_path / "mask.png")
    mask = make_mask(f"file:{tmp_path / 'mask.png'}", torch.zeros(2, 1, 28, 28))
    assert mask.shape == (2, 1, 28, 28)
    assert not mask[:, 0, :14].any()
    assert mask[:, 0, 14:].all()
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(ValueError, match="is not a readable image"):
        make_mask(f"file:{tmp_path / 'text.png'}", torch.zeros(2, 1, 28, 28))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("spiral", "unknown kind"),
        ("", "unknown kind"),
        ("left-half:3", "a half has no number"),
        ("random:1.5", "above 0 and at most 1"),
        ("random:much", "could not convert"),
        ("random:nan", "above 0 and at most 1"),
        ("blocks:9:1", "blocks of 9 do not fit"),
        ("blocks:2", "not enough values"),
        ("box:0,0,99,2", "must lie within 8x8"),
        ("box:0,0,0,2", "must lie within 8x8"),
        ("file:nowhere.png", r"nowhere\.png does not exist"),
    ],
)
def test_what_is_wrong_is_named(kind, message):
    with pytest.raises(ValueError, match=message) as caught:
        make_mask(kind, torch.zeros(2, 1, 8, 8))
    assert "accepted: lower-half" in str(caught.value)


def test_data_without_a_mask():
    with pytest.raises(ValueError, match=r"data of shape \(4,\); expected \(n, colours, height, width\)"):
        make_mask("random", torch.zeros(4))
