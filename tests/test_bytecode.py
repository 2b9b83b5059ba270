"""Bytecode of libraries that came without: where it is kept."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from twellctl.here import bytecode
from twellctl.here.bytecode import keep_bytecode


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A torch of one file, in a folder that can be read only; nothing is set."""
    source = tmp_path / "torch" / "__init__.py"
    source.parent.mkdir()
    source.write_text("number = 7\n")
    monkeypatch.setattr(
        bytecode.importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(source))
    )
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path / "cache"))
    writable = os.access
    monkeypatch.setattr(
        bytecode.os, "access", lambda path, mode: path != source.parent and writable(path, mode)
    )
    return source


def test_it_goes_into_our_cache_where_it_has_no_place(library, tmp_path):
    keep_bytecode()
    assert sys.pycache_prefix == str(tmp_path / "cache" / "bytecode")


@pytest.mark.parametrize("why", ["is there", "can be written", "others may write", "set", "unset"])
def test_nothing_changes_where(library, tmp_path, monkeypatch, why):
    prefix = "/their/own" if why == "set" else None
    monkeypatch.setattr(sys, "pycache_prefix", prefix)
    monkeypatch.setattr(sys, "dont_write_bytecode", why == "unset")
    if why == "is there":
        place = Path(importlib.util.cache_from_source(str(library)))
        place.parent.mkdir()
        place.touch()
    elif why == "can be written":
        monkeypatch.setattr(bytecode.os, "access", lambda path, mode: path == library.parent)
    elif why == "others may write":
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache").chmod(0o777)
    keep_bytecode()
    assert sys.pycache_prefix == prefix


def test_the_next_start_finds_it(tmp_path):
    """The whole way, in a Python of its own: the second time nothing is compiled."""
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("number = 7\n")
    code = (
        "import os, sys; os.access = lambda path, mode: False\n"
        "from twellctl.here.bytecode import keep_bytecode; keep_bytecode()\n"
        "import torch; print(torch.number, os.path.exists(torch.__cached__))"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": f"{package.parent}{os.pathsep}{os.getcwd()}",
        "TWELL_CACHE_DIR": str(tmp_path / "cache"),
    }
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"):
        environment.pop(name, None)
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["7", "True"]
    assert not (package / "__pycache__").exists()
    assert list((tmp_path / "cache" / "bytecode").rglob("*.pyc"))
