"""--exact: the answers of a fit's original, from the command to the server, and what is refused."""

import functools
import json
import re
import shutil

import openai
import pytest
from compiled import EVERY_CASE
from edits import json_in, weights_in
from fits import QUICK, fits_of
from serving_client import get, running

from twellctl.bundle.twell_int4 import PackedLinear
from twellctl.convert import convert
from twellctl.decoding.pace import Pace
from twellctl.decoding.rounds import Drafts
from twellctl.errors import TwellError, UsageError
from twellctl.export import export
from twellctl.generate import generate, load
from twellctl.models.answerer import open_answerer
from twellctl.models.checkpoint import REPORT_FILE, open_checkpoint
from twellctl.models.originals import find_original, load_pair
from twellctl.serve_local import load_served_model, serve_local
from twellctl.write import write

PROMPTS = ("import os\n\ndef main", "class A:\n    x = 1\n", "# for all\n")
FITS = {
    "fit": {},
    "4 bits": {"bits": 4, "group_size": 16},
    "the model in 4 bits": {"bits": 4, "group_size": 16, "keep_activation": True},
}
EXPORTS = {"export": None, "export in FP8": "fp8"}
LIKE_OTHERS = () if EVERY_CASE else ("the model in 4 bits", "export")
KINDS = [name for name in (*FITS, *EXPORTS) if name not in LIKE_OTHERS]
pytestmark = pytest.mark.usefixtures("no_answers")


@pytest.fixture(autouse=True)
def drafts(monkeypatch):
    """Rounds have drafts, whether they pay or not."""
    monkeypatch.setattr("twellctl.decoding.tally.Pace", lambda *given: Pace(Drafts(4)))


@pytest.fixture(scope="module")
def fits(silu_llama, text_file, tmp_path_factory):
    """Fits of `silu_llama` by name; read only."""
    made = fits_of(silu_llama, text_file, tmp_path_factory, FITS)
    for name, quantize in EXPORTS.items():
        made[name] = tmp_path_factory.mktemp("exports") / "fit"
        export(made["fit"], made[name], quantize=quantize)
    return made


@pytest.fixture
def fit(fits, tmp_path):
    """A copy, which a test may spoil."""
    return shutil.copytree(fits["fit"], tmp_path / "fit")


@pytest.fixture(scope="module")
def answers(silu_llama):
    """`answers(prompt, **how)`: what the original writes by itself, in stable decoding; once."""
    loaded = load(silu_llama, stable=True)
    assert loaded.scheduler.decoder.stable
    return functools.cache(lambda prompt, **how: loaded.generate(prompt, **how).text())


@pytest.mark.parametrize("name", KINDS)
def test_answers_are_the_originals(fits, silu_llama, answers, name):
    loaded = load(fits[name], exact=True, original=silu_llama)
    for prompt in PROMPTS:
        for how in ({"temperature": 0}, {"temperature": 0.9, "seed": 5, "top_p": 0.9}):
            made = loaded.generate(prompt, max_tokens=20, **how)
            assert made.text() == answers(prompt, max_tokens=20, **how)
            assert made.figures.drafted.tokens_a_pass >= 1
    scheduler = loaded.scheduler
    assert 0 < scheduler.tally.drafted.num_kept < scheduler.tally.drafted.num_read


def test_what_is_equal_is_in_memory_once(fits, silu_llama):
    original = open_checkpoint(silu_llama)
    for name in ("fit", "export"):
        model, draft = load_pair(original, open_checkpoint(fits[name]))
        theirs = dict(draft.named_parameters(remove_duplicate=False))
        for part, parameter in model.named_parameters(remove_duplicate=False):
            assert (theirs[part] is parameter) == (".mlp." not in part)
    model, draft = load_pair(original, open_checkpoint(fits["4 bits"]))
    assert draft.lm_head.weight is model.lm_head.weight
    assert draft.model.norm.weight is model.model.norm.weight
    assert isinstance(draft.model.layers[0].self_attn.q_proj, PackedLinear)


def test_layers_that_are_rounded_have_other_names_in_latent_attention(
    make_model, text_file, tmp_path
):
    source, fit = make_model("minicpm3"), tmp_path / "fit"
    settings = QUICK | {"bits": 4, "group_size": 8, "keep_activation": True}
    convert(source, fit, data=[str(text_file)], **settings)
    known = load(source, stable=True).generate(PROMPTS[0], max_tokens=9).text()
    assert load(fit, exact=True, original=source).generate(PROMPTS[0], max_tokens=9).text() == known


