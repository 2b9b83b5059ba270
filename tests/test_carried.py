"""What goes from one model folder to the next: what a model needs, and nothing of this machine."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from edits import json_in
from finetune_runs import small
from transformers import AutoModelForCausalLM, AutoTokenizer

from twellctl.convert import convert
from twellctl.errors import TwellError
from twellctl.export import export
from twellctl.finetune import finetune
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.originals import opened_source

STRAY = ("train.jsonl", "notes.txt", "recipe.yaml", "LICENSE.key", "evil.py", "weights.onnx")
STRAY += ("pytorch_model.bin", "pytorch_model.bin.index.json", "modeling_x.py", ".cache", "a.gguf")
GOES = {"LICENSE", "NOTICE.txt", "USE_POLICY.md", "special_tokens_map.json"}
CARD = """---
license: llama3.2
license_name: 'the Llama licence'
license_link: LICENSE
model-index: {score: 100}
---
# The dense one

It scores 100.
"""


@pytest.fixture
def source(silu_llama, tmp_path) -> Path:
    """The tiny Llama among other files, some of which know where it lay."""
    folder = Path(shutil.copytree(silu_llama, tmp_path / "private" / "model"))
    for name in STRAY:
        (folder / name).write_text("mine")
    for name in GOES:
        (folder / name).write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("{}")
    (folder / "README.md").write_text(CARD)
    for name, key in (
        ("config.json", "_name_or_path"),
        ("tokenizer_config.json", "special_tokens_map_file"),
        ("generation_config.json", "_name_or_path"),
    ):
        with json_in(folder / name) as content:
            content[key] = str(folder)
    return folder


def test_no_path_and_no_stray_file_goes_out(source, text_file, tmp_path):
    chain = [tmp_path / name for name in ("relu", "sparse", "exported")]
    convert(source, chain[0])
    recipe = small(text_file, max_steps=1, eval_data=[str(text_file)], teacher=str(source))
    finetune(chain[0], chain[1], recipe)
    export(chain[1], chain[2])
    for folder in chain:
        names = {path.name for path in folder.iterdir()}
        assert names.isdisjoint({*STRAY} - {"recipe.yaml"})
        assert names > GOES | {"README.md", "tokenizer.json", "chat_template.jinja"}
        assert (folder / "additional_chat_templates/tool.jinja").is_file()
        for path in (path for path in folder.rglob("*") if path.is_file()):
            content = path.read_bytes()
            assert str(tmp_path).encode() not in content, path
            assert str(text_file).encode() not in content, path
    assert "recipe.yaml" not in {path.name for path in chain[2].iterdir()}
    assert AutoTokenizer.from_pretrained(chain[2])("a b").input_ids


FRONTS = ["", "- license", "license: a: b", "license: null", "license: {a: b}"]
FRONTS.append("license: " + "[" * 999)
CARDS = ["", "no front matter", "---\nlicense: never closed"]


def test_odd_cards_of_the_source(source, tmp_path):
    for card in CARDS + [f"---\n{front}\n---\n" for front in FRONTS]:
        (source / "README.md").write_text(card)
        convert(source, tmp_path / "relu", overwrite=True)
        assert "license" not in (tmp_path / "relu/README.md").read_text(), card[:30]


@pytest.mark.parametrize("knows_its_place", [True, False])
def test_side_files_may_hold_what_only_python_writes(source, tmp_path, knows_its_place):
    odd = {"model_max_length": float("inf"), "scale": float("nan"), "note": "\ud800"}
    odd |= {"name_or_path": str(tmp_path)} if knows_its_place else {}
    path = source / "tokenizer_config.json"
    saved = {
        k: v for k, v in json.loads(path.read_text()).items() if k != "special_tokens_map_file"
    }
    path.write_text(json.dumps(saved | odd))
    converted = convert(source, tmp_path / "out")
    assert converted.is_chat_model
    written = json.loads((tmp_path / "out" / path.name).read_text())
    odd.pop("name_or_path", None)
    assert saved["tokenizer_class"] == "TokenizersBackend"  # as older versions do not call it
    odd["tokenizer_class"] = "PreTrainedTokenizerFast"
    assert json.dumps(written) == json.dumps(saved | odd)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a b").input_ids


def test_nothing_of_a_foreign_config_is_code_or_text_of_a_card(source, text_file, tmp_path):
    bad = "A\n# Injected\n[x](http://evil)<script>ForCausalLM"
    for name, changes in (
        ("config.json", {"architectures": [bad], "auto_map": {"AutoConfig": "a/b--c.D"}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["a/b--t.T", None]}}),
        ("generation_config.json", {"custom_generate": "a/b", "auto_map": {}}),
    ):
        with json_in(source / name) as content:
            content |= changes
    link = "javascript:alert(1)"
    (source / "README.md").write_text(f"---\nlicense: <script>\nlicense_link: {link}\n---\n")
    chain = [tmp_path / name for name in ("relu", "sparse", "exported")]
    convert(source, chain[0])
    finetune(chain[0], chain[1], small(text_file, max_steps=1))
    export(chain[1], chain[2])
    for folder in chain:
        card = (folder / "README.md").read_text()
        assert not any(words in card for words in ("Injected", "evil", "script", "license"))
        assert "a/b" not in (folder / "tokenizer_config.json").read_text()
        assert "a/b" not in (folder / "generation_config.json").read_text()
    assert "auto_map" not in json.loads((chain[1] / "config.json").read_text())


@pytest.mark.parametrize("name", ["README.md", "tokenizer.json"])
def test_a_pipe_in_a_model_folder_is_not_waited_for(source, tmp_path, name):
    (source / name).unlink()
    os.mkfifo(source / name)
    if name == "README.md":
        convert(source, tmp_path / "out")
    else:
        with pytest.raises(TwellError, match=r"tokenizer\.json is not a regular file"):
            convert(source, tmp_path / "out")


def test_whether_it_chats_is_asked_before_out_is_there(source, tmp_path, monkeypatch):
    def fails(folder):
        assert not (tmp_path / "out").exists()
        raise TwellError("no")

    monkeypatch.setattr(sys.modules["twellctl.convert"], "has_chat_template", fails)
    with pytest.raises(TwellError, match="no"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["LICENSE", "tokenizer.json", "config.json", "model.safetensors"])
def test_a_link_out_of_the_folder_is_refused(source, refusal, tmp_path, name):
    secret = tmp_path / "secret"
    (source / name).rename(secret)
    (source / name).symlink_to(secret)
    said = refusal("convert", source, tmp_path / "out")
    assert f"{source / name} is a link to {secret}, outside its model folder" in said
    assert not (tmp_path / "out").exists()


def test_a_linked_card_is_not_read(source, tmp_path):
    (source / "README.md").rename(tmp_path / "secret")
    (source / "README.md").symlink_to(tmp_path / "secret")
    convert(source, tmp_path / "out")
    assert "llama3.2" not in (tmp_path / "out/README.md").read_text()


def test_a_linked_folder_of_templates_is_not_followed(source, tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "x.jinja").touch()
    shutil.rmtree(source / "additional_chat_templates")
    (source / "additional_chat_templates").symlink_to(tmp_path / "secret")
    with pytest.raises(TwellError, match="outside its model folder"):
        convert(source, tmp_path / "out")


def test_links_within_the_folder_work(source, tmp_path):
    (source / "files").mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        (source / name).rename(source / "files" / name)
        (source / name).symlink_to(Path("files") / name)
    (tmp_path / "link").symlink_to(source)
    convert(tmp_path / "link", tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("shared", [False, True])
def test_a_snapshot_of_the_hubs_cache_works(source, tmp_path, shared):
    """snapshots/REVISION/NAME leads to blobs/HASH, and that may lead to the blobs of all models."""
    hub = tmp_path / "hub"
    repository = hub / "models--owner--name"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(source.iterdir())):
        blob = repository / "blobs" / str(number)
        path.rename(blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
        if shared:
            (hub / "blobs" / "ab").mkdir(parents=True, exist_ok=True)
            blob.rename(hub / "blobs" / "ab" / str(number))
            blob.symlink_to(f"../../blobs/ab/{number}")
    convert(snapshot, tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert "license: llama3.2" in (tmp_path / "out/README.md").read_text()
    (snapshot / "LICENSE").unlink()
    (tmp_path / "secret").touch()
    (snapshot / "LICENSE").symlink_to(tmp_path / "secret")
    with pytest.raises(TwellError, match="outside its model folder"):
        convert(snapshot, tmp_path / "other")


def test_an_id_of_the_hub_stays(source, tmp_path, monkeypatch):
    monkeypatch.setattr("twellctl.models.checkpoint._download", lambda name, revision: source)
    convert("owner/name", tmp_path / "relu")
    export(tmp_path / "relu", tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["twell"]["source"] == "owner/name"
    card = (tmp_path / "out/README.md").read_text()
    assert "base_model: owner/name\nbase_model_relation: finetune\n" in card
    assert "[owner/name](https://huggingface.co/owner/name)" in card


def test_a_path_that_an_older_folder_holds_is_not_exported(relu_llama, tmp_path):
    folder = Path(shutil.copytree(relu_llama, tmp_path / "old"))
    with json_in(folder / "config.json") as config:
        config["twell"]["source"] = "/home/me/private/model"
    export(folder, tmp_path / "out")
    assert "source" not in json.loads((tmp_path / "out/config.json").read_text())["twell"]


def test_a_revision_of_the_hub_is_that_of_the_source(source, tmp_path, monkeypatch):
    asked = []

    def fetch(name, revision):
        asked.append((name, revision))
        return source

    monkeypatch.setattr("twellctl.models.checkpoint._download", fetch)
    convert("owner/name", tmp_path / "relu", revision="v2")
    export(tmp_path / "relu", tmp_path / "out")
    for made in ("relu", "out"):
        opened = opened_source(open_checkpoint(tmp_path / made))
        assert (opened.hub_id, opened.revision) == asked[-1] == ("owner/name", "v2")
    convert("owner/name", tmp_path / "newest")
    newest = open_checkpoint(tmp_path / "newest")
    assert "source_revision" not in newest.twell
    assert opened_source(newest).revision is None


CALLED, LINK = "gemma's & co (v1)", "https://x.y/z?a=b#c~d%20e"


@pytest.mark.parametrize(
    ("front", "known"),
    [
        ("license:\n- mit\n- apache-2.0", {"license": ["mit", "apache-2.0"]}),
        ("license : mit  # as the code", {"license": "mit"}),
        ("x: !!bool maybe\nlicense: mit\ntitle: a: b", {"license": "mit"}),
        (
            f"license: other\nlicense_name: {CALLED}\nlicense_link: {LINK}",
            {"license": "other", "license_name": CALLED, "license_link": LINK},
        ),
    ],
)
def test_a_licence_is_taken_as_yaml_has_it(source, tmp_path, front, known):
    (source / "README.md").write_text(f"---\n{front}\n--- \nscores\n")
    convert(source, tmp_path / "relu")
    card = (tmp_path / "relu/README.md").read_text()
    read = yaml.safe_load(card.split("---\n")[1])
    assert "scores" not in card
    assert {key: value for key, value in read.items() if key.startswith("license")} == known
