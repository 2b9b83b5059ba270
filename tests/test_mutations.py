"""Files spoilt at random: one clear refusal each, or a later step takes what was taken."""

import json
from random import Random

import pytest
from edits import linked
from mutations import in_a_safetensors_file, mutated
from safetensors import safe_open

from twellctl.bundle.twell_bundle import MANIFEST, make_bundle, read_bundle, write_bundle
from twellctl.errors import TwellError
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.exportable import exportable_skeleton
from twellctl.models.loading import load_model
from twellctl.models.shards import INDEX, read_header, read_shards
from twellctl.text.blocks import token_stream
from twellctl.text.reading import read_texts
from twellctl.training.recipe import resolve_recipe, save_recipe

RECIPE = (
    "data: [a.jsonl, b]\nl1: 2e-5\nseq-len: 1024\nbatch-size: 24\nteacher: none\n"
    "lora-ffn: false\nmax-tokens: 300_000_000\nlora-rank: 0\n"
)
ROWS = [{"text": "déjà vu", "n": [1, 2.5]}, {"messages": [{"role": "user", "content": "hi"}]}]


class Judge:
    """Counts what was taken and what was refused."""

    def __init__(self, seed: int = 0):
        self.random = Random(seed)
        self.taken = self.refused = 0

    def feed(self, take, content: bytes, *, refusal: type[Exception] = TwellError) -> None:
        """`take(content)` may raise `refusal`, in one line of bounded length, and nothing else."""
        try:
            take(content)
        except refusal as error:
            said = str(error)
        else:
            self.taken += 1
            return
        self.refused += 1
        if refusal is TwellError:
            assert said.isprintable(), said
            assert len(said) < 1000, said

    def feed_mutations(self, take, content: bytes, count: int, **how) -> None:
        for _ in range(count):
            self.feed(take, mutated(content, self.random), **how)
        assert self.refused > count // 4


@pytest.fixture
def judge() -> Judge:
    return Judge()


def test_configs(judge, relu_llama, tmp_path):
    folder = linked(relu_llama, tmp_path / "model", "config.json")

    def take(content: bytes) -> None:
        (folder / "config.json").write_bytes(content)
        checkpoint = open_checkpoint(folder)
        checkpoint.require_relu()
        assert checkpoint.twell
        exportable_skeleton(checkpoint)  # what export asks
        load_model(checkpoint)

    judge.feed_mutations(take, (relu_llama / "config.json").read_bytes(), 80)


def test_headers(judge, relu_llama, tmp_path):
    path = tmp_path / "model.safetensors"
    whole = (relu_llama / "model.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")

    def take(header: bytes) -> None:
        path.write_bytes(in_a_safetensors_file(header, len(whole) - 8 - length))
        tensors = read_header(path)
        with safe_open(path, framework="pt") as file:  # refuses no more than we do
            assert {n: tuple(file.get_slice(n).get_shape()) for n in file.keys()} == {  # noqa: SIM118
                tensor.name: tensor.shape for tensor in tensors.values()
            }

    judge.feed_mutations(take, whole[8 : 8 + length].strip(), 150)


def test_indices(judge, make_model, tmp_path):
    silu = make_model("llama", shard_size="40KB")
    folder = linked(silu, tmp_path / "model", INDEX)

    def take(content: bytes) -> None:
        (folder / INDEX).write_bytes(content)
        read_shards("model", folder)

    judge.feed_mutations(take, (silu / INDEX).read_bytes(), 80)


def test_recipes(judge, tmp_path):
    def take(content: bytes) -> None:
        (tmp_path / "mine.yaml").write_bytes(content)
        recipe = resolve_recipe(tmp_path / "mine.yaml")
        save_recipe(recipe, tmp_path / "saved.yaml")
        assert resolve_recipe(tmp_path / "saved.yaml") == recipe

    judge.feed_mutations(take, RECIPE.encode(), 120)


def test_rows(judge, tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"

    def take(content: bytes) -> None:
        path.write_bytes(content)
        for tokens in token_stream(read_texts([str(path)], "text", tokenizer), tokenizer, 512):
            assert tokens.min() >= 0

    for row in ROWS:
        judge.feed_mutations(take, json.dumps(row, ensure_ascii=False).encode(), 60)


def test_manifests(judge, tmp_path):
    folder = tmp_path / "export"
    write_bundle(folder, make_bundle({"a.py": b"1\n", "b/c.cu": b"2\n"}))
    manifest = (folder / MANIFEST).read_bytes()

    def take(content: bytes) -> None:
        (folder / MANIFEST).write_bytes(content)
        read_bundle(folder)

    judge.feed_mutations(take, manifest, 80, refusal=ValueError)