def test_the_command_says_how_many_tokens_came_of_a_pass(success, fits, silu_llama, answers):
    words = ("generate", fits["fit"], PROMPTS[0], "--max-tokens", 40)
    out, err = success(*words, "--exact", "--original", silu_llama)
    assert out == answers(PROMPTS[0], max_tokens=40) + "\n"
    assert success("generate", silu_llama, *words[2:], "--stable")[0] == out
    said = "drafts gain no speed here: transformers' own code (the decode kernels need an NVIDIA"
    assert err[0] == f"{said} GPU)"
    assert re.search(r"[1-5]\.\d\d tokens a pass, kept \d+/\d+ of fit$", err[-1])
    assert "neurons fired" not in err[-1]


def test_the_source_in_config_json_is_the_original(fit, silu_llama, monkeypatch):
    with json_in(fit / "config.json") as config:
        config["twell"]["source"] = "owner/model"
    monkeypatch.setattr("twellctl.models.checkpoint._download", lambda name, revision: silu_llama)
    assert find_original(open_checkpoint(fit)).path == silu_llama
    assert generate(fit, PROMPTS[0], exact=True, max_tokens=3).figures.tokens == 0


def test_the_server_answers_as_the_original(fits, silu_llama, answers):
    served = load_served_model(open_answerer(fits["fit"], True, silu_llama), own_sampling=False)
    said = f"fit: the answers of {silu_llama}, drafted by {fits['fit']}"
    assert served.about["exact"] == said
    with running(served) as client:
        for i, prompt in enumerate(PROMPTS):
            messages = [{"role": "user", "content": prompt}]
            how = {"max_tokens": 50, "temperature": i / 2, "seed": 7}
            made = client.chat.completions.create(model="fit", messages=messages, **how)
            assert made.choices[0].message.content == answers(prompt, **how)
        lines = get(client, "/metrics").body.decode().splitlines()
    counts = dict(line.split() for line in lines if line[0] != "#")
    passes, drafted, kept = (
        float(counts[f"twell_{name}"])
        for name in (
            'passes_total{model="fit"}',
            'drafted_tokens_total{drafter="fit",model="fit"}',
            'kept_drafts_total{drafter="fit",model="fit"}',
        )
    )
    assert 0 < kept < drafted < 5 * passes


def test_the_server_has_the_fit_alone_beside(fits, silu_llama, answers):
    answerer, alone = open_answerer(fits["4 bits"], True, silu_llama), load(fits["4 bits"])
    served = load_served_model(answerer, own_sampling=False, names=["code", "x"])
    assert served.about["fast"] == f"code-fast: {fits['4 bits']} alone, in the same cache"
    lines = []
    with running(served, log=lines.append) as client:
        assert [model.id for model in client.models.list()] == ["code", "x", "code-fast", "x-fast"]
        for prompt in PROMPTS:
            how = {"max_tokens": 16, "temperature": 0}
            known = answers(prompt, **how), alone.generate(prompt, **how).text()
            assert known[0] != known[1]
            messages = [{"role": "user", "content": prompt}]
            for name in ("code", "x-fast", "x", "code-fast"):
                made = client.chat.completions.create(model=name, messages=messages, **how)
                assert made.model == name
                assert made.choices[0].message.content == known["fast" in name]
        with pytest.raises(openai.NotFoundError, match='only "code" and "code-fast"'):
            client.chat.completions.create(model="fast", messages=messages)
        counted = get(client, "/metrics").body.decode()
    assert 'twell_generated_tokens_total{model="code-fast"}' in counted
    assert 'twell_time_to_first_token_seconds_count{model="code"}' in counted


def test_names_that_are_taken(fit, silu_llama):
    with pytest.raises(UsageError, match="a-fast is what a is called alone: choose other names"):
        serve_local(fit, exact=True, original=silu_llama, names=["a", "a-fast"])


