"""Answers of a reproduction: when they are decided, and what curves say at equal cost."""

import json

import pytest

from shortrun.studies.reproduce import published as pub
from shortrun.studies.reproduce import questions
from shortrun.studies.reproduce.claims import Row
from shortrun.studies.reproduce.place import Place
from shortrun.studies.reproduce.questions import HELD, NOT_HELD, UNDECIDED, Known

NIGHT = pub.SCALES["night"]


@pytest.fixture
def here(tmp_path):
    return Place(tmp_path / "out", tmp_path / "runs", "night", NIGHT, jobs=2)


def row(training, curve=(), **measured):
    return Row(pub.Cell("table", "", "", training, {}), {"measured": measured, "curve": list(curve)}, training)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        ([0.8], [1.0], HELD),  # one seed decides from 15 % on,
        ([0.9], [1.0], UNDECIDED),  # and not below
        ([1.0], [0.8], NOT_HELD),
        ([0.9, 0.8], [1.0, 0.81], UNDECIDED),
        ([0.97, 0.98, 0.99], [1.0, 1.01, 1.02], HELD),  # three seeds that agree do
        ([0.97, 0.98, 1.005], [1.0, 1.01, 1.02], UNDECIDED),
        ([1.1, 1.2, 1.3], [0.7, 0.8, 1.0], NOT_HELD),
    ],
)
def test_one_seed_decides_what_is_far_apart_three_what_is_close(low, high, verdict):
    assert questions.below(low, high) == verdict


def test_a_claim_of_several_steps_holds_if_each_does():
    assert questions.together([HELD, HELD]) == HELD
    assert questions.together([HELD, UNDECIDED]) == UNDECIDED
    assert questions.together([UNDECIDED, NOT_HELD, HELD]) == NOT_HELD


def test_curves_are_read_between_their_points():
    curve = [{"updates": 10, "mse": 4.0}, {"updates": 20, "mse": None}, {"updates": 30, "mse": 2.0}]
    assert [questions.at(curve, "updates", spent, "mse") for spent in (5, 10, 25, 30, 99)] == [4.0, 4.0, 2.5, 2.0, 2.0]


def test_falling_needs_all_layers(here):
    models = [row(pub.Training("svhn", layers=n), mse=error) for n, error in ((1, 0.03), (3, 0.02))]
    assert questions.falling(Known(models, here)) == []
    for last, verdict in ((0.01, HELD), (0.019, UNDECIDED), (0.04, NOT_HELD)):
        (answer,) = questions.falling(Known([*models, row(pub.Training("svhn", layers=5), mse=last)], here))
        assert answer.verdict == verdict
        assert answer.evidence == f"0.0300, 0.0200, {last:.4f}"


def test_methods_are_compared_at_equal_cost(here):
    """Ours learns more from each image and less from each second; the curves say so."""
    ours = [
        {"seconds": 60 * k, "updates": 180 * k, "images": 640 * k, "mse": 1 / k, "mse_centre": 1 / k} for k in (1, 2, 4)
    ]
    theirs = [
        {"seconds": 60 * k, "updates": 800 * k, "images": 51_200 * k, "mse": 0.5 / k, "mse_centre": 0.5 / k}
        for k in (1, 2, 4)
    ]
    pairs = (("short-run", ours), ("ladder-vae", theirs))
    known = Known([row(pub.Training("svhn", method), curve) for method, curve in pairs], here)
    verdicts = {answer.claim: answer.verdict for answer in questions.ahead_of_ladder(known)}
    assert [verdicts[f"svhn, L = 3: lower MSE of draws at equal {what}"] for what in (
        "time (240)", "updates (720)", "images seen (2,560)", "passes through the generator (68,480)")
    ] == [NOT_HELD, HELD, HELD, HELD]  # fmt: skip


def test_additions_are_left_out_in_turn(here):
    def seeds(without, errors):
        return [row(pub.Training("svhn", seed=i, without=without, half=True), mse=e) for i, e in enumerate(errors)]

    rows = [*seeds(None, (0.010, 0.011, 0.012)), *seeds("along", (0.02, 0.03, 0.04)), *seeds("momentum", (0.011,) * 3)]
    verdicts = [
        (answer.claim.split(":")[1].split()[0], answer.verdict) for answer in questions.additions(Known(rows, here))
    ]
    assert verdicts == [("updates", HELD), ("steps", UNDECIDED)]
    assert pub.Training("svhn", without="along").config(NIGHT, None).settings.learn_last == 1
    assert pub.Training("svhn", without="marginal").config(NIGHT, None).settings.entropy == "conditional"
    assert pub.Training("svhn", without="momentum").config(NIGHT, None).settings.momentum == 0


def test_the_night_says_what_it_leaves_out_and_measures_processor_time(here):
    names = {cell.name for cell in here.cells}
    assert "table-1/short-run_L=5/svhn" in names
    assert not any("equal_updates" in name or name.startswith("table-K") for name in names)
    assert here.threads == here.budget["threads"] == 1
    large = here.config(pub.Training("celeba", size=64)).run
    assert (large.minutes, large.clock) == (40.0, "processor")
    assert here.config(pub.Training("celeba", half=True)).run.minutes == 10.0
    hours = sum(here.config(model).run.minutes for model in here.planned) / 60
    assert 12 < hours < 16  # on two cores, with the features of FID, six to eight


def test_layers_are_judged_by_their_shares(here):
    here.out.mkdir()
    assert questions.controlling(here) == []
    factors = ("digit", "style", "position", "background")
    shares = [dict.fromkeys(factors, share) for share in (0.9, 0.5, 0.1)]
    here.drawn("figure-hierarchy").write_text(json.dumps({"shares": {pub.SCENES.name: shares}}))
    assert [answer.verdict for answer in questions.controlling(here)] == [NOT_HELD, NOT_HELD, HELD, HELD]
