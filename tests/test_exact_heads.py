"""--exact with a draft head: the answers of its original, from the command to the server and the
bench, and what is refused. Its weights are random, so few of its drafts are kept."""

import functools
import json
import runpy
import shutil
from pathlib import Path

import pytest
from draft_heads import head_folder
from edits import json_in, jsonl, weights_in
from fits import fits_of
from serving_client import get, running

from twellctl.bench import exact as bench_module
from twellctl.bench.exact import bench_exact
from twellctl.bench.held import held_bytes
from twellctl.bench.settings import ExactSettings
from twellctl.decoding.pace import Pace
from twellctl.decoding.rounds import Drafts
from twellctl.doctor import doctor
from twellctl.errors import TwellError
from twellctl.generate import load
from twellctl.heads.folder import FACTS, WEIGHTS, WITHIN
from twellctl.models.answerer import open_answerer
from twellctl.serve_local import load_served_model, serve_local
from twellctl.write import write

CI = Path(__file__).resolve().parent.parent / ".ci"
PROMPTS = ("import os\n\ndef main", "class A:\n    x = 1\n")
ALONE = "is a draft head, which answers nothing alone: generate, chat, serve-local and write take"
HOWS = ({"temperature": 0}, {"temperature": 0.9, "seed": 5, "top_p": 0.9})
in_checkout = pytest.mark.skipif(not CI.is_dir(), reason="no checkout around the tests")


@pytest.fixture(autouse=True)
def drafts(monkeypatch):
    """Rounds have drafts, whether they pay or not."""
    monkeypatch.setattr("twellctl.decoding.tally.Pace", lambda *given: Pace(Drafts(4)))


@pytest.fixture(scope="module")
def shared(silu_llama, tmp_path_factory):
    """A head of `silu_llama`, which it names as source; read only."""
    return head_folder(silu_llama, tmp_path_factory.mktemp("heads") / "head")


@pytest.fixture
def head(shared, tmp_path):
    """A copy, which a test may spoil."""
    return shutil.copytree(shared, tmp_path / "head")


@pytest.fixture(scope="module")
def answers(silu_llama):
    """`answers(prompt, **how)`: what the original writes by itself, in stable decoding; once."""
    loaded = load(silu_llama, stable=True)
    return functools.cache(lambda prompt, **how: loaded.generate(prompt, **how).text())


@pytest.fixture
def prompts(tmp_path):
    rows = [{"prompt": prompt, "kind": "code"} for prompt in PROMPTS]
    return jsonl(tmp_path / "prompts.jsonl", rows)


@pytest.mark.parametrize("named", [False, True])
def test_answers_are_the_originals(shared, silu_llama, answers, named):
    loaded = load(shared, exact=True, original=silu_llama if named else None)
    for prompt in PROMPTS:
        for how in HOWS:
            made = loaded.generate(prompt, max_tokens=20, **how)
            assert made.text() == answers(prompt, max_tokens=20, **how)
            assert made.figures.drafted.read["head"] > 0


def test_the_command_answers_as_the_original(success, shared, silu_llama):
    words = (PROMPTS[0], "--max-tokens", 30)
    for drawn in ((), ("--temperature", 0.8, "--seed", 3)):
        known, _ = success("generate", silu_llama, *words, *drawn, "--stable")
        out, err = success("generate", shared, *words, *drawn, "--exact", "--original", silu_llama)
        assert out == known
        assert err[0].startswith("drafts gain no speed here: transformers' own code (")
        assert " of head" in err[-1]


def test_the_server_answers_as_the_original_and_has_no_other(shared, silu_llama, answers):
    served = load_served_model(open_answerer(shared, exact=True), own_sampling=False)
    assert served.about["exact"] == f"head: the answers of {silu_llama}, drafted by its draft head"
    assert "fast" not in served.about
    with running(served) as client:
        assert [model.id for model in client.models.list()] == ["head"]
        for prompt in PROMPTS:
            messages = [{"role": "user", "content": prompt}]
            for how in ({"temperature": 0}, {"temperature": 0.9, "seed": 5}):
                made = client.chat.completions.create(
                    model="head", messages=messages, max_tokens=20, **how
                )
                assert made.choices[0].message.content == answers(prompt, max_tokens=20, **how)
        lines = get(client, "/metrics").body.decode().splitlines()
    drafted = 'twell_drafted_tokens_total{drafter="head",model="head"} '
    assert any(line.startswith(drafted) and not line.endswith(" 0.0") for line in lines)


