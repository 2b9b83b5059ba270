"""export --with-original: a fit and its original in one folder, all that --exact needs."""

import json
import shutil

import pytest
import torch
from edits import json_in, jsonl, weights_in
from fits import QUICK, fits_of
from huggingface_hub.utils import filter_repo_objects
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from twellctl.convert import convert
from twellctl.decoding.pace import Pace
from twellctl.decoding.rounds import Drafts
from twellctl.doctor import doctor
from twellctl.errors import TwellError, UsageError
from twellctl.evaluate import evaluate
from twellctl.export import export
from twellctl.generate import load
from twellctl.models import shard_writer
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import fingerprint, quiet_transformers
from twellctl.models.shards import ORIGINAL, SINGLE
from twellctl.report.charts import short_name

BITS4 = {"bits": 4, "group_size": 16}
FITS = {"plain": {}, "4 bits": BITS4, "SiLU in 4 bits": BITS4 | {"keep_activation": True}}
EXPORTS = {name: (name, None) for name in FITS} | {"FP8": ("plain", "fp8")}
PROMPT = "import os\n\ndef main"
pytestmark = pytest.mark.usefixtures("no_answers")


@pytest.fixture(scope="module")
def fits(silu_llama, text_file, tmp_path_factory):
    """By name; read only."""
    return fits_of(silu_llama, text_file, tmp_path_factory, FITS)


@pytest.fixture(scope="module")
def exports(fits, silu_llama, tmp_path_factory):
    """With the original, by name; read only."""
    found = {}
    for name, (fit, quantize) in EXPORTS.items():
        found[name] = tmp_path_factory.mktemp("exports") / "model"
        how = {"quantize": quantize, "with_original": True, "original": silu_llama}
        assert export(fits[fit], found[name], **how).has_original
    return found


def names_in(folder) -> dict[str, set[str]]:
    """The tensors of each file, by its path in the folder."""
    found = {}
    for file in folder.rglob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found[file.relative_to(folder).as_posix()] = {*opened.keys()}
    return found


@pytest.mark.parametrize("name", EXPORTS)
def test_the_original_is_whole_and_what_is_equal_lies_once(exports, silu_llama, name):
    folder = exports[name]
    original = open_checkpoint(folder / ORIGINAL)
    assert fingerprint(original) == fingerprint(open_checkpoint(silu_llama))
    files = names_in(folder)
    own = set.union(*(names for file, names in files.items() if file.startswith(ORIGINAL)))
    shared = original.tensors.keys() - own
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= shared
    is_of_ffns = {part for part in own if ".mlp." in part}
    rest = own - is_of_ffns
    assert is_of_ffns
    if name == "plain":
        assert not rest
    else:
        assert rest
        assert all(".self_attn." in part and "_proj." in part for part in rest)
    # no file that both read holds what only one of them does
    for file in {tensor.shard for tensor in original.tensors.values() if tensor.name in shared}:
        assert files[file.removeprefix("../")] <= shared


@pytest.mark.parametrize("name", EXPORTS)
def test_exact_answers_need_no_other_folder(exports, silu_llama, name, tmp_path, monkeypatch):
    monkeypatch.setattr("twellctl.decoding.tally.Pace", lambda *given: Pace(Drafts(4)))
    known = load(silu_llama, stable=True)
    moved = shutil.copytree(exports[name], tmp_path / "elsewhere")
    loaded = load(moved, exact=True)
    for how in ({}, {"temperature": 0.9, "seed": 5}):
        made = loaded.generate(PROMPT, max_tokens=30, **how)
        assert made.text() == known.generate(PROMPT, max_tokens=30, **how).text()
    assert loaded.scheduler.tally.drafted.num_kept > 0


def test_transformers_loads_the_fit_and_the_original(exports, fits, silu_llama, tmp_path):
    alone = tmp_path / "alone"
    export(fits["plain"], alone)
    ids = torch.arange(40).view(2, 20)
    folder = exports["plain"]
    with torch.no_grad():
        for one, other in ((folder, alone), (folder / ORIGINAL, silu_llama)):
            logits = [
                AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
                for path in (one, other)
            ]
            assert torch.equal(*logits)


def test_transformers_loads_a_draft_in_4_bits_beside_its_original(exports, fits, silu_llama):
    pytest.importorskip("compressed_tensors", reason="the reader of this format")
    folder, ids = exports["SiLU in 4 bits"], torch.arange(40).view(2, 20)
    with torch.no_grad(), quiet_transformers():
        for one, other in ((folder, fits["SiLU in 4 bits"]), (folder / ORIGINAL, silu_llama)):
            logits = [
                AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (one, other)
            ]
            assert torch.equal(*logits)


