"""Killed with -9 at any moment, a command leaves the old OUT or the new one, whole.

At random moments: `TWELL_TEST_KILLS` says how often for each command, with and without --overwrite.
The processes are forked from a warm one, so that they die at work and not while they import. And
before each single thing that convert does to the disk.
"""

import functools
import hashlib
import os
import random
import shutil
import signal
from pathlib import Path

import kill_jobs
import pytest
from compiled import EVERY_CASE
from fits import QUICK

from twellctl.convert import convert
from twellctl.export import export

FOREVER = 1e9
KILLS = int(os.environ.get("TWELL_TEST_KILLS", "1"))


@pytest.fixture(scope="module")
def run(warm):
    """`run(job, model, text, out, overwrite, seconds)`: the exit code, and how long it ran."""

    def run(job, model, text, out, overwrite, seconds=FOREVER):
        return warm("fork_and_kill", job, str(model), str(text), str(out), overwrite, seconds)

    return run


@pytest.fixture(scope="module")
def sources(make_model, text_file, tmp_path_factory) -> dict[str, list]:
    """What each job makes its old and its new OUT of."""
    silu = [make_model("llama", seed=seed) for seed in (1, 2)]
    relu, both = ([tmp_path_factory.mktemp(name) / "model" for _ in silu] for name in ("r", "b"))
    for model, plain, export_of_both in zip(silu, relu, both, strict=True):
        convert(model, plain)
        draft = tmp_path_factory.mktemp("draft") / "model"
        convert(model, draft, data=[str(text_file)], bits=4, keep_activation=True, **QUICK)
        export(draft, export_of_both, with_original=True, original=model)
    found = {"converted": silu, "rounded": silu, "exported": relu, "finetuned": relu}
    return found | {"exported_both": both}


@pytest.fixture(scope="module")
def results(run, sources, text_file, tmp_path_factory):
    """`results(job, which)`: of source 0 or 1 the OUT, and how many seconds it took."""

    @functools.cache
    def made(job, which):
        out = tmp_path_factory.mktemp(job) / "out"
        code, seconds = run(job, sources[job][which], text_file, out, False)
        assert code == 0
        return out, seconds

    return made


def state(out: Path) -> dict[str, str] | None:
    """The names in `out`, with the sha256 of what must be the same each time; None if not there."""
    if not out.exists():
        return None
    files = sorted(path for path in out.rglob("*") if path.is_file())
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.suffix in (".safetensors", ".py")
        else ""
        for path in files
    }


def beside(out: Path) -> set[str]:
    return {path.name for path in out.parent.iterdir()} - {out.name}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("job", "overwrite"),
    [
        (job, old)
        for job in kill_jobs.JOBS
        for old in (False, True)
        if EVERY_CASE or not old or job in ("converted", "exported")
    ],
)
def test_at_random_moments(run, sources, results, text_file, tmp_path, job, overwrite):
    second, out = sources[job][1], tmp_path / "out"
    second_out, seconds = results(job, 1)
    first_out, _ = results(job, 0) if overwrite else (None, 0)
    before, new = state(first_out) if overwrite else None, state(second_out)
    assert before != new
    landed, seen = 0, {"before": 0, "new": 0}
    while landed < KILLS:
        if state(out) != before:
            shutil.rmtree(out, ignore_errors=True)
            if overwrite:
                shutil.copytree(first_out, out)
        moment = random.uniform(0, 1.1 * seconds)
        code, _ = run(job, second, text_file, out, overwrite, moment)
        found = state(out)
        if code == -signal.SIGKILL:
            landed += 1
            assert found in (before, new), f"killed after {moment} s"
            seen["new" if found == new else "before"] += 1
        else:
            assert (code, found) == (0, new)
    print(job, overwrite, f"{landed} kills", seen, f"of {seconds:.2f} s", sorted(beside(out)))
    if found != new:  # what the killed ones left is no hindrance
        assert run(job, second, text_file, out, overwrite)[0] == 0
        assert state(out) == new
        assert beside(out) == set()


@pytest.mark.timeout(3600)
def test_a_pipeline_goes_on(run, silu_llama, text_file, tmp_path):
    """Killed it ends with the same bits as one that was not."""
    one, other = tmp_path / "one", tmp_path / "other"
    code, seconds = run("piped", silu_llama, text_file, one, False)
    assert code == 0
    for _ in range(2 if EVERY_CASE else 1):
        seconds *= 0.4
        while (code := run("piped", silu_llama, text_file, other, False, seconds)[0]) == 0:
            shutil.rmtree(other)  # it was faster this time
            seconds *= 0.4
        print(code, sorted(path.name for path in other.iterdir()))
        assert code == -signal.SIGKILL
    assert run("piped", silu_llama, text_file, other, False)[0] == 0
    assert state(one) == state(other)
    assert (one / "answers.jsonl").read_bytes() == (other / "answers.jsonl").read_bytes()


def test_before_each_thing_done_to_the_disk(warm, sources, tmp_path):
    (first, second), out = sources["converted"], tmp_path / "out"
    for model, name in ((first, "out"), (second, "second")):
        convert(model, tmp_path / name)
    old, new = state(out), state(tmp_path / "second")
    killed, laid_aside, number = True, 0, 0
    while killed:
        number += 1
        code = warm("fork_and_kill_at", number, str(second), str(out))
        assert code in (0, -signal.SIGKILL)
        killed = code != 0
        found = state(out)
        if found is None:  # between two renames
            laid_aside += 1
            assert state(tmp_path / ".out.twellctl/old") == old
            continue  # the next one puts it back
        assert found in (old, new)
        if found == new:
            convert(first, out, overwrite=True)
            assert state(out) == old
    assert number > 40
    assert laid_aside == 1
    assert beside(out) == {"second"}
