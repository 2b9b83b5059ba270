"""The version with its commit: of a checkout, of an installation, of neither."""

import re
import subprocess

import pytest

from twellctl import __version__
from twellctl.here import own_version as module
from twellctl.here.own_version import own_version


@pytest.fixture(autouse=True)
def fresh():
    own_version.cache_clear()
    yield
    own_version.cache_clear()


def git(folder, *words) -> str:
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    done = subprocess.run(
        ["git", "-C", folder, *who, *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_of_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHECKOUT", tmp_path)
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    git(tmp_path, "tag", "-am", "a tag", "v9")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert own_version() == f"{__version__}+g{commit[:12]}"
    own_version.cache_clear()
    (tmp_path / "file").write_text("two")
    assert own_version() == f"{__version__}+g{commit[:12]}.dirty"


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ('{"vcs_info": {"commit_id": "0123456789abcdef"}}', f"{__version__}+g0123456789ab"),
        ('{"dir_info": {"editable": true}}', __version__),
        ("[", __version__),
        (None, __version__),
    ],
)
def test_of_an_installation(tmp_path, monkeypatch, said, version):
    class Installed:
        @staticmethod
        def read_text(name):
            return said if name == "direct_url.json" else None

    monkeypatch.setattr(module, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(module.metadata, "distribution", lambda name: Installed)
    assert own_version() == version


def test_a_checkout_without_git_is_no_failure(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(module, "_CHECKOUT", tmp_path)
    assert re.fullmatch(re.escape(__version__) + r"(\+g\w+)?", own_version())
