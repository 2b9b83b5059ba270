"""The loss to expect: the rule is what a fit of the measured runs gives, and knows its range."""

import csv
import dataclasses

import numpy as np
import pytest

from twellctl.here.resources import resource_dir
from twellctl.models.checkpoint import open_checkpoint
from twellctl.training import expected_loss as module
from twellctl.training.expected_loss import (
    COST,
    ERROR,
    FIRING,
    GAIN,
    expected_loss,
    loss_outlook,
    measured_runs,
    why_no_outlook,
)
from twellctl.training.recipe import Recipe, resolve_recipe

RUNS = measured_runs()
TOKENS = np.array([run.tokens for run in RUNS])
DENSITY = np.array([run.density for run in RUNS])
LOSS = np.array([run.over_silu for run in RUNS])
ROOT = (FIRING / (TOKENS * DENSITY)) ** 0.5
ONES = np.ones(len(RUNS))


def left_out_errors(terms: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Of a form linear in its `terms` `[settings, coefficients]`: each `group` left out in turn."""
    errors = np.empty(len(RUNS))
    for one in set(group.tolist()):
        out = group == one
        found = np.linalg.lstsq(terms[~out], LOSS[~out], rcond=None)[0]
        errors[out] = terms[out] @ found - LOSS[out]
    return errors


def rms(errors: np.ndarray) -> float:
    return float(np.sqrt(np.mean(errors**2)))


RULE = np.stack([ROOT, -ONES], 1)
EACH = np.arange(len(RUNS))


def test_the_rule_is_the_fit_of_the_measured_runs():
    assert len(RUNS) == 12
    fitted = np.linalg.lstsq(RULE, LOSS, rcond=None)[0]
    assert np.round(fitted, 4).tolist() == [COST, GAIN]
    said = [expected_loss(run.tokens, run.density, run.parameters).nats for run in RUNS]
    assert said == pytest.approx((RULE @ [COST, GAIN]).tolist())


def test_its_error_is_the_largest_of_a_setting_that_was_left_out():
    errors = left_out_errors(RULE, EACH)
    assert round(float(abs(errors).max()), 3) == ERROR
    assert rms(errors) == pytest.approx(0.0057, abs=5e-5)


def test_a_budget_that_was_left_out_is_predicted_nearly_as_well():
    errors = left_out_errors(RULE, TOKENS)
    assert rms(errors) == pytest.approx(0.0055, abs=5e-5)
    assert abs(errors).max() == pytest.approx(0.0140, abs=5e-5)


def test_the_smaller_model_predicts_the_larger_one_as_well():
    sizes = np.array([run.parameters for run in RUNS])
    errors = left_out_errors(RULE, sizes)[sizes == sizes.max()]
    assert abs(errors).max() == pytest.approx(0.0137, abs=5e-5)


def test_other_forms_err_more():
    by_logarithms = np.stack([ONES, np.log(TOKENS), np.log(DENSITY)], 1)
    by_root_of_tokens = np.stack([ONES, TOKENS**-0.5], 1)
    for form in (by_logarithms, by_root_of_tokens):
        assert rms(left_out_errors(form, EACH)) > 1.5 * rms(left_out_errors(RULE, EACH))


def test_every_run_stands_in_the_lab_book():
    book = (resource_dir("recipes") / "LAB.md").read_text(encoding="utf-8")
    with (resource_dir("recipes") / "runs.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        sign = "" if row["over_silu"].startswith("-") else "+"
        assert f"{sign}{row['over_silu']}" in book, row
    assert {row["used"] for row in rows} == {
        "yes",
        "other text",
        "cosine rate",
        "no shifts",
        "thresholds",
        "lower rate",
    }
    assert {row["text"] for row in rows if row["used"] == "yes"} == {
        "package code",
        "all held-out",
    }


def test_more_tokens_cost_less_and_more_sparsity_more():
    by_tokens = [expected_loss(t, 0.03, 30e6).nats for t in (20e6, 50e6, 80e6, 300e6, 1e12)]
    assert by_tokens == sorted(by_tokens, reverse=True)
    by_density = [expected_loss(80e6, d, 30e6).nats for d in (0.0001, 0.01, 0.02, 0.05, 0.5)]
    assert by_density == sorted(by_density, reverse=True)
    assert min(by_tokens + by_density) > -GAIN


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.model}-{run.tokens}-{run.density}")
def test_measured_runs_are_inside(run):
    expected = expected_loss(run.tokens, run.density, run.parameters)
    assert (expected.outside, expected.error) == ((), ERROR)
    assert expected.nats == pytest.approx(run.over_silu, abs=ERROR)


@pytest.mark.parametrize(
    ("tokens", "density", "parameters", "said"),
    [
        (
            80e6,
            0.03,
            8.03e9,
            ["8,030 million parameters (29 million to 135 million were measured)"],
        ),
        (2e9, 0.03, 30e6, ["2,000 million tokens (20 million to 300 million were measured)"]),
        (80e6, 0.2, 30e6, ["20.00% firing (0.96% to 6.85% were measured)"]),
        (
            20e6,
            0.01,
            30e6,
            ["0.2 million tokens x firing (0.6 million to 9 million were measured)"],
        ),
        (6400, 0.05, 57504, ["0.058 million parameters", "0.0064 million tokens"]),
    ],
)
def test_what_lies_outside_is_named_and_has_no_error(tokens, density, parameters, said):
    expected = expected_loss(tokens, density, parameters)
    assert expected.error is None
    assert len(expected.outside) == len(said)
    for found, wanted in zip(expected.outside, said, strict=True):
        assert found.startswith(wanted)


def test_more_passes_over_the_text_than_were_measured_are_outside():
    assert expected_loss(80e6, 0.03, 30e6, text_tokens=20e6).error is not None
    (said,) = expected_loss(80e6, 0.03, 30e6, text_tokens=15e6).outside
    assert said == "5 passes over the text (up to 4 were measured)"


def test_whole_steps_of_a_recipes_budget_are_inside():
    assert expected_loss(2441 * 8 * 1024, 0.03, 30e6).outside == ()


def test_other_targets_and_budgets_are_told():
    outlook = loss_outlook(79_995_904, 1 - 0.95, 30_000_000)
    assert outlook.expected.nats == pytest.approx(0.0286, abs=1e-4)
    others = [(one.tokens, one.density) for one in outlook.others]
    same_tokens = [(79_995_904, 0.03), (79_995_904, 0.01)]
    assert others == [*same_tokens, (20e6, 1 - 0.95), (300e6, 1 - 0.95)]


def test_the_budgets_are_those_of_the_recipes():
    shipped = [resolve_recipe(name).max_tokens for name in ("quick", "standard", "long")]
    assert list(module.BUDGETS) == shipped


@pytest.mark.parametrize("name", ["quick", "standard", "long"])
def test_it_speaks_of_the_recipes_that_were_measured(relu_llama, name):
    checkpoint = open_checkpoint(relu_llama)
    recipe = resolve_recipe(name)
    assert why_no_outlook(checkpoint, recipe, recipe.max_tokens) is None
    assert why_no_outlook(checkpoint, Recipe(), recipe.max_tokens) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"l1_schedule": "constant"}, "--l1-schedule constant has no target"),
        ({"teacher": "none"}, "the measured runs had a teacher"),
        ({"teacher": "owner/model"}, "the measured runs learned from their own SiLU form, and not"),
        ({"penalty": "l1"}, "no measured run had --penalty l1"),
        ({"lora_rank": 16}, "no measured run had --lora-rank 16"),
        ({"learning_rate": 0.01}, "no measured run had --learning-rate 0.01"),
        ({"param_dtype": "bfloat16"}, "no measured run had --param-dtype bfloat16"),
    ],
)
def test_of_other_recipes_it_says_nothing(relu_llama, changes, said):
    recipe = resolve_recipe("standard", changes)
    assert why_no_outlook(open_checkpoint(relu_llama), recipe, 80_000_000).startswith(said)


def test_of_far_too_few_tokens_it_says_nothing(relu_llama):
    checkpoint, recipe = open_checkpoint(relu_llama), Recipe(target_sparsity=0.95)
    assert why_no_outlook(checkpoint, recipe, 1_300_000) is None
    said = why_no_outlook(checkpoint, recipe, 1_100_000)
    assert said == "1.1 million tokens are too few for this target, the rule begins at 20 million"
    outlook = loss_outlook(1_300_000, 0.05, 30_000_000)
    assert [one.tokens for one in outlook.others] == list(module.BUDGETS)


def test_of_models_that_have_no_silu_form_it_says_nothing(relu_llama):
    checkpoint = open_checkpoint(relu_llama)
    drawn = dataclasses.replace(checkpoint, shards=())
    config = checkpoint.config | {"twell": checkpoint.twell | {"source_act": "relu"}}
    for other in (drawn, dataclasses.replace(checkpoint, config=config)):
        said = why_no_outlook(other, Recipe(), 80_000_000)
        assert said == f"{checkpoint.name} is not freshly converted from SiLU"
