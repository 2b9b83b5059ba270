"""What killed commands left behind: changed inputs are refused, and damage is an error of one line.

Or what is damaged is made again. Nothing that ends well is another model.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from edits import json_in, jsonl, weights_in
from finetune_runs import SMALL, InterruptAt, small
from safetensors.torch import load_file, save_file

from twellctl.convert import convert
from twellctl.errors import TwellError, UsageError
from twellctl.files import made_of
from twellctl.files.made_of import Record, digest_of
from twellctl.finetune import Interrupted, finetune
from twellctl.training.recipe import resolve_recipe
from twellctl.write import write

pytestmark = pytest.mark.usefixtures("no_answers")

FIT = {"tokens": 1024, "seq_len": 32, "eval_windows": 2, "steps": 0, "density": 1.0}
ANSWERS = {"max_tokens": 6, "batch_size": 4}


class Killed(BaseException):
    pass


def killed(command, *given, **how):
    with pytest.raises(Killed):
        command(*given, **how)


def after(calls: int):
    """What is called so often, and then no more."""
    left = [calls]

    def call(*_):
        left[0] -= 1
        if not left[0]:
            raise Killed

    return call


@pytest.fixture(scope="module")
def fits(make_model, text_file, tmp_path_factory):
    """(model, text, a whole OUT, OUT.run of one killed before its end, one of another text)."""
    folder, model = tmp_path_factory.mktemp("fits"), make_model("llama")
    other = folder / "other.jsonl"
    other.write_text("\n".join(text_file.read_text().splitlines()[::-1]))
    convert(model, folder / "whole", data=[text_file], **FIT)
    for name, text in (("out", text_file), ("foreign", other)):
        killed(convert, model, folder / name, data=[text], progress=after(3), **FIT)
    return model, text_file, folder / "whole", folder / "out.run", folder / "foreign.run"


def cut(path: Path, share: float = 0.5) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def of_another_shape(path: Path) -> None:
    halves = {name: tensor[: len(tensor) // 2].clone() for name, tensor in load_file(path).items()}
    save_file(halves, path, {"format": "pt", "figures": '{"fires": 0.1}'})


def beyond_the_vocabulary(path: Path) -> None:
    ids = np.fromfile(path, np.int32)
    ids[::9] = 70_000
    ids.tofile(path)


def foreign(path: Path, other: Path) -> None:
    shutil.copy(other / path.name, path)


SECOND, TOKENS, RECORD = "layer-001.safetensors", "tokens.bin", "run.json"
AGAIN = " is damaged or missing: remove it, and the same command makes it again"
OF_A_FIT = [
    ("layer cut", SECOND, cut, AGAIN),
    ("layer empty", SECOND, lambda path: cut(path, 0), AGAIN),
    ("layer with one bit flipped", SECOND, flipped, AGAIN),
    ("layer of another shape", SECOND, of_another_shape, AGAIN),
    ("layer without metadata", SECOND, lambda path: save_file(load_file(path), path), AGAIN),
    ("layer of another run", SECOND, foreign, AGAIN),
    ("layer gone", SECOND, Path.unlink, None),
    ("tokens cut by a half", TOKENS, cut, AGAIN),
    ("tokens of another text", TOKENS, foreign, AGAIN),
    ("tokens beyond the vocabulary", TOKENS, beyond_the_vocabulary, AGAIN),
    ("tokens gone", TOKENS, Path.unlink, None),
    ("record cut", RECORD, cut, " is not valid JSON"),
    ("record of another run", RECORD, foreign, "(text): give the same, or start again with --ov"),
    ("record gone", RECORD, Path.unlink, "is not a run of this version of twellctl (no run.json"),
    ("record without parts", RECORD, lambda path: path.write_text("{}"), "by another version"),
]


@pytest.mark.parametrize(("name", "file", "harm", "said"), OF_A_FIT, ids=[n for n, *_ in OF_A_FIT])
def test_a_damaged_fit(fits, tmp_path, name, file, harm, said):
    model, text, whole, run, other = fits
    shutil.copytree(run, tmp_path / "out.run")
    harm(tmp_path / "out.run" / file, *[other] * (harm is foreign))
    if said is None:
        convert(model, tmp_path / "out", data=[text], **FIT)
        made, good = (out / "model.safetensors" for out in (tmp_path / "out", whole))
        assert made.read_bytes() == good.read_bytes()
        return
    with pytest.raises(TwellError) as error:
        convert(model, tmp_path / "out", data=[text], **FIT)
    assert said in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_fit_goes_on_with_the_same_model_and_text_wherever_they_are(fits, make_model, tmp_path):
    model, text, whole, run, _ = fits
    shutil.copytree(run, tmp_path / "out.run")
    moved, corrected = shutil.copytree(model, tmp_path / "model"), tmp_path / "text.jsonl"
    corrected.write_text(text.read_text().replace("import", "export", 1))
    other = make_model("llama")
    with weights_in(other) as tensors:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 3] += 0.1
    for source, data, what in ((other, text, "model"), (moved, corrected, "text")):
        with pytest.raises(
            UsageError, match=rf"other settings or inputs \({what}\): give the same"
        ):
            convert(source, tmp_path / "out", data=[data], **FIT)
    shutil.copy(text, corrected)
    made = convert(moved, tmp_path / "out", data=[corrected], **FIT)
    assert made.fitted.kept == 2
    assert digest_of([tmp_path / "out/model.safetensors"]) == digest_of(
        [whole / "model.safetensors"]
    )


def test_layers_behind_one_that_is_gone_are_fitted_again(fits, tmp_path):
    model, text, _, run, _ = fits
    shutil.copytree(run, tmp_path / "out.run")
    (tmp_path / "out.run/layer-000.safetensors").unlink()
    assert convert(model, tmp_path / "out", data=[text], **FIT).fitted.kept == 0


@pytest.fixture(scope="module")
def trained(relu_llama, text_file, tmp_path_factory):
    """OUT.run of a run of `finetune` that was interrupted at step 4, and one of another text."""
    folder = tmp_path_factory.mktemp("trained")
    other = folder / "other.jsonl"
    other.write_text("\n".join(text_file.read_text().splitlines()[::-1]))
    for name, text in (("out", text_file), ("foreign", other)):
        recipe = small(text, save_steps=2, max_steps=6)
        with pytest.raises(Interrupted):
            finetune(relu_llama, folder / name, recipe, progress=InterruptAt(4))
    return folder / "out.run", folder / "foreign.run"


def without_gates(path: Path) -> None:
    with json_in(path) as state:
        del state["gates"]


LAST, STATE = "checkpoint-4/", "checkpoint-4/twell_state.json"
ANOTHER = ": remove that checkpoint, and --resume from another"
OF_A_RUN = [
    ("weights flipped", LAST + "model.safetensors", flipped, "is damaged or missing" + ANOTHER),
    ("optimizer cut", LAST + "optimizer.pt", cut, "optimizer.pt is damaged or missing" + ANOTHER),
    ("optimizer gone", LAST + "optimizer.pt", Path.unlink, "is damaged or missing" + ANOTHER),
    ("state without its gates", STATE, without_gates, "damaged, or of another run" + ANOTHER),
    ("state of another run", STATE, foreign, "damaged, or of another run" + ANOTHER),
    ("checkpoint renamed", LAST, lambda p: p.rename(p.parent / "checkpoint-5"), "of another run"),
    ("tokens cut", TOKENS, cut, AGAIN),
    ("record gone", RECORD, Path.unlink, "has no run.json, it is damaged or of another version"),
    ("record of another run", RECORD, foreign, "other settings or inputs (data): give the same"),
    ("recipe gone", "recipe.yaml", Path.unlink, "holds no run to resume: leave --resume out"),
    ("metrics of others", "metrics.jsonl", lambda path: path.write_text("7\n"), "is damaged"),
]


@pytest.mark.parametrize(("name", "file", "harm", "said"), OF_A_RUN, ids=[n for n, *_ in OF_A_RUN])
def test_a_damaged_run(trained, relu_llama, text_file, tmp_path, name, file, harm, said):
    run, other = trained
    shutil.copytree(run, tmp_path / "out.run")
    path = tmp_path / "out.run" / file
    harm(path, *[(other / file).parent] * (harm is foreign))
    recipe = small(text_file, save_steps=2, max_steps=6)
    with pytest.raises(TwellError) as error:
        finetune(relu_llama, tmp_path / "out", recipe, resume=True)
    assert said in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_checkpoint_holds_nothing_up(trained, relu_llama, text_file, tmp_path):
    shutil.copytree(trained[1], tmp_path / "out.run")
    for path in tmp_path.glob("out.run/checkpoint-*"):
        shutil.rmtree(path)
    recipe = resolve_recipe(None, SMALL | {"data": [str(text_file)], "max_steps": 2})
    finetune(relu_llama, tmp_path / "out", recipe, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.fixture(scope="module")
def answers(silu_llama, tmp_path_factory):
    """(prompts, a whole OUT, one that was killed after seven rows)."""
    folder = tmp_path_factory.mktemp("answers")
    rows = ({"prompt": f"What is {i}{' and more' * (i % 5)}?"} for i in range(20))
    prompts = jsonl(folder / "prompts.jsonl", rows)
    write(silu_llama, folder / "whole.jsonl", prompts=prompts, **ANSWERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["twellctl.write"], "_SHOWN_EVERY", 0)
        progress = after(7)
        killed(
            write, silu_llama, folder / "out.jsonl", prompts=prompts, progress=progress, **ANSWERS
        )
    assert len((folder / "out.jsonl").read_text().splitlines()) == 7
    return prompts, folder / "whole.jsonl", folder / "out.jsonl"


def of_lines(change):
    def harm(path: Path) -> None:
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    return harm


OF_ANSWERS = [
    ("nothing", lambda path: None, None),
    ("last line cut", lambda path: cut(path, 0.98), None),
    ("first line cut", lambda path: cut(path, 0.02), None),
    ("empty", lambda path: cut(path, 0), None),
    ("a line less", of_lines(lambda lines: lines[1:]), None),
    ("zeros at the end", of_lines(lambda lines: [*lines, b"\0" * 9]), None),
    ("a line twice", of_lines(lambda lines: [*lines, lines[0]]), "twice: choose another name, or"),
    (
        "no JSON",
        of_lines(lambda lines: [*lines, b"{]\n", *lines]),
        "out.jsonl:8 is damaged: choose",
    ),
    ("others' row", of_lines(lambda lines: [*lines, b'{"text": "a"}\n']), "out.jsonl:8 is damaged"),
    ("others' file", of_lines(lambda lines: [b"a\n", *lines]), "is no text that write has written"),
]


@pytest.mark.parametrize(("name", "harm", "said"), OF_ANSWERS, ids=[n for n, *_ in OF_ANSWERS])
def test_answers_go_on(answers, silu_llama, tmp_path, name, harm, said):
    prompts, whole, begun = answers
    out, notes = tmp_path / "out.jsonl", []
    shutil.copy(begun, out)
    harm(out)
    before = out.read_bytes()
    how = ANSWERS | {"prompts": prompts, "note": notes.append}
    if said is None:
        done = write(silu_llama, out, **how)
        assert out.read_bytes() == whole.read_bytes()
        assert (done.texts, done.drawn < done.tokens) == (20, True)
        assert b"unfinished" not in out.read_bytes()
        if name == "nothing":
            assert notes == [f"{out}: going on after 7 texts"]
        return
    with pytest.raises(TwellError) as error:
        write(silu_llama, out, **how)
    assert said in str(error.value)
    assert out.read_bytes() == before


def test_answers_to_other_prompts_are_refused(answers, silu_llama, make_model, tmp_path):
    prompts, _, begun = answers
    out, others = tmp_path / "out.jsonl", tmp_path / "prompts.jsonl"
    shutil.copy(begun, out)
    others.write_text(prompts.read_text().replace("What", "Who", 1))
    for model, asked, more, what in (
        (make_model("llama", seed=1), prompts, {}, "model"),
        (silu_llama, others, {}, "prompts"),
        (silu_llama, prompts, {"seed": 1}, "seed"),
        (silu_llama, prompts, {"chat_template_kwargs": {"a": 1}}, "chat-template-kwargs"),
    ):
        with pytest.raises(
            UsageError, match=rf"other settings or inputs \({what}\): choose another"
        ):
            write(model, out, prompts=asked, **ANSWERS | more)
    assert out.read_bytes() == begun.read_bytes()
    write(silu_llama, out, prompts=others, **ANSWERS, overwrite=True)
    assert len(out.read_text().splitlines()) == 20


def test_a_digest_is_of_content_and_suffix(tmp_path, monkeypatch):
    one, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path in (one, other):
        path.write_text("text")
    assert digest_of([one]) == digest_of([other])
    assert digest_of([one]) != digest_of([one, other])
    assert digest_of([one]) != digest_of([other.rename(tmp_path / "b.txt")])
    before = digest_of([one])
    one.write_text("TEXT!")
    assert digest_of([one]) != before
    with pytest.raises(TwellError, match=r"b\.jsonl cannot be read: No such file"):
        digest_of([other])
    monkeypatch.setattr(made_of, "WHOLE", 3)  # too much to be read: size and time count
    before = digest_of([one])
    one.write_text("texts")
    os.utime(one, ns=(1, 1))
    assert digest_of([one]) != before


def test_a_record_knows_what_lies_in_its_folder(tmp_path):
    (tmp_path / "a").write_text("a")
    Record.begin(tmp_path, {"text": "1", "steps": (2, 3)}, "a")
    record = Record.read(tmp_path)
    record.refuse_other({"text": "1", "steps": [2, 3]})
    with pytest.raises(UsageError, match=r"inputs \(text, seed\): give the same, or start again"):
        record.refuse_other({"text": "2", "steps": (2, 3), "seed": 0})
    assert json.loads((tmp_path / "run.json").read_text())["files"].keys() == {"a"}
    (tmp_path / "a").write_text("b")
    with pytest.raises(TwellError, match="a is damaged or missing: remove it"):
        record.leave("a")
