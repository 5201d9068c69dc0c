"""What is tuned, and why: the free energy of short run inference against its step size, in one picture.

    python examples/tune_step_size.py --out demo

A linear-Gaussian model with 8 latents and K = 25 Langevin steps: the true KL divergence between what the
chains sample and the posterior is known in closed form here, so both estimates can be compared with it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure

import shortrun as sr


def problem(seed: int) -> tuple[sr.LinearGaussian, torch.Tensor]:
    """Eight latents seen through twelve noisy pixels, and 16 observations drawn from the model."""
    rng = torch.Generator().manual_seed(seed)
    scales = torch.linspace(0.3, 1.0, 8, dtype=torch.float64)
    weight = torch.randn(12, 8, generator=rng, dtype=torch.float64) * scales
    exact = sr.LinearGaussian(weight, 0.5)
    z = torch.randn(16, 8, generator=rng, dtype=torch.float64)
    noise = torch.randn(16, 12, generator=rng, dtype=torch.float64)
    return exact, z @ weight.T + 0.5 * noise


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the picture")
    parser.add_argument("--chains", type=int, default=32, help="per observation")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    begun = time.perf_counter()

    exact, x = problem(arguments.seed)
    dynamics = sr.Langevin(steps=25, step_size=0.01)
    step_sizes = torch.logspace(-3.3, -1.0, 24).tolist()
    curves = {
        entropy: sr.tune_by_grid(
            exact.model(),
            x,
            dynamics,
            step_sizes,
            sr.Estimation(entropy, chains=arguments.chains),
            rng=torch.Generator().manual_seed(arguments.seed),
        )
        for entropy in ("conditional", "marginal")
    }
    log_evidence = exact.log_evidence(x).mean()
    truth = torch.stack([exact.kl(x, sr.Langevin(25, s)).mean() for s in step_sizes])
    estimates = {name: curve.free_energy + log_evidence for name, curve in curves.items()}

    print("KL(short run || posterior) in nats = free energy + log p(x), mean of 16 observations, K = 25\n")
    print("   step s    delta    true KL    marginal  conditional   s*lambda_max")
    for i, s in enumerate(step_sizes):
        marks = [name for name, curve in curves.items() if curve.best == i]
        note = " <- " + " and ".join(marks) if marks else ""
        if curves["marginal"].ruled_out[i]:
            note = "    ruled out by the guard"
        print(
            f"{s:9.5f} {(2 * s) ** 0.5:8.4f} {truth[i]:10.4g} {estimates['marginal'][i]:11.4g} "
            f"{estimates['conditional'][i]:12.4g} {curves['marginal'].stability[i]:14.2f}{note}"
        )
    print()
    for name, curve in curves.items():
        print(
            f"{name:12s} chooses s = {step_sizes[curve.best]:.4f}: its true KL is {truth[curve.best]:.3f} "
            f"(the lowest is {truth.min():.3f})"
        )

    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "step_size.png"
    draw(step_sizes, truth, estimates, curves, path)
    print(f"\nwrote {path} in {time.perf_counter() - begun:.1f} s")


def draw(
    step_sizes: list[float],
    truth: torch.Tensor,
    estimates: dict[str, torch.Tensor],
    curves: dict[str, sr.TuneResult],
    path: Path,
) -> None:
    figure = Figure(figsize=(8.4, 5.0), layout="constrained")
    axes = figure.subplots()
    names = {"conditional": "conditional (the paper's)", "marginal": "marginal (the default here)"}
    colours = {"conditional": "#c44e52", "marginal": "#2a6fb0"}
    axes.plot(step_sizes, truth, color="black", linewidth=5, alpha=0.25, label="true KL (closed form)")
    for name, values in estimates.items():
        axes.plot(step_sizes, values, "o-", color=colours[name], markersize=3.5, linewidth=1.2, label=names[name])
    offsets = {"conditional": (-118, -46), "marginal": (-40, -62)}
    for name, curve in curves.items():
        s, kl = step_sizes[curve.best], float(truth[curve.best])
        axes.plot([s], [kl], "*", markersize=19, color=colours[name], markeredgecolor="white", zorder=5)
        axes.annotate(
            f"chosen by {name}\ns = {s:.4f}, true KL = {kl:.2f}",
            (s, kl),
            xytext=offsets[name],
            textcoords="offset points",
            color=colours[name],
            fontsize=9.5,
            arrowprops={"arrowstyle": "-", "color": colours[name], "linewidth": 0.8},
        )
    excluded = [s for s, out in zip(step_sizes, curves["marginal"].ruled_out, strict=True) if out]
    if excluded:
        axes.axvspan(min(excluded), max(step_sizes) * 1.1, color="0.88", zorder=0)
        middle = (min(excluded) * max(step_sizes)) ** 0.5
        limit = sr.Guard().limit
        axes.text(middle, 6.0, f"ruled out:\ns·λmax > {limit:g}\nor divergent", ha="center", fontsize=9.5)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(min(step_sizes) * 0.93, max(step_sizes) * 1.07)
    axes.set_ylim(0.02, 100)
    axes.set_xlabel("step size s   (drift s · gradient, noise √(2s))")
    axes.set_ylabel("KL(short run ‖ posterior), nats\n= free energy + log p(x)")
    axes.set_title("25 Langevin steps from the prior: which step size lands closest to the posterior?")
    axes.legend(loc="lower left", framealpha=1.0)
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
