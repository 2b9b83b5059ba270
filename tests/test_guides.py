"""README and the guides: links lead somewhere, and each command and snippet runs.

What they name, like Qwen/Qwen2.5-Coder-1.5B-Instruct, lies in a folder as something tiny. README
runs first, from nothing but the model and the data that it downloads; the guides go on from there.
"""

import functools
import io
import json
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import typer
import yaml
from shapes import write_config

import twellctl
from twellctl import quickstart, serve_local
from twellctl.export import export
from twellctl.settings import flag_name

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / ".ci/CONTRIBUTING.md"]
for folder in ("kernels", "recipes", "twellctl"):
    PAGES += sorted((ROOT / folder).rglob("*.md"))
GUIDES = [page for page in PAGES if page.name not in ("CHANGELOG.md", "LAB.md", "MEASURED.md")]
MODELS = ("Qwen/Qwen2.5-Coder-1.5B-Instruct", "owner/model")
SMALL = {
    "write": {"max_tokens": 8, "tokens": 1200},
    "convert": {"tokens": 2000, "seq_len": 32, "steps": 2, "step_tokens": 64, "eval_windows": 2},
    "finetune": {
        "max_tokens": 256,
        "seq_len": 32,
        "batch_size": 2,
        "micro_batch_size": 1,
        "eval_blocks": 2,
        "teacher": MODELS[0],
    },
    "draft": {"tokens": 1200, "seq_len": 32, "epochs": 1, "ahead": 2, "step_tokens": 640},
    "profile": {"windows": 2, "seq_len": 32},
    "eval": {"windows": 2, "seq_len": 32},
    "compare": {"limit": 2, "max_tokens": 8},
    "chat": {"max_tokens": 4},
    "run": {"keep_going": "on"},
    "model": {"device": "cpu", "tokens": 64, "seq_len": 32, "rounds": 1},
    "decode": {"device": "cpu", "batch": 1, "prompt_tokens": 8, "new_tokens": 10},
    "exact": {"device": "cpu", "new_tokens": 10},
}
# what another test runs, or nothing here: downloads, .ci/run and the engines of others
ELSEWHERE = (
    ". .venv/bin/activate",
    "python3 -m venv .venv",
    "pytest -n 2",
    "pytest tests/gpu",
    ".ci/run",
    "hf download",
    "curl -LO",
    "gunzip",
    "vllm serve",
    "python convert_hf_to_gguf.py",
    "llama-quantize",
    "llama-server",
)
OUTS = re.compile(r'(?:write|convert|finetune|export|draft)(?:\([^,]+, "| \S+ )([\w.-]+)')
pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").is_file(), reason="no checkout around the tests"
)


