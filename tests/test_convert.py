"""convert: only the activation changes, for every family, without touching or loading a weight."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from twellctl.convert import convert
from twellctl.errors import TwellError
from twellctl.models.checkpoint import open_checkpoint

TOP_MEMORY = "print([l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')][0])"


def run(*words, code: str = "", **environment) -> subprocess.CompletedProcess:
    """The command line in a process of its own; `code` runs there at the end, on stdout."""
    program = f"""
import sys
from twellctl.cli.main import main
try:
    main()
finally:
    {code or "pass"}
"""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3"])
def test_logits_are_those_of_the_same_weights_with_relu(make_model, tmp_path, family):
    source = make_model(family, seed=1)
    convert(source, tmp_path / "out")
    ids = torch.randint(0, 512, (2, 17))
    expected = AutoModelForCausalLM.from_pretrained(source, hidden_act="relu")(ids).logits
    silu = AutoModelForCausalLM.from_pretrained(source)(ids).logits
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model(ids).logits, expected)
    assert not torch.allclose(expected, silu)
    twell = json.loads((tmp_path / "out/config.json").read_text())["twell"]
    assert twell == {"format_version": 1, "tile": 256, "slots": [64, 64], "source_act": "silu"}


@pytest.mark.parametrize("chats", [True, False])
def test_it_says_what_comes_next(cli, silu_llama, tmp_path, chats):
    source = tmp_path / "silu"
    shutil.copytree(silu_llama, source)
    if not chats:
        (source / "chat_template.jinja").unlink()
    out = tmp_path / "relu"
    code, said, (advice,) = cli("convert", source, out)
    write = f"twellctl write {source} own.jsonl --prompts FILE, then "
    fit = f"twellctl convert {source} {out} --overwrite --data"
    assert code == 0
    follows = f"next: twellctl finetune {out} OUT --recipe standard --data FILE"
    assert said.splitlines()[-1] == follows
    assert advice == (
        "such a model talks noise until it is fitted or fine-tuned; to fit it: "
        f"{write if chats else ''}{fit} {'own.jsonl' if chats else 'FILE'}"
    )


def test_weights_of_a_sharded_model(make_model, tmp_path):
    source, out = make_model("qwen2", shard_size="40KB"), tmp_path / "out"
    convert(source, out)
    shards = sorted(path.name for path in source.glob("*.safetensors"))
    assert len(shards) > 2
    assert sorted(path.name for path in out.glob("*.safetensors")) == shards
    for name in (*shards, "model.safetensors.index.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, out))
    assert after.pop("twell")["source_act"] == before.pop("hidden_act")
    assert after.pop("hidden_act") == "relu"
    assert after == before
    assert len(AutoTokenizer.from_pretrained(out)) == len(AutoTokenizer.from_pretrained(source))


def test_weights_are_not_shared_with_the_source(silu_llama, tmp_path):
    source = Path(shutil.copytree(silu_llama, tmp_path / "model"))
    was = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").chmod(0o644)
    convert(source, tmp_path / "out")
    with (source / "model.safetensors").open("r+b") as weights:
        weights.seek(-4, os.SEEK_END)
        weights.write(b"\0\0\0\0")
    assert (tmp_path / "out/model.safetensors").read_bytes() == was


def test_a_folder_without_a_tokenizer(silu_llama, tmp_path):
    source = Path(shutil.copytree(silu_llama, tmp_path / "model"))
    for path in source.glob("tokenizer*"):
        path.unlink()
    convert(source, tmp_path / "out")
    assert not list((tmp_path / "out").glob("tokenizer*"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads peak memory from /proc")
def test_memory_and_imports(silu_llama, tmp_path):
    """A checkpoint of a quarter of a GB takes less than 200 MB, and no torch."""
    source = Path(shutil.copytree(silu_llama, tmp_path / "model"))
    weights = source / "model.safetensors"
    weights.chmod(0o644)
    with weights.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name[0] != "_")
        offsets = [end, end + (1 << 28)]
        header["big"] = {"dtype": "BF16", "shape": [1 << 13, 1 << 14], "data_offsets": offsets}
        text = json.dumps(header).encode()
        file.seek(0)
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offsets[1])
    loaded = "print(*{'torch', 'transformers'} & set(sys.modules), 'none')"
    done = run("convert", "--quiet", source, tmp_path / "out", code=f"{loaded}; {TOP_MEMORY}")
    *_, modules, kilobytes = done.stdout.splitlines()
    assert (done.returncode, done.stderr, modules) == (0, "", "none")
    assert int(kilobytes) < 200_000


def test_help_is_quick_and_light():
    heavy = "{'torch', 'transformers', 'numpy', 'asyncio', 'aiohttp'}"
    loaded = f"print(*{heavy} & set(sys.modules), 'none')"
    seconds = "import time; print(time.process_time())"
    for _ in range(10):  # a busy machine may be slow for a while
        *lines, modules, used = run("--help", code=f"{loaded}; {seconds}").stdout.splitlines()
        assert any("Make a model sparse" in line for line in lines)
        assert modules == "none"
        if float(used) < 0.5:
            return
    pytest.fail(f"{used} s")


def test_a_hub_id_that_cannot_be_fetched(tmp_path):
    done = run("convert", "--quiet", "nobody/nothing", tmp_path / "out", HF_HUB_OFFLINE="1")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    words = "is not a local folder and could not be fetched from the hub (check the id"
    assert f"nobody/nothing {words}" in done.stderr
    assert not (tmp_path / "out").exists()


def test_for_a_mistyped_folder_the_error_lists_what_is_there(tmp_path, monkeypatch):
    (tmp_path / "demo/silu").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: 1 / 0)
    with pytest.raises(TwellError, match=r"not a local folder \(demo holds silu\) and could not"):
        open_checkpoint("demo/sillu")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("bench", "fnn"), "No such command 'fnn'"),
        (("convert",), "Missing argument 'MODEL'"),
        (("convert", "model", "out", "--speed"), "No such option: --speed"),
    ],
)
def test_usage(refusal, words, message):
    said = refusal(*words, code=2)
    assert message in said
    assert "--help" in said
