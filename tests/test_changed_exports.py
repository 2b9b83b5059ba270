"""An export whose own files were changed is refused, by the name of the file."""

import pytest
from transformers import AutoModelForCausalLM

from twellctl.bundle.twell_bundle import read_bundle

BUNDLED = [  # what is read first, another module, and what is not Python
    "modeling_twell.py",
    "twell_bundle.py",
    "twell_config.py",
    "twell_ffn.py",
    "twell_kernels/README.md",
    "twell_kernels/ptx/mma.cuh",
]


@pytest.mark.parametrize("name", [*BUNDLED, "twell_manifest.json"])
def test_a_changed_byte_is_refused_by_name(exported, load_trusted, name):
    content = bytearray((exported / name).read_bytes())
    content[content.index(b"a")] ^= 2  # in the code files that is within their first sentence
    (exported / name).write_bytes(content)
    with pytest.raises(ValueError, match=name):
        load_trusted(exported)
    with pytest.raises(ValueError, match=name):
        read_bundle(exported)
    AutoModelForCausalLM.from_pretrained(exported)  # the stock class needs none of them


@pytest.mark.parametrize("name", [*BUNDLED, "twell_manifest.json"])
def test_a_missing_file_is_refused_by_name(exported, load_trusted, name):
    (exported / name).unlink()
    with pytest.raises((ValueError, OSError), match=name):
        load_trusted(exported)
    with pytest.raises(ValueError, match=f"{name} is missing"):
        read_bundle(exported)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("twell_config.py", "TILE = 256", "TILE = ("),  # no Python any more
        ("twell_format.py", "import torch\n", "import t\0rch\n"),
        ("twell_config.py", "TILE = 256", "TIKE = 256"),  # what another file imports is gone
        ("twell_model.py", "class TwellFFN", "class TwellFFN(nn.Modul)"),
    ],
)
def test_code_that_no_longer_imports_is_refused_by_name(exported, load_trusted, name, old, new):
    code = (exported / name).read_text()
    assert old in code
    (exported / name).write_text(code.replace(old, new))
    with pytest.raises(ImportError, match=f"bundled file {name} does not import"):
        load_trusted(exported)


def test_a_manifest_of_a_later_format_is_refused(exported):
    path = exported / "twell_manifest.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(ValueError, match="format_version 2, this code reads 1"):
        read_bundle(exported)
