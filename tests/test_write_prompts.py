"""write --prompts on the CPU: people's prompts, answered by a model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from test_write import lines

from twellctl.errors import TwellError
from twellctl.generate import generate
from twellctl.models import loading
from twellctl.models.checkpoint import Checkpoint, open_checkpoint
from twellctl.text.reading import read_texts
from twellctl.text.tokens import encode_chat
from twellctl.write import write


def prompt_file(tmp_path, *rows) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ASKED = [[{"role": "user", "content": f"What is {i}{' and more' * i}?"}] for i in range(12)]
ASKED += [[{"role": "system", "content": "Be short."}, *ASKED[0], *ASKED[1]]]


def test_prompts_are_answered_as_generate_does(silu_llama, tokenizer, tmp_path):
    rows = [{"prompt": chat[0]["content"]} for chat in ASKED[:-1]] + [{"messages": ASKED[-1]}]
    rows[0] = {"instruction": ASKED[0][0]["content"], "input": "", "output": "of no use"}
    rows[1] = {"question": ASKED[1][0]["content"], "answer": "of no use"}
    file, out, said = prompt_file(tmp_path, *rows), tmp_path / "own.jsonl", []
    how = {"prompts": file, "max_tokens": 12, "batch_size": 4, "temperature": 0.0}
    done = write(silu_llama, out, **how, tokens=10**6, note=said.append)
    assert said == ["each prompt was answered once: greedily a second answer would be the same"]
    stock = loading.load_model(open_checkpoint(silu_llama))
    known = []
    for chat in ASKED:
        prompt = torch.tensor([encode_chat(tokenizer, chat)])
        ids = stock.generate(prompt, do_sample=False, max_new_tokens=12)[0, prompt.shape[1] :]
        text = tokenizer.decode(ids, skip_special_tokens=True).strip()
        known.append([*chat, {"role": "assistant", "content": text}])
    made = [row["messages"] for row in lines(out)]
    assert sorted(made, key=str) == sorted(known, key=str)
    assert (done.texts, done.cut) == (len(ASKED), len(ASKED))  # random models seldom end
    assert len(list(read_texts([str(out)], "text", tokenizer))) == len(ASKED)


def test_the_chat_template_knows_what_it_is_told(cli, silu_llama, tmp_path):
    model, out = tmp_path / "model", tmp_path / "own.jsonl"
    shutil.copytree(silu_llama, model)
    template = "{{ messages[0].content }}{% if thinks %} I think so:{% endif %}"
    (model / "chat_template.jinja").write_text(template)
    file, answers = prompt_file(tmp_path, {"prompt": "Is it?"}), []
    for given in ({"thinks": True}, {}):
        words = ["--max-tokens", 12, "--temperature", 0, "--overwrite", "--prompts", file]
        code, *_ = cli("write", model, out, *words, "--chat-template-kwargs", json.dumps(given))
        assert code == 0
        made = generate(model, "Is it?", max_tokens=12, chat_template_kwargs=given)
        answers.append(lines(out)[0]["messages"][1]["content"])
        assert answers[-1] == made.text().strip()
    assert answers[0] != answers[1]


def test_prompts_are_answered_again_by_other_draws(silu_llama, tmp_path):
    file = prompt_file(tmp_path, *({"messages": chat} for chat in ASKED))
    how = {"prompts": file, "max_tokens": 12, "batch_size": 4}
    once = write(silu_llama, tmp_path / "a.jsonl", **how)
    assert once.texts == len(ASKED)
    often = write(silu_llama, tmp_path / "b.jsonl", **how, tokens=3 * once.tokens)
    assert often.tokens >= 3 * once.tokens
    assert often.texts > 2 * len(ASKED)
    made = [str(row["messages"]) for row in lines(tmp_path / "b.jsonl")]
    assert len(set(made)) > 0.9 * len(made)


def test_a_sparse_model_answers(relu_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpoint, "is_only_converted", False)
    file = prompt_file(tmp_path, {"prompt": "Why?"}, {"prompt": "So " * 300})
    said = []
    done = write(relu_llama, tmp_path / "own.jsonl", prompts=file, note=said.append)
    assert done.texts == 1
    assert said == ["1 prompts are left out: they fill the model's context"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "a"}, "p.jsonl:2 must have a prompt, an instruction, a question or messages"),
        ({"prompt": "a", "messages": []}, "p.jsonl:2 must have a prompt or messages, it has both"),
        ({"prompt": "  "}, "p.jsonl:2 has no text in its prompt"),
        ({"prompt": 7}, "p.jsonl:2 has no text in its prompt"),
        ({"instruction": "a", "input": 7}, "p.jsonl:2 has no text in its instruction"),
        ({"messages": []}, "p.jsonl:2 has no text in its messages"),
        ({"messages": [{"role": "user"}]}, "p.jsonl:2 has no text in its messages"),
        (
            {"messages": [{"role": "assistant", "content": "a"}]},
            "p.jsonl:2: its messages must end with the user's",
        ),
        (None, "p.jsonl holds no prompt"),
    ],
)
def test_prompts_without_text_are_told_by_their_line(silu_llama, tmp_path, row, said):
    path = tmp_path / "p.jsonl"
    path.write_text("" if row is None else json.dumps({"prompt": "a"}) + "\n" + json.dumps(row))
    with pytest.raises(TwellError, match=said):
        write(silu_llama, tmp_path / "own.jsonl", prompts=path)
    assert not (tmp_path / "own.jsonl").exists()
