"""The Python interface, with arguments that make no sense."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bad_input.case import MODEL, Case


def python_cases() -> Iterator[Case]:
    import numpy as np
    import torch

    import shortrun as sr

    def case(name: str, function: Callable[[], Any], *names: str) -> Case:
        return Case("python", name, function, names=names)

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = torch.nn.Linear(2, 5)

        def forward(self, z: Any) -> Any:
            return self.out(z[0])

    def model(sigma: float = 0.3) -> Any:
        return sr.GaussianModel(Decoder(), [(2,)], sigma)

    def fit(data: Any = None, given: Any = None, **options: Any) -> Callable[[], Any]:
        def run() -> Any:
            x = torch.randn(20, 5) if data is None else data
            return sr.fit(model() if given is None else given, x, **{"iterations": 2, "quiet": True, **options})

        return run

    bad_data = {
        "a list": [1, 2],
        "a string": "mnist",
        "a number": 3,
        "None": object(),
        "an empty tensor": torch.zeros(0, 5),
        "a scalar": torch.tensor(1.0),
        "NaN": torch.full((20, 5), float("nan")),
        "another width": torch.zeros(20, 6),
        "complex numbers": torch.zeros(20, 5, dtype=torch.complex64),
        "objects": np.array([object()] * 3),
        "ragged rows": np.array([[1.0], [1.0, 2.0]], dtype=object),
        "strings": np.array(["a", "b"]),
        "infinity": np.full((20, 5), np.inf),
        "a dictionary": {"x": 1},
        "a sparse tensor": torch.eye(5).to_sparse(),
        "no columns": torch.zeros(20, 0),
    }
    for name, data in bad_data.items():
        yield case(f"fit on {name}", fit(data), "data", "given in Python", "shape", "list", "type")
    for name, options in {
        "iterations=0": {"iterations": 0},
        "iterations=-1": {"iterations": -1},
        "iterations='x'": {"iterations": "x"},
        "iterations=1.5": {"iterations": 1.5},
        "minutes=nan": {"minutes": float("nan")},
        "minutes='x'": {"minutes": "x"},
        "batch=0": {"batch": 0},
        "batch='x'": {"batch": "x"},
        "batch=1.5": {"batch": 1.5},
        "steps=-1": {"steps": -1},
        "steps=None": {"steps": None},
        "step_size=0": {"step_size": 0.0},
        "step_size=nan": {"step_size": float("nan")},
        "learning_rates=()": {"learning_rates": ()},
        "learning_rates=1e-3": {"learning_rates": 1e-3},
        "learning_rates=(nan,)": {"learning_rates": (float("nan"),)},
        "betas=(2, 2)": {"betas": (2.0, 2.0)},
        "sigma=0.3": {"sigma": 0.3},
        "sigma=(0, 0)": {"sigma": (0.0, 0.0)},
        "method='x'": {"method": "x"},
        "method=None": {"method": None},
        "no_such=1": {"no_such": 1},
        "mask='x'": {"mask": "x"},
        "mask=3": {"mask": 3},
        "prior='x'": {"prior": "x"},
        "warm_up=-5": {"warm_up": -5},
        "seed='x'": {"seed": "x"},
        "resume without a folder": {"resume": True},
        "resume nothing": {"resume": True, "folder": "nowhere"},
        "network=3": {"network": 3},
        "network={'no': 1}": {"network": {"no": 1}},
        "order='x'": {"order": "x"},
        "callback=3": {"callback": 3},
        "validation of another width": {"validation": torch.zeros(9, 6)},
        "evaluate_every=0": {"evaluate_every": 0.0},
        "checkpoint_every=nan": {"checkpoint_every": float("nan")},
        "tune='x'": {"tune": "x"},
        "config=3": {"config": 3},
        "folder=3": {"folder": 3},
    }.items():
        word = name.split("=")[0].split()[0]
        yield case(f"fit with {name}", fit(**options), word, "run folder")
    for name, given in {
        "a function": lambda z: z,
        "a decoder alone": Decoder(),
        "a number": 3,
        "a class": Decoder,
    }.items():
        yield case(f"fit of {name}", fit(given=given), "model", "decode", "log_")
    yield case("GaussianModel with sigma 0", lambda: model(0.0), "sigma")
    yield case("GaussianModel with sigma nan", lambda: model(float("nan")), "sigma")
    yield case("GaussianModel without shapes", lambda: sr.GaussianModel(Decoder(), []), "latent")
    yield case("GaussianModel with a shape of zero", lambda: sr.GaussianModel(Decoder(), [(0,)]), "latent")
    yield case("GaussianModel with shapes of text", lambda: sr.GaussianModel(Decoder(), ["x"]), "latent")
    for name, values in {
        "no steps": (-1, 0.1),
        "steps of text": ("x", 0.1),
        "a negative step": (5, -0.1),
        "a step of NaN": (5, float("nan")),
        "an infinite step": (5, float("inf")),
        "too few steps": (5, [0.1, 0.1]),
        "a step of text": (5, "x"),
    }.items():
        yield case(f"Langevin with {name}", lambda values=values: sr.Langevin(*values), "step")
    ok = sr.Langevin(3, 0.01)
    x = torch.zeros(2, 5)
    yield case("infer from another width", lambda: sr.infer(model(), torch.zeros(2, 6), ok), "shape", "6")
    yield case("infer from NaN", lambda: sr.infer(model(), x * float("nan"), ok), "nan", "finite")
    yield case("infer from a list", lambda: sr.infer(model(), [1.0], ok), "list", "tensor")
    yield case(
        "infer with a mask of another shape", lambda: sr.infer(model(), x, ok, mask=torch.ones(2, 9) > 0), "mask"
    )
    yield case("infer with a mask of numbers", lambda: sr.infer(model(), x, ok, mask=torch.full((2, 5), 0.5)), "mask")
    yield case(
        "infer with a start of another shape", lambda: sr.infer(model(), x, ok, start=(torch.zeros(2, 9),)), "start"
    )
    yield case("infer with dynamics 0.1", lambda: sr.infer(model(), x, 0.1), "dynamics", "Langevin")

    def trained() -> Any:
        return sr.load(MODEL)

    image = torch.zeros(2, 1, 28, 28)
    for name, call in {
        "sample(0)": lambda: trained().sample(0),
        "sample(-1)": lambda: trained().sample(-1),
        "sample(1.5)": lambda: trained().sample(1.5),
        "sample('x')": lambda: trained().sample("x"),
        "sample(prior='x')": lambda: trained().sample(2, prior="x"),
        "reconstruct another shape": lambda: trained().reconstruct(torch.zeros(2, 3, 32, 32)),
        "reconstruct NaN": lambda: trained().reconstruct(image * float("nan")),
        "reconstruct a list": lambda: trained().reconstruct([1]),
        "reconstruct nothing": lambda: trained().reconstruct(image[:0]),
        "reconstruct levels 0 to 255 as floats": lambda: trained().reconstruct(image + 255.0),
        "reconstruct by 'x'": lambda: trained().reconstruct(image, by="x"),
        "reconstruct with 0 steps": lambda: trained().reconstruct(image, steps=0),
        "inpaint with 0 fills": lambda: trained().inpaint(image, image > -1, 0),
        "inpaint with a mask of another shape": lambda: trained().inpaint(image, torch.ones(2, 1, 9, 9) > 0),
        "inpaint with a mask of numbers": lambda: trained().inpaint(image, image + 0.5),
        "inpaint without a mask": lambda: trained().inpaint(image, None),
        "decode a list": lambda: trained().decode([1]),
        "decode other sizes": lambda: trained().decode((torch.zeros(1, 3),)),
        "traverse layer 9": lambda: trained().traverse(trained().infer(image), 9),
        "traverse layer 'x'": lambda: trained().traverse(trained().infer(image), "x"),
        "traverse by NaN": lambda: trained().traverse(trained().infer(image), 0, amount=float("nan")),
        "interpolate to other sizes": lambda: trained().interpolate(trained().infer(image), (torch.zeros(2, 3),)),
        "interpolate in 0 steps": lambda: trained().interpolate(trained().infer(image), trained().infer(image), 0),
        "save into a file": lambda: (Path("file").touch(), trained().save("file")),
        "fit_prior 'x'": lambda: trained().fit_prior(image, "x"),
        "fit_prior to one image": lambda: trained().fit_prior(image[:1], "mixture"),
        "log_likelihood with -1 stages": lambda: trained().log_likelihood(image, stages=-1),
        "tune with a step of 0": lambda: trained().tune(image, [0.0]),
        "load('nowhere')": lambda: sr.load("nowhere"),
        "load(3)": lambda: sr.load(3),
        "load('')": lambda: sr.load(""),
    }.items():
        yield case(name, call)
    for name in ("no-such", "", "mnist:x", "scenes:-1", "embedded:1"):
        yield case(f"data.load({name!r})", lambda name=name: sr.data.load(name), "data")
    yield case("data.load split", lambda: sr.data.load("embedded", "validation"), "split")
    yield case("data.load size 0", lambda: sr.data.load("embedded", size=0), "size")
    yield case("data.load limit -1", lambda: sr.data.load("embedded", limit=-1), "limit")
