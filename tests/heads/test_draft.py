"""twellctl draft: from a model and text to a folder, and what is refused."""

import json

import pytest
import torch
from edits import contents

import twellctl
from twellctl.draft import TrainedHead
from twellctl.errors import TwellError, UsageError
from twellctl.heads.folder import FACTS, WEIGHTS, load_head, open_head
from twellctl.heads.kept import KeptDrafts
from twellctl.heads.last_layer import why_no_head
from twellctl.models.answerer import open_answerer
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model
from twellctl.screens import make as screen
from twellctl.screens import ui

SMALL = {"tokens": 2048, "seq_len": 32, "step_tokens": 256, "epochs": 2, "vocabulary": 300}
WORDS = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]


def test_the_command_from_text_to_head(success, cli, silu_llama, text_file, tmp_path):
    out = tmp_path / "head"
    said, _ = success("draft", silu_llama, out, "--data", text_file, *WORDS)
    assert f"{out}: 0.0 million parameters, guesses 300 tokens, trained on 2048 tokens" in said
    assert "tokens a pass, with so many" in said
    following = f"twellctl serve-local {out} --exact --original {silu_llama}"
    assert said.rstrip().endswith(f"next: {following}")
    assert sorted(path.name for path in out.iterdir()) == [
        "draft_head.json",
        "draft_head.safetensors",
    ]
    assert [*tmp_path.iterdir()] == [out]
    facts = json.loads((out / "draft_head.json").read_text())
    assert facts["settings"] | SMALL == facts["settings"]
    assert facts["steps"] == 16
    assert facts["seconds"] > 0
    assert len(facts["kept"]["by_depth"]) == len(facts["kept"]["tokens_a_pass"]) == 7
    assert str(tmp_path) not in json.dumps(facts)
    assert "source" not in facts  # a local folder
    model = load_model(open_checkpoint(silu_llama))
    head = load_head(open_head("head", out), model, "model")
    assert head.tokens.diff().min() > 0
    assert cli("draft", silu_llama, out, "--data", text_file, *WORDS)[0] == 1


def test_the_next_command_names_no_original_that_the_head_names(tmp_path, capfd):
    kept = KeptDrafts(9, [0.5], [1.5])
    done = TrainedHead(tmp_path / "a head", "owner/model", 1, 2, 3, 4, 5, 6.0, 7.0, kept)
    screen.drafted(done, "owner/model")
    said = capfd.readouterr().out
    assert said.endswith(f"next: twellctl serve-local '{tmp_path}/a head' --exact\n")


def test_the_same_call_gives_the_same_weights_and_replaces_its_own(silu_llama, text_file, tmp_path):
    done = twellctl.draft(silu_llama, tmp_path / "1", data=text_file, **SMALL)
    assert (done.steps, done.tokens, done.vocabulary) == (16, 2048, 300)
    assert done.kept.tokens > 0
    assert "tokens a pass" in done._repr_html_()
    twellctl.draft(silu_llama, tmp_path / "2", data=text_file, **SMALL | {"epochs": 1})
    twellctl.draft(silu_llama, tmp_path / "2", data=text_file, overwrite=True, **SMALL)
    weights, others = ((tmp_path / name / WEIGHTS).read_bytes() for name in "12")
    assert weights == others
    facts, others = (json.loads((tmp_path / name / FACTS).read_text()) for name in "12")
    assert facts | {"seconds": 0} == others | {"seconds": 0}


def test_a_folder_below_home_is_named_nowhere(silu_llama, text_file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(silu_llama.parent))
    out = tmp_path / "head"
    done = twellctl.draft(f"~/{silu_llama.name}", out, data=text_file, **SMALL)
    assert done.source is None
    assert "source" not in json.loads((out / "draft_head.json").read_text())


def test_a_head_of_a_revision_drafts_for_that_one(
    success, silu_llama, text_file, tmp_path, monkeypatch
):
    """Of others, only their name is known."""
    asked = []

    def fetch(name, revision):
        asked.append((name, revision))
        return silu_llama

    monkeypatch.setattr("twellctl.models.checkpoint._download", fetch)
    for number, words in enumerate(([], ["--revision", "v2"])):
        out = tmp_path / str(number)
        success("draft", "owner/model", out, "--data", text_file, *WORDS, *words)
        assert open_answerer(out, exact=True).answering.hub_id == "owner/model"
        facts = json.loads((out / FACTS).read_text())
        assert (facts["source"], facts.get("revision")) == asked[-1]
    of_both = [("owner/model", revision) for revision in (None, "v2") for _ in ("train", "draft")]
    assert asked == of_both