def test_write_lets_the_original_write(success, fits, silu_llama, tmp_path):
    rows = [json.dumps({"prompt": f"What is {i}?"}) for i in range(12)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    how = {"prompts": tmp_path / "prompts.jsonl", "max_tokens": 20, "batch_size": 4}
    for name, more in (("drawn", {"seed": 3}), ("greedy", {"temperature": 0})):
        known, out = tmp_path / f"{name}.jsonl", tmp_path / f"{name}-exact.jsonl"
        write(silu_llama, known, **how | more)
        done = write(fits["4 bits"], out, exact=True, original=silu_llama, **how | more)
        assert out.read_text() == known.read_text()
        assert (done.by, done.is_relu) == (str(silu_llama), False)
    steps = {"prompts": str(how["prompts"]), "exact": True, "original": str(silu_llama)}
    steps |= {"temperature": 0, "max-tokens": 20, "batch-size": 4}
    run = {"model": str(fits["fit"]), "out": str(tmp_path / "out"), "write": steps}
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    said, _ = success("run", tmp_path / "run.yaml")
    parts = (tmp_path / "out" / name for name in ("answers.jsonl", "held-out.jsonl"))
    lines = "".join(part.read_text() for part in parts).splitlines()
    assert sorted(lines) == sorted(known.read_text().splitlines())
    assert f"next: twellctl convert {silu_llama} RELU" in said


# ---- what is refused ----


def test_what_is_no_fit(silu_llama, relu_llama, fit):
    with pytest.raises(TwellError, match=r"is not a fit \(no twell_fit.json\): exact answers need"):
        load(silu_llama, exact=True, original=silu_llama)
    with pytest.raises(TwellError, match="is not a fit"):
        load(relu_llama, exact=True, original=silu_llama)
    (fit / REPORT_FILE).write_text("{}")
    with pytest.raises(TwellError, match="was fine-tuned, so its attention is not its original's"):
        load(fit, exact=True, original=silu_llama)


def test_a_fit_that_names_no_source(fit):
    with pytest.raises(TwellError, match=r"does not say from which model .* --original MODEL"):
        load(fit, exact=True)


def test_an_original_without_exact_answers(refusal, fit, silu_llama):
    with pytest.raises(UsageError, match="is for exact answers: add --exact"):
        load(fit, original=silu_llama)
    with pytest.raises(UsageError, match="is for exact answers: add --exact"):
        write(fit, fit / "no.jsonl", prompts=fit / "config.json", original=silu_llama)
    said = refusal("generate", fit, "x", "--original", silu_llama, code=2)
    assert said == f"error: original {silu_llama} is for exact answers: add --exact"


def test_another_model(fit, make_model):
    for changes, said in (
        ({"seed": 1}, "or changed after that: model.embed_tokens.weight differs"),
        ({"num_key_value_heads": 4}, "config.json differ in .num_key_value_heads"),
        ({"intermediate_size": 128}, "config.json differ in .intermediate_size"),
        ({"hidden_act": "gelu"}, "config.json differ in .hidden_act"),
        ({"rms_norm_eps": 1e-3}, "config.json differ in .rms_norm_eps"),
    ):
        other = make_model("llama", **changes)
        with pytest.raises(TwellError, match=f"was not made from {other}.*{said}"):
            load(fit, exact=True, original=other)


def test_attention_that_was_changed(fit, silu_llama):
    with weights_in(fit) as weights:
        weights["model.layers.1.self_attn.v_proj.weight"][0, 0] += 1
    with pytest.raises(
        TwellError, match=r"after that: model.layers.1.self_attn.v_proj.weight differ"
    ):
        load(fit, exact=True, original=silu_llama)


def test_another_tokenizer(fit, silu_llama):
    file = fit / "tokenizer.json"
    found = json.loads(file.read_text())
    file.write_text(json.dumps(found, indent=4))  # the same, written otherwise
    find_original(open_checkpoint(fit), original=silu_llama)
    vocabulary = found["model"]["vocab"]
    one, other = [word for word in vocabulary if len(word) == 1][:2]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(found))
    with pytest.raises(TwellError, match=r"has other tokens than .* \(tokenizer.json\)"):
        find_original(open_checkpoint(fit), original=silu_llama)


def test_an_original_that_is_rounded(fits, fit):
    with pytest.raises(TwellError, match="is quantised already"):
        find_original(open_checkpoint(fit), original=fits["the model in 4 bits"])