def test_a_head_of_the_hub_and_names_that_end_in_fast(shared, silu_llama, monkeypatch):
    """The hub's cache gets its weights; its source is fetched as any model."""
    fetched = {}

    def snapshot(name, revision, allow_patterns):
        fetched[name] = allow_patterns
        return {"owner/head": shared, "owner/model": silu_llama}[name]

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    served = []
    monkeypatch.setattr("twellctl.serve_local.serve", lambda given, *_, **__: served.append(given))
    monkeypatch.setattr("twellctl.serve_local.asyncio.run", lambda coroutine: None)
    for names in ((), ("a", "a-fast")):
        how = {"names": names, "original": "owner/model", "port": 0}
        serve_local("owner/head", exact=True, **how)
    assert {WEIGHTS, "*.json"} <= {*fetched["owner/head"]}
    assert [each.name for each in served] == ["owner/head", "a"]
    assert served[0].about["exact"].startswith("owner/head: the answers of owner/model, drafted by")
    for each in served:
        each.engine.close()


def test_write_lets_the_original_write(shared, silu_llama, prompts, tmp_path, success):
    how = {"prompts": prompts, "max_tokens": 12, "temperature": 0}
    write(silu_llama, tmp_path / "known.jsonl", **how)
    done = write(shared, tmp_path / "exact.jsonl", exact=True, **how)
    assert done.by == str(silu_llama)
    known = (tmp_path / "known.jsonl").read_text()
    assert (tmp_path / "exact.jsonl").read_text() == known
    steps = {"prompts": str(prompts), "exact": True, "temperature": 0, "max-tokens": 12}
    run = {"model": str(shared), "out": str(tmp_path / "out"), "write": steps}
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    success("run", tmp_path / "run.yaml")
    parts = (tmp_path / "out" / name for name in ("answers.jsonl", "held-out.jsonl"))
    lines = "".join(part.read_text() for part in parts if part.exists()).splitlines()
    assert sorted(lines) == sorted(known.splitlines())


def test_a_bench_has_no_form_of_the_head_alone(success, shared, silu_llama, prompts, monkeypatch):
    monkeypatch.setattr(bench_module, "COUNTS", (3,))
    words = ("bench", "exact", shared, "--original", silu_llama, "--prompts", prompts)
    file = prompts.parent / "exact.json"
    out, _ = success(
        *words, "--device=cpu", "--new-tokens=12", "--batch=1", "--batch=2", "--json", file
    )
    found = json.loads(file.read_text())
    assert found["models"] == {"draft": str(shared), "original": str(silu_llama)}
    assert found["is_head"]
    for point in found["points"]:
        names = ["original, stable", "original", "exact", "exact, 3 drafts", "exact, lookup"]
        assert [*point["forms"]] == names
        for name in names[2:]:
            assert point["forms"][name]["differing"] == 0
        exact, alone = (point["forms"][name]["weight_bytes"] for name in ("exact", names[0]))
        assert exact > alone + (shared / WEIGHTS).stat().st_size
    assert found["points"][0]["forms"]["exact, 3 drafts"]["drafted"]["head"] > 0
    assert " of head " in out


def test_what_an_engine_holds_has_the_heads_tensors(shared, silu_llama):
    exact, alone = (load(shared, exact=True), load(silu_llama, stable=True))
    more = held_bytes(exact.scheduler) - held_bytes(alone.scheduler)
    assert more > 1.9 * (shared / WEIGHTS).stat().st_size  # in float32 here


