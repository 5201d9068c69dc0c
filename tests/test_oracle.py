"""The tuner against brute force: the true KL of every candidate, by quadrature, on nonlinear models."""

import math

import pytest
import torch
from problems import FAMILY_EXAMPLES, PROBLEMS, Oracle, family_member

import shortrun as sr
from shortrun import Estimation

EXAMPLES = 6


def test_quadrature_reproduces_the_closed_form():
    for weight in ([[1.5]], [[1.0, 0.4], [-0.3, 0.8]]):
        exact = sr.LinearGaussian(torch.tensor(weight, dtype=torch.float64), 0.5)
        x = torch.full((1, len(weight)), 0.7, dtype=torch.float64)
        oracle = Oracle(exact.model(), x)
        assert abs(oracle.log_evidence - exact.log_evidence(x)) < 1e-9
        for s in (0.012, 0.05):
            expected = float(exact.kl(x, sr.Langevin(25, s)))
            assert abs(oracle.kl(s, 25) - expected) < 1e-5


@pytest.mark.parametrize(
    "problem",
    [pytest.param(p, marks=pytest.mark.slow if p.dimension == 2 else (), id=p.name) for p in PROBLEMS],
)
def test_marginal_choice_is_near_the_lowest_true_kl(problem, capsys):
    model = problem.model()
    x = problem.data(EXAMPLES)
    oracles = [Oracle(model, x[i : i + 1]) for i in range(EXAMPLES)]
    truth = [sum(o.kl(s, problem.steps) for o in oracles) / EXAMPLES for s in problem.step_sizes]
    lowest = min(truth)
    log_evidence = sum(float(o.log_evidence) for o in oracles) / EXAMPLES
    results = {
        entropy: sr.tune_by_grid(
            model,
            x,
            sr.Langevin(problem.steps, 0.01),
            problem.step_sizes,
            Estimation(entropy, chains=512),
            rng=torch.Generator().manual_seed(0),
        )
        for entropy in ("marginal", "conditional")
    }
    with capsys.disabled():
        print(f"\n{problem.name}: K = {problem.steps}\n        s  true KL  marginal  conditional")
        for i, s in enumerate(problem.step_sizes):
            if truth[i] == math.inf:
                break
            row = [float(results[e].free_energy[i]) + log_evidence for e in results]
            marks = [" <" if results[e].best == i else "  " for e in results]
            print(f"{s:9.4f} {truth[i]:8.4f} {row[0]:8.4f}{marks[0]} {row[1]:9.4f}{marks[1]}")
        ratios = {entropy: truth[r.best] / lowest for entropy, r in results.items()}
        print("  true KL of the choice / lowest:", {k: round(v, 2) for k, v in ratios.items()})
    assert ratios["marginal"] <= 1.25
    assert ratios["conditional"] >= ratios["marginal"]


def true_kl(problem, x):
    """Mean true KL for each step size of the problem."""
    model = problem.model()
    oracles = [Oracle(model, x[i : i + 1]) for i in range(len(x))]
    return [sum(oracle.kl(s, problem.steps) for oracle in oracles) / len(x) for s in problem.step_sizes]


@pytest.mark.slow
def test_choices_over_a_family_of_models_with_several_modes(capsys):
    """Goal: at most 1.25 times the lowest KL for 95 % of the models, 1.5 times for all."""
    ratios = {}
    for seed in range(60):
        problem = family_member(seed, 1 if seed < 26 else 2)
        if len(problem.step_sizes) < 5:
            continue  # too steep for the quadrature
        x = problem.data(FAMILY_EXAMPLES if problem.dimension == 1 else 1)
        truth = true_kl(problem, x)
        if not math.isfinite(truth[len(truth) // 2 + 1]):
            continue  # mass beyond the quadrature's grid at ordinary steps
        chosen = sr.tune_by_grid(
            problem.model(), x, sr.Langevin(problem.steps, 0.01), problem.step_sizes, Estimation(chains=1024),
            rng=torch.Generator().manual_seed(0),
        ).best  # fmt: skip
        ratios[problem.name] = (truth[chosen] / min(truth), min(truth))
        if len(ratios) == 44:
            break
    worst = sorted(ratios.items(), key=lambda item: -item[1][0])
    values = sorted(ratio for ratio, _ in ratios.values())
    with capsys.disabled():
        print(f"\n{len(values)} random models: true KL of the choice / lowest, the worst ones")
        for name, (ratio, lowest) in worst[:6]:
            print(f"  {name:16s} {ratio:5.2f}  (lowest KL {lowest:.4f})")
    assert len(values) >= 40
    assert values[int(0.95 * len(values)) - 1] <= 1.25
    assert values[-1] <= 1.5