def test_progress_is_a_line_now_and_then(monkeypatch):
    said = []
    monkeypatch.setattr(ui, "note", said.append)
    monkeypatch.setattr(ui, "LONGEST_SILENCE", 0)
    stage = ui.Stage()
    stage.begin("training the draft head")
    screen.drafting(stage, 3, 10, 2.5, 61.0)
    screen.drafting(stage, 4, 10, 2.5, None)
    ui.activity.over()
    assert said == [
        "training the draft head: step 3 of 10, loss 2.500, 1 min 01 s left",
        "training the draft head: step 4 of 10, loss 2.500",
    ]


def test_an_interruption_leaves_nothing(cli, silu_llama, text_file, tmp_path, monkeypatch):
    def interrupt(*far):
        raise KeyboardInterrupt

    monkeypatch.setattr(screen, "drafting", interrupt)
    code, _, err = cli("draft", silu_llama, tmp_path / "head", "--data", text_file, *WORDS)
    assert (code, err[-1]) == (130, "error: interrupted")
    assert not [*tmp_path.iterdir()]


def test_a_full_gpu_is_one_line(silu_llama, text_file, tmp_path, monkeypatch):
    def fail(*given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr("twellctl.heads.training.guessing_loss", fail)
    with pytest.raises(TwellError, match=r"out of GPU memory: give fewer --step-tokens"):
        twellctl.draft(silu_llama, tmp_path / "head", data=text_file, **SMALL)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("phi3", {}, "no plain linear layer self_attn.q_proj"),
        ("gemma", {"hidden_act": "silu", "hidden_activation": "silu"}, "scales or caps"),
        ("gemma2", {"hidden_activation": "silu"}, "norms behind attention and FFN"),
        ("granite", {"pad_token_id": 0, "residual_multiplier": 0.3}, "scales or caps"),
        ("granite", {"pad_token_id": 0, "attention_multiplier": 0.3}, "scales or caps"),
        ("smollm3", {"num_hidden_layers": 4}, "has no rotary positions"),
        ("olmo2", {"pad_token_id": 0}, "other parts than Llama's"),
        ("mistral", {"sliding_window": 64}, "sees 64 tokens of 256"),
        ("llama", {"mlp_bias": True}, "FFNs of LlamaForCausalLM have biases"),
        ("llama", {"hidden_act": "gelu"}, "whose activation is gelu"),
        ("cohere", {"pad_token_id": 0}, "do not know the family cohere"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "depend on the longest sequence",
        ),
    ],
)
def test_models_of_another_build_are_refused(
    make_model, text_file, tmp_path, refusal, monkeypatch, family, changes, said
):
    """No weight is read for that."""
    monkeypatch.setattr("twellctl.models.loading.load_model", lambda *_, **__: pytest.fail("read"))
    folder = make_model(family, **changes)
    found = refusal("draft", folder, tmp_path / "head", "--data", text_file, *WORDS)
    assert found.startswith(f"error: no draft head can be trained for {folder}")
    assert said in found
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 256}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2}),
        ("qwen3", {"head_dim": 8}),
        ("smollm3", {}),
    ],
)
def test_models_of_this_build_are_not(make_model, family, changes):
    assert why_no_head(load_model(open_checkpoint(make_model(family, **changes)))) is None


def test_a_fit_and_what_is_relu_are_refused(relu_llama, text_file, tmp_path, refusal):
    found = refusal("draft", relu_llama, tmp_path / "head", "--data", text_file, *WORDS)
    assert "whose activation is relu: give a model with SiLU gates" in found


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "no text to train on: give --data FILE"),
        ({"data": "none.txt"}, "none.txt does not exist"),
        ({"data": "short.txt"}, "the text makes 0 windows of 32 tokens to train on, and 0"),
        ({"data": "short.txt", "seq_len": 512}, "seq-len must be <= 256, the model's context"),
        ({"data": "short.txt", "ahead": 8}, "ahead must be >= 1 and <= 7"),
        ({"data": "short.txt", "seq_len": 8}, "seq-len must be >= 16"),
    ],
)
def test_wrong_calls_are_refused(silu_llama, tmp_path, monkeypatch, settings, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("one two three")
    with pytest.raises(TwellError, match=said):
        twellctl.draft(silu_llama, "head", **SMALL | settings)
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]


def test_several_processes_are_refused(silu_llama, text_file, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="start it without torchrun"):
        twellctl.draft(silu_llama, tmp_path / "head", data=text_file, **SMALL)


@pytest.mark.parametrize("name", ["config.json", "draft_head.json"])
def test_what_is_no_head_is_not_replaced(silu_llama, text_file, tmp_path, refusal, name):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("{}")
    (out / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    found = refusal("draft", silu_llama, out, "--data", text_file, *WORDS, "--overwrite")
    assert "was not written by twellctl" in found
    assert contents(tmp_path) == before
