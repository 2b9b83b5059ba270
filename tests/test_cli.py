"""The command line itself: help, --quiet, completion, pipes."""

import os
import re
import subprocess
import sys

import pytest
from edits import jsonl

from twellctl.cli.flags import whole_number
from twellctl.screens import ui
from twellctl.settings import flag_name
from twellctl.training.recipe import Recipe

COMMANDS = (
    "convert",
    "write",
    "draft",
    "finetune",
    "profile",
    "export",
    "run",
    "report",
    "quickstart",
    "generate",
    "chat",
    "serve-local",
    "doctor",
    "eval",
    "plot",
    "bench model",
    "bench decode",
    "bench exact",
)


@pytest.fixture
def page(monkeypatch):
    """`page(cli, *words)`: the text of a help page as wide as asked."""

    def read(cli, *words, width=160) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        code, out, err = cli(*words)
        assert (code, err) == (0, [])
        return out

    return read


@pytest.mark.parametrize(
    "words",
    [
        ("--density", "15%"),
        ("--tokens", "1M"),
        ("--tokens", "2.5"),
        ("--tokens", "nan"),
        ("--tokens", "1e999999999"),
        ("--tokens", "\N{ARABIC-INDIC DIGIT TWO}"),
    ],
)
def test_what_is_no_number_is_named(refusal, words):
    flag, value = words
    said = refusal("convert", "model", "out", "--data", "a.txt", *words, code=2)
    assert f"'{flag}'" in said
    assert f"got '{value}'" in said
    assert "Value error" not in said


@pytest.mark.parametrize(
    ("text", "number"),
    [("2e6", 2_000_000), ("1.5e3", 1500), ("-5", -5), ("010", 10), ("9007199254740993", 2**53 + 1)],
)
def test_whole_numbers_as_people_write_them(text, number):
    assert whole_number(text) == number


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("write", "m", "o", "--prompts", "a", "--prompts", "b"), "--prompts"),
        (("convert", "m", "o", "--seed", "1", "--seed=1"), "--seed"),
        (("eval", "m", "--reference", "a", "--data", "b", "--reference", "c"), "--reference"),
        (("finetune", "m", "o", "--lora-ffn", "--no-lora-ffn"), "--lora-ffn"),
        (("bench", "decode", "--config", "a", "--batch", "1", "--config", "b"), "--config"),
        (("chat", "m", "--system", "a", "--system", "b"), "--system"),
    ],
)
def test_a_flag_that_is_given_twice_is_refused(refusal, words, flag):
    assert refusal(*words, code=2) == f"error: {flag} is given twice: keep one"


def test_switches_and_flags_for_many_values_may_be_given_twice(refusal):
    words = ("--data", "a", "--data", "b", "--overwrite", "--overwrite", "-q", "-q")
    assert "a does not exist" in refusal("convert", "m", "o", *words)


@pytest.mark.parametrize("words", [(), ("-h",), ("--help",)])
def test_without_a_command_there_is_help(cli, page, words):
    text = page(cli, *words)
    for command in COMMANDS:
        assert re.search(rf"^│ {command.split()[0]} ", text, re.MULTILINE), command
    assert text.index("Make a model sparse") < text.index("finetune") < text.index("Use it")
    assert "--install-completion" in text
    assert "decode" in page(cli, "bench", *words)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_that_is_its_own(cli, page, command):
    text = page(cli, *command.split(), "-h")
    assert f"Example: twellctl {command} " in text
    assert "--quiet" in text


def test_help_is_as_wide_as_the_terminal(cli, page):
    for width in (80, 160):
        lines = page(cli, "finetune", "-h", width=width).splitlines()
        assert max(map(len, lines)) == width


def test_options_of_finetune_come_in_groups_with_choices_and_defaults(cli, page):
    text = page(cli, "finetune", "--help-all", width=200)
    panels = dict(re.findall(r"╭─ ([^─]+) ─+╮\n(.*?)╰", text, re.DOTALL))
    assert list(panels)[:2] == ["Arguments", "Options"]
    assert len(panels) == 7
    assert "--density" in panels["Sparsity and teacher"]
    assert "cosine|linear|constant" in panels["Length, batch and rate"]
    assert "[default: 1024, or the context if shorter]" in panels["Text"]
    settings = {f"--{flag_name(name)}" for name in Recipe.__dataclass_fields__}
    shown = set(re.findall(r"--[a-z0-9-]+", "".join(list(panels.values())[2:])))
    assert settings <= shown
    assert not settings & set(re.findall(r"^│ +(--[a-z0-9-]+)", panels["Options"], re.MULTILINE))


def test_short_help_has_what_is_set_often_and_no_name_is_cut(cli, page):
    short, full = (page(cli, "finetune", flag, width=80) for flag in ("-h", "--help-all"))
    names = set(re.findall(r"^│ +(--[a-z0-9-]+)", short, re.MULTILINE))
    assert 10 < len(names) < 20
    assert {"--data", "--resume", "--help-all", "--gradient-checkpointing"} <= names
    assert "--l1-schedule" not in short
    assert "--l1-schedule" in full
    assert not re.search(r"--[a-z0-9-]+…", re.sub(r"Off:[^│]*│\n│ +--[a-z…-]+", "", short))


