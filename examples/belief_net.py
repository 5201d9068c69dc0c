r"""A deep belief net with 240 latents in four layers, inferred and learned without an encoder.

    python examples/belief_net.py [--out demo] [--minutes 1] [--seed 0]

The net is a graph in which each node is a latent variable, the cause of all nodes in the layers below it, with binary
pixels at the bottom:

.. math:: z_4 \sim N(0, I), \qquad z_l = W_l \tanh(z_4, \ldots, z_{l+1}) + b_l + s_l\, \epsilon_l, \qquad
          x_i \sim \mathrm{Bernoulli}(\mathrm{sigmoid}(W_0 \tanh(z_4, \ldots, z_1) + b_0)_i) .

An encoder for it would have to be designed along the same graph, upwards. Short run inference needs only the graph
itself, as a function of the noises ``(z_4, eps_3, eps_2, eps_1)``, all N(0, 1) a priori: in these coordinates every
node is free to move, where the z_l themselves are tied together by small s_l. Weights, biases and s_l are learned from
4,500 binary digits.

It prints log p(x) per held-out digit by annealed importance sampling, before and after learning, beside that of
independent pixels, of a net with one layer of latents, and of the same net with noise at its top layer alone; and draws
what the net makes of held-out digits.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shortrun as sr
from shortrun.pictures import save_grid

SIDE = 14
SIZES = (16, 32, 64, 128)


class BeliefNet(nn.Module):
    """From noises, top layer first, to the logits of the pixels; ``noisy`` is false for noise at the top alone."""

    def __init__(self, sizes: tuple[int, ...], noisy: bool = True) -> None:
        super().__init__()
        self.noisy, below = noisy, [*sizes[1:], SIDE**2]
        self.links = nn.ModuleList(nn.Linear(sum(sizes[: i + 1]), size) for i, size in enumerate(below))
        self.log_scales = nn.ParameterList(torch.full((size,), math.log(0.5)) for size in sizes[1:])

    def latents(self, noises: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """``(z_L, ..., z_1)``."""
        z = [noises[0]]
        for link, log_scale, noise in zip(self.links[:-1], self.log_scales, noises[1:], strict=True):
            z.append(link(torch.tanh(torch.cat(z, 1))) + self.noisy * log_scale.exp() * noise)
        return tuple(z)

    def forward(self, noises: tuple[Tensor, ...]) -> Tensor:
        return self.links[-1](torch.tanh(torch.cat(self.latents(noises), 1))).view(-1, 1, SIDE, SIDE)


def digits(split: str) -> Tensor:
    """Binary digits of 14 x 14 pixels."""
    return (F.avg_pool2d(sr.data.load("embedded", split).batch(slice(None)), 2) > 0).float()


def learn(sizes: tuple[int, ...], x: Tensor, minutes: float, seed: int, noisy: bool = True) -> sr.Trained:
    torch.manual_seed(seed)
    model = sr.BernoulliModel(BeliefNet(sizes, noisy), latent_shapes=[(size,) for size in sizes])
    return sr.fit(model, x, minutes=minutes, seed=seed, batch=50, step_size=0.06)


def independent_pixels(seen: Tensor, x: Tensor) -> float:
    """log p(x) per digit if each pixel is on with its frequency in training."""
    frequency = (seen.sum(0) + 1) / (len(seen) + 2)
    return float(torch.distributions.Bernoulli(frequency).log_prob(x).sum((1, 2, 3)).mean())


def main(words: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for belief_net.png")
    parser.add_argument("--minutes", type=float, default=1.0, help="training time of each of the three nets")
    parser.add_argument("--images", type=int, default=200, help="held-out digits for log p(x)")
    parser.add_argument("--stages", type=int, default=200, help="of annealed importance sampling")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    seen, held_out = digits("train"), digits("test")
    x = held_out[: arguments.images]

    def log_p(trained: sr.Trained) -> float:
        return trained.log_likelihood(x, stages=arguments.stages)["annealed"]

    minutes, seed = arguments.minutes, arguments.seed
    found = {"independent pixels": independent_pixels(seen, x)}
    found["four layers, before learning"] = log_p(learn(SIZES, seen, 1e-6, seed))
    found["one layer of 240 latents"] = log_p(learn((sum(SIZES),), seen, minutes, seed))
    found["four layers, noise at the top alone"] = log_p(learn(SIZES, seen, minutes, seed, noisy=False))
    trained = learn(SIZES, seen, minutes, seed)
    found["four layers, each node a latent"] = log_p(trained)
    print(f"log p(x) in nats per held-out digit, {len(x)} digits, {minutes:g} minutes, seed {seed}")
    for name, value in found.items():
        print(f"  {name:36s} {value:8.1f}")

    shown = held_out[:10]
    mask = sr.make_mask("lower-half", shown)
    fills = trained.inpaint(shown, mask, fills=2)
    noises = tuple(layer[:10] for layer in trained.infer(shown, quiet_steps=10))
    rows = [("held out", shown), ("reconstruction", trained.decode(noises)), ("visible", torch.where(mask, shown, 0.5))]
    rows += [(f"fill {i + 1}", fill) for i, fill in enumerate(fills)]
    rows += [("sample" if i == 0 else "", part) for i, part in enumerate(trained.sample(30).split(10))]
    for layer in range(4):
        rows.append((f"only z_{4 - layer} drawn again", trained.traverse(noises, layer, 1)[0]))
    path = arguments.out / "belief_net.png"
    save_grid(path, [(label, 1 - 2 * images) for label, images in rows], "a belief net without an encoder")
    print(f"wrote {path}")
    return found


if __name__ == "__main__":
    main()
