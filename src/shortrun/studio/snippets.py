"""The Python and the command line that do what a button does."""

from __future__ import annotations

from typing import NamedTuple

from shortrun.studio.sources import IMAGES, SAMPLE_SEED, Source


class Snippet(NamedTuple):
    python: str
    shell: str


UPLOADED = "x = ...  # your image: float, shape (1, colours, height, width), in [-1, 1]"


def _begin(source: Source, chosen: int | None) -> str:
    """The model, and ``x``, the chosen image; None for one that was uploaded."""
    lines = ["import shortrun as sr", "", f"trained = sr.load({source.name!r})"]
    if chosen is None:
        lines.append(UPLOADED)
    else:
        lines += [_images(source), f"x = images[{chosen}:{chosen + 1}]"]
    return "\n".join(lines)


def _images(source: Source) -> str:
    if source.data is None:
        return f"images = trained.sample({IMAGES}, seed={SAMPLE_SEED})"
    options = "".join(
        f", {name}={value!r}" for name, value in (("size", source.data.size), ("crop", source.data.crop)) if value
    )
    return f'images = sr.data.load({source.data.data!r}, "test"{options}).batch(slice(0, {IMAGES}))'


def _data(source: Source) -> str:
    same = source.data is None or source.data.data == source.trained.info.get("data")
    return "" if same else f" --data {source.data.data}"  # type: ignore[union-attr]


def inpaint(source: Source, chosen: int | None, kind: str, seed: int, fills: int) -> Snippet:
    mask = "file:mask.png" if kind == "painted" else kind
    python = _begin(source, chosen) + f'\nmask = sr.make_mask("{mask}", x)'
    python += "  # black where it is hidden: the link below" if kind == "painted" else ""
    python += f"\nfills = trained.inpaint(x, mask, fills={fills}, seed={seed})[:, 0]\n"
    python += "mean, spread = fills.mean(0), fills.std(0)\n"
    count = 1 if chosen is None else chosen + 1
    shell = (
        f"shortrun inpaint {source.name}{_data(source)} --images {count} --mask {mask} --fills {fills} --out pictures"
    )
    return Snippet(python, shell)


def chain(source: Source, chosen: int | None, seed: int, noise: bool) -> Snippet:
    python = _begin(source, chosen) + "\nfrom dataclasses import replace\n\nimport torch\n"
    python += "from shortrun.core.langevin import infer_with_diagnostics\n\n"
    python += f"dynamics = replace(trained.dynamics, noise={noise})\n"
    python += "z, log = infer_with_diagnostics(\n"
    python += f"    trained.model, x, dynamics, rng=torch.Generator().manual_seed({seed}),\n"
    python += "    watch=lambda k, z, log_joint: print(k, float(log_joint)),\n)\n"
    python += "image = trained.decode(z)\n"
    return Snippet(python, f"shortrun reconstruct {source.name}{_data(source)} --seed {seed} --out pictures")


def step_sizes(source: Source) -> Snippet:
    python = _begin(source, 0).rsplit("\n", 1)[0] + "\n"
    python += "for entropy in ('marginal', 'conditional'):  # ours, the paper's\n"
    python += "    how = sr.Estimation(entropy=entropy, estimator='endpoint', chains=4)\n"
    python += "    print(trained.tune(images[:4], how=how))\n"
    return Snippet(
        python, f"shortrun tune {source.name}{_data(source)} --images 4 --entropy conditional --out pictures"
    )


def layers(source: Source, chosen: int | None, seed: int, sampled: bool) -> Snippet:
    if sampled:
        python = "import shortrun as sr\nimport torch\n\n" + f"trained = sr.load({source.name!r})\n"
        python += f"z = trained.sample_latents(1, torch.Generator().manual_seed({seed}))\n"
    else:
        python = _begin(source, chosen) + f'\nz = trained.infer(x, by="centre", seed={seed})\n'
    python += f"rows = [trained.traverse(z, layer, 7, seed={seed + 1})[:, 0] for layer in range(len(z))]\n"
    return Snippet(python, f"shortrun traverse {source.name}{_data(source)} --seed {seed} --out pictures")


def interpolate(source: Source, chosen: int | None, last: int) -> Snippet:
    python = _begin(source, chosen)
    python += f'\na, b = (trained.infer(each, by="centre", seed=0) for each in (x, images[{last}:{last + 1}]))\n'
    python += "row = trained.interpolate(a, b, 10)[:, 0]\n"
    return Snippet(python, f"shortrun interpolate {source.name}{_data(source)} --out pictures")


def samples(source: Source, seed: int, count: int) -> Snippet:
    python = f"import shortrun as sr\n\ntrained = sr.load({source.name!r})\n"
    python += f"learned = trained.sample({count}, seed={seed})\n"
    python += f'normal = trained.sample({count}, prior="normal", seed={seed})\n'
    return Snippet(python, f"shortrun sample {source.name} --images {count} --seed {seed} --out pictures")


def compare(source: Source, chosen: int | None, kind: str, seed: int) -> Snippet:
    mask = "file:mask.png" if kind == "painted" else kind
    python = _begin(source, chosen) + f'\nmask = sr.make_mask("{mask}", x)\n'
    python += f"made = trained.reconstruct(x, seed={seed})\n"
    python += f"fills = trained.inpaint(x, mask, 4, seed={seed})[:, 0]\n"
    data = source.trained.info.get("data", "embedded")
    return Snippet(python, f"shortrun compare --data {data} --minutes 2 --out runs/compare")


def run(folder: str) -> Snippet:
    python = "import shortrun as sr\n\n" + f"trained = sr.load({folder!r})\n" + "trained.history.plot('curves.png')\n"
    return Snippet(python, f"shortrun resume {folder} --minutes 10")