def test_files_are_parted_where_they_would_be_too_large(fits, silu_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_writer, "SHARD_BYTES", 60_000)
    out = tmp_path / "out"
    export(fits["plain"], out, with_original=True, original=silu_llama)
    assert len(names_in(out)) > 4
    assert fingerprint(open_checkpoint(out / ORIGINAL)) == fingerprint(open_checkpoint(silu_llama))
    assert fingerprint(open_checkpoint(out)) == fingerprint(open_checkpoint(fits["plain"]))


def test_the_command_the_card_and_the_doctor_say_so(success, fits, silu_llama, tmp_path):
    out = tmp_path / "out"
    words = ("export", fits["plain"], out, "--with-original", "--original", silu_llama)
    said, _ = success(*words)
    assert "it holds its original, too, whose answers it drafts with --exact" in said
    assert said.splitlines()[-1] == f"next: twellctl generate {out} PROMPT --exact"
    assert "twellctl serve-local out --exact" in (out / "README.md").read_text()
    *_, found = doctor(out).folder
    assert (found.name, found.state) == ("original", "ok")
    assert " tensors are this model's: for --exact" in found.what
    success(*words, "--overwrite")
    success("generate", out, PROMPT, "--exact", "--max-tokens", 3)
    with json_in(out / ORIGINAL / "config.json") as config:
        config["rms_norm_eps"] = 0.5
    assert [one.state for one in doctor(out).folder if one.name == "original"] == ["bad"]


def test_eval_compares_with_the_original_in_the_folder(exports, tmp_path):
    prompts = jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"What is {i}?"} for i in range(2)])
    done = evaluate(exports["plain"], prompts=prompts)
    assert done.reference == str(exports["plain"] / ORIGINAL)
    assert short_name(done.reference) == f"{exports['plain'].name}/{ORIGINAL}"
    assert done.acceptance == done.answers.same_top


def test_a_snapshot_in_the_cache_of_the_hub(exports, silu_llama, tmp_path):
    """Its files are links to blobs."""
    snapshot, blobs = tmp_path / "models--a--b/snapshots/c", tmp_path / "models--a--b/blobs"
    blobs.mkdir(parents=True)
    for number, file in enumerate(sorted(exports["plain"].rglob("*"))):
        if file.is_file():
            shutil.copyfile(file, blobs / str(number))
            link = snapshot / file.relative_to(exports["plain"])
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blobs / str(number))
    known = load(silu_llama, stable=True).generate(PROMPT, max_tokens=9).text()
    assert load(snapshot, exact=True).generate(PROMPT, max_tokens=9).text() == known
    export(snapshot, tmp_path / "out", with_original=True)
    original = open_checkpoint(tmp_path / "out" / ORIGINAL)
    assert fingerprint(original) == fingerprint(open_checkpoint(silu_llama))


