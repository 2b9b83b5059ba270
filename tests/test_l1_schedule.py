"""The controller against a model of a model: density answers the coefficient late, by a power."""

import itertools
import json
import math

import pytest

from twellctl.training.l1_schedule import L1Schedule


def simulate(schedule, num_steps, *, lag, elasticity, stop_at=None):
    """Densities and coefficients of a run whose density settles within `lag` of the run."""
    log_density, seen = math.log(0.28), []
    for step in range(num_steps):
        learning_rate = max(0.01, 0.5 * (1 + math.cos(math.pi * step / num_steps)))
        settled = math.log(0.17) - elasticity * math.log(schedule.l1 / 1e-3)
        settled = min(math.log(0.3), settled)
        log_density += (settled - log_density) * min(1, learning_rate / (lag * num_steps))
        schedule.update(math.exp(log_density), (step + 1) / num_steps, learning_rate)
        seen.append((math.exp(log_density), schedule.l1))
        if step + 1 == stop_at:
            break
    return seen


@pytest.mark.parametrize("start", [2e-6, 2e-5, 1e-3, 1e-1])
@pytest.mark.parametrize("num_steps", [200, 800, 5000])
@pytest.mark.parametrize(("lag", "elasticity"), [(0.02, 0.3), (0.02, 0.5), (0.05, 0.4), (0.1, 0.4)])
def test_target_is_met_from_any_start(start, num_steps, lag, elasticity):
    schedule = L1Schedule(start, 0.07, num_steps)
    seen = simulate(schedule, num_steps, lag=lag, elasticity=elasticity)
    assert seen[-1][0] == pytest.approx(0.07, rel=0.1)
    if start < 1e-2:  # else it begins far beyond what the target needs
        assert min(density for density, _ in seen) > 0.05  # no dive below the target on the way


def test_coefficient_moves_smoothly():
    seen = simulate(L1Schedule(2e-6, 0.01, 500), 500, lag=0.05, elasticity=0.4)
    steps = [math.log(b / a) for (_, a), (_, b) in itertools.pairwise(seen)]
    assert max(map(abs, steps)) <= 0.1 + 1e-12


def test_coefficient_stays_below_its_ceiling():
    schedule = L1Schedule(1e-3, 1e-5, 200, ceiling=0.5)
    simulate(schedule, 200, lag=0.02, elasticity=0.1)
    assert schedule.l1 == pytest.approx(0.5)


def test_state_through_json_goes_on_exactly():
    whole = L1Schedule(2e-5, 0.07, 300)
    seen = simulate(whole, 300, lag=0.05, elasticity=0.4)
    first = L1Schedule(2e-5, 0.07, 300)
    simulate(first, 300, lag=0.05, elasticity=0.4, stop_at=100)
    second = L1Schedule(2e-5, 0.07, 300)
    second.load(json.loads(json.dumps(first.state())))
    assert second == first
    for step, (density, l1) in enumerate(seen[100:], 100):
        share = max(0.01, 0.5 * (1 + math.cos(math.pi * step / 300)))
        second.update(density, (step + 1) / 300, share)
        assert second.l1 == l1


def test_constant_stays():
    schedule = L1Schedule(2e-5, None, 100)
    schedule.update(0.5, 0.5, 1.0)
    assert schedule.l1 == 2e-5