@in_checkout
def test_developers_scripts_take_a_head(shared, silu_llama, prompts, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(CI))
    out = prompts.parent / "recorded.json"
    record = runpy.run_path(str(CI / "picture.py"))["record"]
    record(str(silu_llama), str(shared), prompts, out, tokens=12, device="cpu", commit="abc")
    found = json.loads(out.read_text())
    assert (found["draft"], found["drafted"]) == ("head", "drafted by its draft head")
    for row in found["prompts"]:
        assert row["exact_is_stable"]
        assert [*row["forms"]] == ["original, stable", "original", "exact"]
    script, known = runpy.run_path(str(CI / "exact_answers.py")), prompts.parent / "known.json"
    script["known"](str(silu_llama), prompts, known, new_tokens=12, device="cpu")
    with pytest.raises(SystemExit) as ended:
        script["check"](str(silu_llama), str(shared), prompts, known, device="cpu")
    assert ended.value.code == 0
    assert "0 of 2 differ" in capsys.readouterr().out


# ---- what is refused ----


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "HEAD", "x"),
        ("chat", "HEAD"),
        ("serve-local", "HEAD"),
        ("write", "HEAD", "OUT.jsonl", "--prompts", "PROMPTS"),
        ("eval", "HEAD", "--data", "PROMPTS"),
        ("profile", "HEAD", "--data", "PROMPTS"),
        ("compare", "HEAD", "HEAD", "--prompts", "PROMPTS"),
        ("convert", "HEAD", "OUT"),
        ("finetune", "HEAD", "OUT", "--data", "PROMPTS"),
        ("export", "HEAD", "OUT"),
        ("export", "HEAD", "OUT", "--with-original"),
        ("bench", "decode", "HEAD", "--data", "PROMPTS", "--device=cpu"),
    ],
    ids=" ".join,
)
def test_a_head_alone_is_refused(cli, shared, prompts, tmp_path, words):
    places = {"HEAD": shared, "PROMPTS": prompts, "OUT": tmp_path / "out"}
    places["OUT.jsonl"] = tmp_path / "out.jsonl"
    code, out, err = cli(*(places.get(word, word) for word in words))
    assert (code, out) == (1, "")
    assert err[-1].startswith(f"error: {shared} {ALONE}")
    assert not (tmp_path / "out").exists()


def test_a_head_is_no_original_of_a_fit(shared, silu_llama, text_file, tmp_path_factory):
    fit = fits_of(silu_llama, text_file, tmp_path_factory, {"fit": {}})["fit"]
    with pytest.raises(TwellError, match=ALONE):
        load(fit, exact=True, original=shared)


def test_a_head_in_the_folder_of_its_model(shared, silu_llama, answers, tmp_path):
    """The model answers by itself, and with --exact, wherever the folder goes."""
    both = shutil.copytree(silu_llama, tmp_path / "both")
    shutil.copytree(shared, both / WITHIN)
    with json_in(both / WITHIN / FACTS) as facts:
        facts["source"] = str(tmp_path / "gone")
    prompt, how = PROMPTS[0], {"max_tokens": 20, "temperature": 0}
    alone = load(both, stable=True).generate(prompt, **how)
    made = load(both, exact=True).generate(prompt, **how)
    assert alone.text() == made.text() == answers(prompt, **how)
    assert alone.figures.drafted is None
    assert made.figures.drafted.read["head"] > 0
    found = {finding.name: finding for finding in doctor(both).folder}
    assert found["checkpoint"].state == found["draft head"].state == "ok"
    assert found["draft head"].what.startswith("drafts for this model with --exact")
    served = load_served_model(open_answerer(both, exact=True), max_running=1)
    served.engine.close()
    assert served.name == "both"


def test_a_head_and_its_model_on_the_hub(shared, silu_llama, tmp_path, monkeypatch):
    """Both go by their id, not by where the hub's cache has them."""
    both = shutil.copytree(silu_llama, tmp_path / "both")
    shutil.copytree(shared, both / WITHIN)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: both)
    answerer = open_answerer("owner/model", exact=True)
    assert answerer.named.name == answerer.answering.name == "owner/model"
    assert answerer.answering.hub_id == "owner/model"


