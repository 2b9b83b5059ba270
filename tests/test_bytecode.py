"""Bytecode of libraries that came without: where it is kept."""

import importlib.util
import os
import subprocess
import sys
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


def test_nothing_changes_where_it_is_there(library):
    place = importlib.util.cache_from_source(str(library))
    os.mkdir(os.path.dirname(place))
    open(place, "wb").close()
    keep_bytecode()
    assert sys.pycache_prefix is None


def test_nothing_changes_where_it_can_be_written(library, monkeypatch):
    monkeypatch.setattr(bytecode.os, "access", lambda path, mode: path == library.parent)
    keep_bytecode()
    assert sys.pycache_prefix is None


def test_a_folder_for_it_that_cannot_be_written_is_no_place(library, monkeypatch):
    (library.parent / "__pycache__").mkdir()
    monkeypatch.setattr(bytecode.os, "access", lambda path, mode: path == library.parent)
    keep_bytecode()
    assert sys.pycache_prefix


def test_not_into_a_folder_that_others_may_write(library, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    keep_bytecode()
    assert sys.pycache_prefix is None


@pytest.mark.parametrize(
    ("name", "value"), [("pycache_prefix", "/their/own"), ("dont_write_bytecode", True)]
)
def test_what_the_user_has_set_stays(library, monkeypatch, name, value):
    monkeypatch.setattr(sys, name, value)
    keep_bytecode()
    assert sys.pycache_prefix == (value if name == "pycache_prefix" else None)


def test_without_torch_there_is_nothing_to_keep(library, monkeypatch):
    monkeypatch.setattr(bytecode.importlib.util, "find_spec", lambda name: None)
    keep_bytecode()
    assert sys.pycache_prefix is None


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
