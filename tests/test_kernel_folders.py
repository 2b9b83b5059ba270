"""The floors of kernels/: instructions at the bottom, then what kernels share, then kernels."""

import re
from pathlib import PurePosixPath

import pytest

from twellctl.bundle.twell_spec import SPEC
from twellctl.here.resources import kernel_files

BELOW = {  # what a folder's files may include beside those of their own
    "ptx": set(),
    "tile": {"ptx"},
    "ffn": {"tile", "ptx"},
    "train": {"tile", "ptx"},
    "decode": {"ffn", "tile", "ptx"},
}
FILES = {name: text.decode() for name, text in kernel_files().items()}


def folder(name: str) -> str:
    return PurePosixPath(name).parts[0]


def test_every_source_lies_in_a_folder():
    assert {folder(name) for name in FILES} == set(BELOW)


@pytest.mark.parametrize("name", FILES)
def test_a_file_includes_only_what_lies_below_it(name):
    own = folder(name)
    included = re.findall(r'^#include "(.+)"', FILES[name], re.MULTILINE)
    assert {folder(path) for path in included if path != SPEC} <= BELOW[own] | {own}


def test_inline_assembly_is_in_ptx_alone():
    with_assembly = {name for name, text in FILES.items() if re.search(r"\basm\b", text)}
    assert with_assembly
    assert {folder(name) for name in with_assembly} == {"ptx"}