def test_a_head_whose_original_is_not_found(head):
    with json_in(head / FACTS) as facts:
        facts["source"] = str(head / "gone")
    said = f"the model that {head} drafts for cannot be taken .*gone .*: name it with --original"
    with pytest.raises(TwellError, match=said):
        load(head, exact=True)
    with json_in(head / FACTS) as facts:
        del facts["source"]
    with pytest.raises(TwellError, match="does not say for which model it drafts: name that with"):
        load(head, exact=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 128, "head_dim": 32}, "hidden_size 128"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4"),
        ({"vocab_size": 200}, "vocab_size 200"),
        ({"hidden_act": "relu"}, "hidden_act relu"),
    ],
)
def test_another_original_is_refused_before_it_is_loaded(
    shared, make_model, monkeypatch, changes, said
):
    other = make_model("llama", **changes)
    monkeypatch.setattr("twellctl.models.loading.load_model", None)
    with pytest.raises(TwellError, match=f"was trained for another model than {other}.*{said}"):
        load(shared, exact=True, original=other)


def test_another_original_of_the_same_sizes(shared, make_model):
    other = make_model("llama")
    with weights_in(other) as weights:
        weights["model.norm.weight"][3] += 1
    with pytest.raises(TwellError, match=f"{shared} was trained for another model than {other}$"):
        load(shared, exact=True, original=other)


@pytest.mark.parametrize("family", ["olmo", "falcon_h1"])
def test_another_original_without_such_a_norm(shared, make_model, family):
    other = make_model(family, pad_token_id=0, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8)
    with pytest.raises(TwellError, match=f"{shared} was trained for another model than {other}$"):
        load(shared, exact=True, original=other)


def test_an_original_that_is_rounded(shared, silu_llama, text_file, tmp_path_factory):
    how = {"bits": 4, "group_size": 16, "keep_activation": True}
    rounded = fits_of(silu_llama, text_file, tmp_path_factory, {"fit": how})["fit"]
    with pytest.raises(TwellError, match="is quantised already"):
        load(shared, exact=True, original=rounded)


def test_a_head_that_is_not_whole(head):
    whole = (head / WEIGHTS).read_bytes()
    (head / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TwellError, match=f"{head} cannot be loaded .*: train it again"):
        load(head, exact=True)
    (found,) = doctor(head).folder
    assert (found.name, found.state) == ("draft head", "bad")
    assert "is truncated" in found.what
    (head / WEIGHTS).unlink()
    with pytest.raises(TwellError, match=f"has no {WEIGHTS}: copy it again"):
        load(head, exact=True)
    with json_in(head / FACTS) as facts:
        facts["format"] = 9
    with pytest.raises(TwellError, match="is a draft head of format 9, this version reads 1"):
        load(head, exact=True)


def test_doctor_knows_a_head(success, refusal, head, silu_llama, make_model):
    out, _ = success("doctor", head)
    assert f"drafts for {silu_llama} with --exact; " in out
    with json_in(head / FACTS) as facts:
        facts["source"] = str(make_model("llama", num_key_value_heads=4))
    (found,) = doctor(head).folder
    assert found.state == "bad"
    assert "was trained for another model than" in found.what
    with json_in(head / FACTS) as facts:
        facts["source"] = "owner/model"  # which is not fetched
    (found,) = doctor(head).folder
    assert found.what.startswith("drafts for owner/model with --exact; ")
    with json_in(head / FACTS) as facts:
        del facts["source"]
    (found,) = doctor(head).folder
    assert found.what.startswith("drafts with --exact --original MODEL; ")
    with json_in(head / FACTS) as facts:
        facts["source"] = 5
    assert doctor(head).folder == (found,)


def test_bench_settings_are_checked_as_of_fits(shared, prompts):
    how = ExactSettings(device="cpu", new_tokens=250)
    with pytest.raises(TwellError, match="shorten the prompt"):
        bench_exact(shared, prompts, None, how)
