"""Advice: each sentence comes when its figure says so, and not before."""

import dataclasses

import profiles
import pytest

from twellctl.screens import advice


def said(found) -> str:
    return "\n".join(advice.of_profile(found))


@pytest.fixture(autouse=True)
def of_a_usual_size(monkeypatch):
    """The profiles' layers of 1000 neurons shall not count as small."""
    monkeypatch.setattr(advice, "SMALL", 1000)


LAYER = profiles.layer(0.01)
SPARSE = profiles.profile(*[LAYER] * 4)


def test_of_a_good_model_there_is_one_sentence():
    assert advice.of_profile(SPARSE) == [
        "1.00 % of the neurons fire: few enough for prompts and for decoding."
    ]


@pytest.mark.parametrize(("density", "prompts"), [(0.01, "few enough"), (0.03, "many")])
def test_small_layers_promise_no_decoding(monkeypatch, density, prompts):
    monkeypatch.setattr(advice, "SMALL", 1001)
    first = said(profiles.profile(profiles.layer(density))).splitlines()[0]
    assert f"of the neurons fire: {prompts} for long prompts. " in first
    assert "Layers of 1000 neurons are small, and may decode no faster: bench decode says." in first


def changed(which: dict, **more):
    layers = (dataclasses.replace(LAYER, **which), *SPARSE.layers[1:])
    return dataclasses.replace(SPARSE, layers=layers, **more)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (profiles.profile(profiles.layer(0.3)), "30.0 % of the neurons fire: too many for a gain."),
        (profiles.profile(profiles.layer(0.2)), "fine-tune with a lower --density"),
        (profiles.profile(profiles.layer(0.04)), "a gain token by token"),
        (changed({"slots": 256}), "1 of 4 layers (0) need all 256 slots of a tile"),
        (
            changed(
                {},
                by_kind=(SPARSE.by_kind[0], dataclasses.replace(SPARSE.by_kind[1], density=0.02)),
            ),
            "Of the kinds of text, b fires 2.00 % of the neurons, code 1.00 %",
        ),
        (changed({"dead": 900}), "4096 tokens are few to call them dead"),
        (changed({"dead": 900}, tokens=10**6, text_tokens=10**6), "They cost memory and no time"),
    ],
)  # fmt: skip
def test_sentences_come_when_they_are_true(found, sentence):
    assert sentence in said(found)
    assert sentence not in said(SPARSE)


def test_of_a_run():
    ended = {"target_density": 0.05, "density": 0.05}
    assert advice.of_run(ended) == []
    near = [advice.of_run(ended | {"density": 0.05 * by}) for by in (0.89, 0.91, 1.09, 1.11)]
    assert [len(said) for said in near] == [1, 0, 0, 1]
    assert advice.of_run(ended | {"target_density": None}) == []
    (more,) = advice.of_run(ended | {"density": 0.06})
    assert "was not met" in more
    losses = {"cross_entropy": 2.2, "teacher_cross_entropy": 2.0, "teacher_kl": 0.21}
    first, *_ = advice.of_run(ended | losses | {"density": 0.06})
    assert first.startswith("far from its teacher, +0.200 nats a token of held-out text, KL 0.210")
    assert advice.of_run(ended | losses | {"cross_entropy": 2.05, "teacher_kl": 0.06}) == []
    (less,) = advice.of_run(ended | {"density": 0.04})
    assert less.startswith("sparser than the 5.00% asked for")