def test_all_of_the_original_is_fetched_from_the_hub(exports, tmp_path, monkeypatch):
    model = shutil.copytree(exports["plain"], tmp_path / "model")
    (model / ORIGINAL / "LICENSE").write_text("MIT")
    fetched = tmp_path / "fetched"

    def fetch(name, revision, allow_patterns):
        files = [file.relative_to(model) for file in model.rglob("*") if file.is_file()]
        for file in filter_repo_objects(map(str, files), allow_patterns=allow_patterns):
            (fetched / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(model / file, fetched / file)
        return str(fetched)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert open_checkpoint("owner/model").path == fetched
    there, known = ({file.name for file in (one / ORIGINAL).iterdir()} for one in (fetched, model))
    assert there == known


def test_an_export_again_takes_the_original_along(exports, silu_llama, tmp_path):
    out = tmp_path / "again"
    export(exports["plain"], out, with_original=True)
    assert fingerprint(open_checkpoint(out / ORIGINAL)) == fingerprint(open_checkpoint(silu_llama))
    export(exports["plain"], tmp_path / "without")
    assert not (tmp_path / "without" / ORIGINAL).exists()


def test_run_puts_its_own_model_there(success, silu_llama, text_file, tmp_path):
    convert_by = {key.replace("_", "-"): value for key, value in QUICK.items()}
    steps = {
        "model": str(silu_llama),
        "out": str(tmp_path / "out"),
        "convert": {"data": str(text_file), **convert_by},
        "export": {"with-original": True},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(steps))
    success("run", tmp_path / "run.yaml")
    exported = tmp_path / "out/exported"
    assert open_checkpoint(exported / ORIGINAL).activation == "silu"
    size = sum(file.stat().st_size for file in exported.rglob("*.safetensors"))
    assert f"{size / 1e9:.3g} GB in exported/" in (tmp_path / "out/report.html").read_text()
    again = {"model": str(exported), "out": str(tmp_path / "again"), "export": steps["export"]}
    (tmp_path / "again.yaml").write_text(json.dumps(again))
    success("run", tmp_path / "again.yaml")
    assert open_checkpoint(tmp_path / "again/exported" / ORIGINAL).activation == "silu"
    steps["out"] = str(tmp_path / "rounded")
    steps["convert"] |= {"bits": 4, "group-size": 16, "keep-activation": True}
    (tmp_path / "rounded.yaml").write_text(json.dumps(steps))
    said, _ = success("run", tmp_path / "rounded.yaml")
    exported = tmp_path / "rounded/exported"
    assert f"{exported}: the model in 4 bits, every neuron is computed" in said
    assert said.splitlines()[-1] == f"next: twellctl generate {exported} PROMPT --exact"
    assert fingerprint(open_checkpoint(exported / ORIGINAL)) == fingerprint(
        open_checkpoint(silu_llama)
    )


# ---- what is refused ----


def test_an_original_that_does_not_belong(fits, relu_llama, silu_llama, make_model, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="is for exact answers: add --with-original"):
        export(fits["plain"], out, original=silu_llama)
    with pytest.raises(TwellError, match="is not a fit"):
        export(relu_llama, out, with_original=True, original=silu_llama)
    with pytest.raises(TwellError, match="name that with --original MODEL"):
        export(fits["plain"], out, with_original=True)
    with pytest.raises(TwellError, match=r"changed after that: lm_head.weight differs"):
        export(fits["plain"], out, with_original=True, original=make_model("llama", seed=1))
    changed = shutil.copytree(fits["plain"], tmp_path / "changed")
    with weights_in(changed) as weights:
        weights["model.layers.1.self_attn.v_proj.weight"][0, 0] += 1
    with pytest.raises(TwellError, match=r"model.layers.1.self_attn.v_proj.weight differs"):
        export(changed, out, with_original=True, original=silu_llama)
    rounded = fits["SiLU in 4 bits"]
    with pytest.raises(TwellError, match="name that with --original MODEL"):
        export(rounded, out, with_original=True)
    with pytest.raises(TwellError, match=r"nowhere does not exist: give a model folder"):
        export(rounded, out, with_original=True, original=tmp_path / "nowhere")
    with pytest.raises(TwellError, match=r"changed after that: lm_head.weight differs"):
        export(rounded, out, with_original=True, original=make_model("llama", seed=1))
    with pytest.raises(TwellError, match="is quantised already"):
        export(rounded, out, with_original=True, original=fits["4 bits"])
    assert [*tmp_path.iterdir()] == [changed]


def test_files_of_the_folder_above_are_for_an_original_alone(exports, tmp_path):
    folder = shutil.copytree(exports["plain"], tmp_path / "model")
    (folder / ORIGINAL).rename(folder / "other")
    with pytest.raises(TwellError, match=r"names \.\./model.*, outside the folder"):
        open_checkpoint(folder / "other")
    (folder / "other").rename(folder / ORIGINAL)
    index = folder / ORIGINAL / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("../model", "../../model"))
    with pytest.raises(TwellError, match=r"names \.\./\.\./model.*, outside the folder"):
        open_checkpoint(folder / ORIGINAL)
    assert not (folder / ORIGINAL / SINGLE).exists()


def test_an_original_can_be_fitted_from_there(exports, text_file, tmp_path):
    convert(exports["plain"] / ORIGINAL, tmp_path / "fit", data=[str(text_file)], **QUICK)
    again = open_checkpoint(tmp_path / "fit")
    assert fingerprint(again) == fingerprint(open_checkpoint(exports["plain"]))


def test_an_original_is_not_converted_from_there(exports, tmp_path):
    with pytest.raises(TwellError, match="has its attention in the folder above: take the model"):
        convert(exports["plain"] / ORIGINAL, tmp_path / "relu")