def blocks(page: Path, *kinds: str) -> list[str]:
    """The fenced blocks of these kinds ("": of none)."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for kind, text in found if kind in kinds]


def commands(page: Path) -> list[str]:
    """Its command lines, without comments; a drawing has none."""
    text = "\n".join(block for block in blocks(page, "") if "-->" not in block)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    parts = (part for line in lines for part in re.sub(r"(^|\s)#\s.*", "", line).split("&&"))
    return [part.strip().removeprefix(".venv/bin/") for part in parts if part.strip()]


def anchors(page: Path) -> set[str]:
    """What GitHub calls its headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = (title.lower() for title in re.findall(r"^#+ (.*)", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def small(words: list[str]) -> list[str]:
    """A command line with the options of `SMALL` in the place of its own."""
    name = next((word for word in words if word in SMALL), "")
    options = {flag_name(key): str(value) for key, value in SMALL.get(name, {}).items()}
    kept: list[str] = []
    left = iter(words)
    for word in left:
        flag, equals, _ = word.removeprefix("--").partition("=")
        if not word.startswith("--") or flag not in options:
            kept.append(word)
        elif not equals and options[flag] != "on":
            next(left)  # its value
    return kept + [f"--{k}" if v == "on" else f"--{k}={v}" for k, v in options.items()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        file, _, anchor = link.partition("#")
        if not file.startswith(("http:", "https:")):
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_short(page):
    """README is read in two minutes, and a guide answers one question."""
    words = [word for word in page.read_text().split() if any(map(str.isalnum, word))]
    assert len(words) <= (900 if page == ROOT / "README.md" else 700)


def test_the_changelog_is_short():
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 250


def run_all(page: Path, cli, done: set[str]) -> None:
    """Its commands, but those that another page has `done` to the letter, and then its snippets, in
    the current folder."""
    for line in commands(page):
        if line in done:
            continue
        done.add(line)
        words = shlex.split(re.sub(r"^torchrun .* -m ", "", re.sub(r"^[A-Z_]+=\S+ ", "", line)))
        if words[0] == "twellctl":
            for out in OUTS.findall(line):
                remove(Path(out))
            code, _, err = cli(*small(words[1:]))
            assert code == 0, (line, err)
        elif words[:2] == ["pip", "install"]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            named = re.findall(r"\[([\w,]+)\]", line)
            assert set(",".join(named).split(",")) <= {"", *extras["optional-dependencies"]}, line
        else:
            assert line.startswith(ELSEWHERE), line
    for snippet in blocks(page, "python"):
        for out in OUTS.findall(snippet):
            remove(Path(out))
        if not torch.cuda.is_available():
            snippet = snippet.replace('"cuda"', '"cpu"')
        exec(compile(snippet, str(page), "exec"), {})


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


@pytest.fixture
def stand_ins(monkeypatch, count_less):
    """Snippets do little, a server ends at once, and `test_quickstart` does the whole job."""

    def end(*args, **kwargs) -> None:
        raise typer.Exit

    done = quickstart.QuickStarted(Path("demo"), Path("demo/export"), 1.0, 1.0, 1.0, 0.2, 0.1, "")
    monkeypatch.setattr(quickstart, "quickstart", lambda *_, **__: done)
    monkeypatch.setattr("twellctl.cli.make.write_report", lambda folder: folder / "report.html")
    monkeypatch.setattr(serve_local, "serve_local", end)
    monkeypatch.setattr("twellctl.bench.exact.COUNTS", (3,))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Why?\n")))
    for name in ("write", "convert", "finetune"):
        less = functools.partial(getattr(twellctl, name), **SMALL[name])
        monkeypatch.setattr(sys.modules[f"twellctl.{name}"], name, less)


@pytest.fixture(scope="module")
def shop(tmp_path_factory, make_model, text_file):
    """The folder that all is run in, with what the pages name and do not make themselves."""
    folder = tmp_path_factory.mktemp("shop")
    model = make_model("qwen2")
    for name in MODELS:
        shutil.copytree(model, folder / name)
    for name in ("prompts", "tasks", "src", "more-text", "Llama-3.1-8B"):
        (folder / name).mkdir()
    texts = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    rows = [{"instruction": text[n : n + 300]} for text in texts for n in range(0, 3000, 300)]
    rows = [row | {"input": "", "output": "?"} for row in rows if row["instruction"].strip()]
    (folder / "prompts/code_alpaca_20k.json").write_text(json.dumps(rows))
    check = "def check(candidate):\n    assert candidate() == 1"
    task = {"prompt": "def f():\n", "entry_point": "f", "test": check}
    (folder / "HumanEval.jsonl").write_text(2 * f"{json.dumps(task)}\n")
    question = {"query": "Is it?", "choices": ["yes", "no"], "gold": 0}
    (folder / "tasks/choices.jsonl").write_text(json.dumps(question))
    (folder / "prompts.jsonl").write_text('{"prompt": "Why?"}')
    (folder / "mine.yaml").write_text(*blocks(ROOT / "recipes/README.md", "yaml"))
    write_config(folder / "Llama-3.1-8B")
    pipeline = yaml.safe_load(*blocks(ROOT / "twellctl/cli/README.md", "yaml"))
    for name in {*SMALL} & {*pipeline} - {"model"}:
        pipeline[name] |= {flag_name(key): value for key, value in SMALL[name].items()}
    (folder / "coder.yaml").write_text(yaml.safe_dump(pipeline))
    for name in ("train", "heldout", "chat", "src/code", "more-text/1"):
        shutil.copyfile(text_file, folder / f"{name}.jsonl")
    return folder


@pytest.fixture(scope="module")
def done() -> set[str]:
    """The command lines that were run in `shop`."""
    return set()


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_guide_says_runs(page, shop, done, stand_ins, no_answers, cli, monkeypatch):
    monkeypatch.chdir(shop)
    if not Path("relu-model").exists():
        run_all(ROOT / "README.md", cli, done)
        shutil.copytree("relu", "relu-model")
        export("relu", "exported-fp8", quantize="fp8")
    if page != ROOT / "README.md":
        run_all(page, cli, done)