def test_brackets_are_not_taken_for_markup(cli, page):
    assert "[NAME=]FILE" in page(cli, "profile", "-h")
    assert "[default: 256, or what the context leaves]" in page(cli, "generate", "-h")


def test_choices_are_completed():
    words = {"COMP_WORDS": "twellctl finetune --lr-scheduler co", "COMP_CWORD": "3"}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.argv[0] = 'twellctl'\nfrom twellctl.__main__ import main; main()",
        ],
        env=os.environ | words | {"_TWELLCTL_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["cosine", "constant"]


def test_quiet_leaves_results_and_errors(cli, refusal, relu_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(ui.stderr, "quiet", False)
    code, out, err = cli("export", relu_llama, tmp_path / "out")
    assert "beware" in err[0]
    quiet_code, quiet_out, quiet_err = cli("export", relu_llama, tmp_path / "out2", "--quiet")
    assert (code, quiet_code, quiet_err) == (0, 0, [])
    assert quiet_out == out.replace("out:", "out2:").replace("out PROMPT", "out2 PROMPT")
    refusal("export", relu_llama, tmp_path / "out", "-q")


def test_paths_that_no_shell_has_seen(cli, refusal, silu_llama, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "silu").symlink_to(silu_llama)
    assert cli("convert", "~/silu", "~/relu")[0] == 0
    assert (tmp_path / "relu" / "config.json").exists()
    code, _, err = cli("convert", "~/silu", str(tmp_path / "silu"), "--overwrite")
    assert (code, (tmp_path / "silu" / "config.json").exists()) == (1, True), err
    code, _, err = cli("generate", "~nobody-here/model", "a prompt")
    assert code == 1
    assert "~nobody-here/model" in err[0]
    said = "error: 'a\\x00b' is not a path: it contains a NUL character"
    assert cli("convert", "a\0b", "out") == (2, "", [said])
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for words in ((loop, tmp_path / "out"), (silu_llama, loop), (silu_llama, loop / "out")):
        assert "leads to itself" in refusal("convert", *words)
    named = tmp_path / "\udcff"
    named.symlink_to(silu_llama)
    code, _, err = cli("export", str(named), str(tmp_path / "exported"))
    assert (code, "not UTF-8: rename the folder" in err[0]) == (1, True), err


@pytest.mark.parametrize("words", ["generate {} a --seed=0 --temperature=1", "--version"])
def test_a_reader_that_has_had_enough_is_no_failure(started, relu_llama, words):
    """As other tools end behind `| head`: by the number of SIGPIPE, without a word about it."""
    process = started(*words.format(relu_llama).split())
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait() == 141
    assert "rror" not in said


def test_what_stdout_cannot_spell_is_no_failure(silu_llama, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "twellctl", "convert", silu_llama, "ü1"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert b"?1" in done.stdout


def test_a_rank_that_is_no_number(refusal, relu_llama, text_file, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "first")
    said = refusal("finetune", relu_llama, tmp_path / "out", "--data", text_file)
    assert "RANK in the environment must be a whole number, got 'first'" in said
    assert "none" in refusal("convert", tmp_path / "none", tmp_path / "out")


def test_a_rank_alone_silences_no_command(success, silu_llama, tmp_path, monkeypatch):
    """As launchers of clusters set it in each machine's shell."""
    monkeypatch.setenv("RANK", "1")
    assert "-> relu" in success("convert", silu_llama, tmp_path / "out")[0]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("eval", "--data or --tasks, if only one is given: --tasks *.jsonl"),
        ("convert", "--data: --data *.jsonl"),
        ("draft", "--data: --data *.jsonl"),
    ],
)
def test_help_names_the_flags_that_more_files_are_for(cli, page, command, said):
    assert f"More files for {said} works." in page(cli, command, "-h", width=200)


@pytest.mark.parametrize(
    "command", ["convert", "draft", "profile", "eval", "bench model", "bench decode"]
)
def test_several_files_after_data_as_a_shell_expands_them(
    refusal, silu_llama, relu_llama, text_file, tmp_path, command
):
    made = (silu_llama, tmp_path / "out") if command in ("convert", "draft") else (relu_llama,)
    words = (*command.split(), *made, "-q")
    words += ("--device=cpu",) if "bench" in command else ()
    words += ("--seq-len=64", "--tokens=64") if command == "bench model" else ()
    assert "no.txt does not exist" in refusal(*words, "--data", text_file, tmp_path / "no.txt")
    assert f"{text_file}: which flag is it for?" in refusal(*words, text_file, code=2)


def test_several_files_after_tasks(refusal, relu_llama, text_file, tmp_path):
    tasks = jsonl(tmp_path / "tasks.jsonl", [{"prompt": "1 + 1 =", "answer": "2"}])
    words = ("eval", relu_llama, "--tasks", tasks, tmp_path / "no.jsonl")
    assert "no.jsonl cannot be read" in refusal(*words)
    assert "which flag is it for?" in refusal(*words, "--data", text_file, code=2)
