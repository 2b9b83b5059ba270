"""What the model card and `export` say of vLLM, by family and profile; without vLLM."""

import pytest

SERVE = "vLLM: `vllm serve {}`. If twellctl is installed, too, "
OVER_TWELL, DENSELY = "it skips those that do not fire", "add `--model-impl transformers`"


@pytest.mark.parametrize(
    ("family", "profiled", "quantize", "over_twell"),
    [
        ("qwen3", True, None, True),
        ("phi3", True, None, True),
        ("llama", True, "fp8", True),
        ("llama", False, None, False),
        ("llama", False, "fp8", False),
        ("smollm3", True, None, False),
    ],
)
def test_the_card_says_how_vllm_serves_it(make_export, family, profiled, quantize, over_twell):
    folder = make_export(family, profiled=profiled, quantize=quantize)
    card = (folder / "README.md").read_text()
    assert SERVE.format(folder.name) + (OVER_TWELL if over_twell else DENSELY) in card


def test_export_says_how_vllm_serves_it(cli, make_export, text_file, tmp_path):
    relu = make_export("llama").with_name("relu")
    words = ["--data", text_file, "--windows=1", "--seq-len=16", "--json"]
    words.append(tmp_path / "profile.json")
    assert cli("profile", relu, *words)[0] == 0
    _, without, _ = cli("export", relu, tmp_path / "without")
    _, profiled, _ = cli("export", relu, tmp_path / "out", "--profile", tmp_path / "profile.json")
    assert "dense; if twellctl is installed, with --model-impl transformers" in without
    assert "vLLM serves it over TwELL where twellctl is installed, dense elsewhere" in profiled
