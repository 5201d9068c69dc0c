"""Bad input, a share of the campaign of benchmarks/faults.py: one case for each cause that was found and mended.

Each runs in a process of its own. A case that is refused must say why in one message that names what is wrong, write
nothing, and run nothing; one that is unusual but valid must be read right.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from scripts import load_script

FOLDER = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(FOLDER))
FAULTS = load_script(FOLDER / "faults.py")

CAUSES = {
    "images": [
        "16-bit PNG, first", "16-bit PNG, last", "float TIFF in [0, 1]", "float TIFF with NaN", "float TIFF up to 255",
        "transparent white, first", "grey first, colour last", "colour first, grey last", "an image bomb",
        "fifo named a.png", "/dev/zero named a.png", "loop named a.png", "cut in the middle among good ones",
        "a corrupt jpeg among good ones", "CMYK", "smaller than the crop", "large named a.png",
    ],
    "zip": ["a corrupt stream", "an unknown compression", "encrypted", "cut in half", "a member of 600 MB"],
    "npz": ["a header of 9 TB", "objects with code", "float64 numbers", "one image", "a header with code"],
    "mat": ["float64 numbers", "NaN", "int32 numbers", "shape (32, 32, 3)", "cut off", "text"],
    "idx": ["a corrupt stream", "sizes that overflow, plain", "fewer images than it says, gz", "no images, plain"],
    "celeba": ["no columns", "bytes that are no text"],
    "models": [
        "kind is evil:Thing", "kind is os:abort", "own decoder is evil:Thing", "its data are folder:/etc",
        "a thousand million steps", "channels of a million", "images of 100,000 x 100,000", "weights of NaN",
        "config.json is a list", "the weights are empty", "dynamics is None", "a prior of other size", "no weights",
        "a weight is missing", "shape is -1", "a prior of size 1e12", "config.json is deep",
    ],
    "runs": [
        "as it is", "another seed", "a decoder with code", "config.yaml is an object", "config.yaml is cut off",
        "no checkpoints", "a half line at the end of its metrics", "the newest checkpoint is cut off",
        "the newest checkpoint is without optimiser slots", "all checkpoints are with weights of NaN",
        "batch is 'x'", "method is 3", "resume for no iterations", "train into a folder with a run",
    ],
    "flags": [
        "train --checkpoint-every 'nan'", "train --anneal 'nan'", "train --warm-up '-5'", "train --mask 'lower'",
        "train --mask 'blocks:3:-1'", "train --mask 'random:0'", "train --data 'mnist:x'", "train --crop '0'",
        "train --seed '99999999999999999999999'", "train --batch '100000000000000'",
        "evaluate --likelihood-images '-1'",
        "evaluate --stages '-1'", "sample --images '0'", "inpaint --fills '0'", "interpolate --images '1'",
        "traverse --amount 'nan'", "prior --save '/proc/nowhere'", "train glow --model.levels '9'",
        "fid --samples '1'", "tune --deltas '0'",
    ],
    "python": [
        "fit with iterations='x'", "fit with config=3", "fit with validation of another width",
        "fit of a decoder alone",
        "fit with network=3", "fit with callback=3", "GaussianModel with shapes of text", "infer with dynamics 0.1",
        "infer with a start of another shape", "inpaint with a mask of another shape", "inpaint without a mask",
        "decode other sizes", "decode a list", "interpolate in 0 steps", "log_likelihood with -1 stages",
        "reconstruct levels 0 to 255 as floats", "traverse by NaN", "fit on NaN", "load('nowhere')",
    ],
}  # fmt: skip
SLOW = ("flags", "python", "runs", "models", "images", "zip")


def cases():
    from bad_input import all_cases

    found = {(case.group, case.name): case for case in all_cases()}
    for group, names in CAUSES.items():
        marks = pytest.mark.slow if group in SLOW else ()
        for name in names:
            yield pytest.param(found[group, name], id=f"{group}: {name}", marks=marks)


@pytest.mark.parametrize("case", list(cases()))
def test_a_fault(case):
    outcome = FAULTS.run(replace(case, seconds=3 * case.seconds))  # other tests run beside it
    assert outcome.kind in FAULTS.GOOD, outcome.message


def test_the_campaign_tells_what_it_sees(tmp_path):
    """Its judge is not blind: a traceback, code that ran, what was left behind and what was accepted are told apart."""
    from bad_input.case import CANARY, Case

    def left(folder):
        Path("out").mkdir()
        raise ValueError("bad")

    kinds = {
        "traceback": lambda: [][1], "executed": lambda: Path(CANARY).touch(), "accepted": lambda: None,
        "left behind": lambda: left(None), "died": lambda: __import__("os").abort(),
        "hung": lambda: __import__("time").sleep(9),
    }  # fmt: skip
    for kind, function in kinds.items():
        assert FAULTS.run(Case("x", kind, function, seconds=1.0)).kind == kind

    def refuse(text):
        raise ValueError(text)

    assert FAULTS.run(Case("x", "x", lambda: refuse("size is 3"), names=("size",))).kind == "refused"
    assert FAULTS.run(Case("x", "x", lambda: refuse("axes do not match"), names=("size",))).kind == "unclear"


@pytest.mark.slow
def test_killed_runs_go_on_to_the_bit():
    from bad_input import kills

    found = kills(4, seed=1)
    assert found["kills"] == found["to the bit"] == 4
