"""quickstart: the real job as a newcomer gets it, and what it says when it falls short."""

import importlib.util
import json

import pytest
from compiled import EVERY_CASE
from transformers import AutoModelForCausalLM

from twellctl import quickstart as module
from twellctl.cli.run_report import write_report
from twellctl.finetune import Interrupted
from twellctl.quickstart import quickstart
from twellctl.screens.make import quickstarted


@pytest.fixture
def third(request, monkeypatch):
    """A third of its text, fewer and smaller steps, whose price need not climb; no answers."""
    if EVERY_CASE:
        return
    request.getfixturevalue("no_answers")
    resolve, less = module.resolve_recipe, {"max_steps": 40, "l1": 1e-2, "eval_blocks": 16}
    less |= {"batch_size": 4, "micro_batch_size": 4}
    monkeypatch.setattr(module, "CORPUS_CHARACTERS", 700_000)
    monkeypatch.setattr(module, "STEPS", 70)
    monkeypatch.setattr(module, "BATCH", 4)
    monkeypatch.setattr(module, "FIT", module.FIT | {"tokens": 8192, "steps": 2})
    monkeypatch.setattr(module, "resolve_recipe", lambda name, flags: resolve(name, flags | less))


@pytest.mark.timeout(900)
def test_the_whole_job(third, tmp_path, capsys):
    out = tmp_path / "demo"
    done = quickstart(out)
    assert done.density < 0.15
    assert done.density < done.relu_density < 0.6
    quickstarted(done, out / "report.html")
    shown = capsys.readouterr().out
    assert f"next: open {out}/report.html in a browser" in shown
    assert f"{done.relu_density:.2%}" in shown
    assert "(on held-out text; training steers what fires " in shown
    assert done.sparse_loss <= done.silu_loss + 0.15
    assert done.relu_loss > done.silu_loss or not EVERY_CASE
    assert done.relu_loss not in (done.silu_loss, done.sparse_loss)
    assert done.text.startswith("def ")
    assert 2 * len("".join(done.text.split())) > len(done.text)  # no run of spaces
    names = {path.name for path in out.iterdir()}
    assert names == {
        "silu",
        "relu",
        "sparse",
        "export",
        "profile.json",
        "train.jsonl",
        "val.jsonl",
    }
    write_report(out)
    page = (out / "report.html").read_text()
    assert "What fine-tuning changed" in page
    assert f"<td>{done.sparse_loss:.4f}</td><td>{done.density:.2%}</td>" in page
    assert ("relu: fitted layer by layer" in page) == (
        importlib.util.find_spec("matplotlib") is not None
    )
    (out / "report.html").unlink()
    profile = json.loads((out / "profile.json").read_text())
    assert (profile["model"], profile["data"]) == ("sparse", ["val.jsonl"])
    assert list(tmp_path.iterdir()) == [out]
    twell = json.loads((out / "export/config.json").read_text())["twell"]
    assert twell["slots"] == [layer["slots"] for layer in profile["layers"]]
    assert AutoModelForCausalLM.from_pretrained(out / "export").config.hidden_act == "silu"


@pytest.mark.parametrize("stop", [ZeroDivisionError(), KeyboardInterrupt(), Interrupted("at 3")])
def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch, stop):
    def stopped(*args):
        raise stop

    monkeypatch.setattr(module, "_write_corpus", lambda folder: (folder / "some").touch())
    monkeypatch.setattr(module, "_train_silu", stopped)
    wanted = KeyboardInterrupt if isinstance(stop, Interrupted) else type(stop)
    with pytest.raises(wanted):
        quickstart(tmp_path / "demo")
    assert list(tmp_path.iterdir()) == []
    old = tmp_path / "demo"
    (old / "export").mkdir(parents=True)
    (old / "export" / "config.json").write_text('{"twell": {}}')
    (old / "precious").touch()
    with pytest.raises(wanted):
        quickstart(old, overwrite=True)
    assert (old / "precious").exists()
    assert list(tmp_path.iterdir()) == [old]


def test_an_existing_folder_is_kept(cli, tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "silu").mkdir()
    for extra in ([], ["--overwrite"]):
        code, _, stderr = cli("quickstart", "--out", tmp_path, *extra)
        assert code == 1
        assert len(stderr) == 1
    assert (tmp_path / "mine").read_text() == "mine"
