"""profile: its figures against counts made here, one by one."""

import dataclasses
import json
import math
import re

import pytest
import torch
from edits import json_in
from torch import nn
from transformers import AutoModelForCausalLM

from twellctl.bundle.twell_format import pack
from twellctl.convert import convert
from twellctl.errors import TwellError, UsageError
from twellctl.export import export
from twellctl.firing.counts import LayerCount
from twellctl.firing.profiled import read_profile, save_profile
from twellctl.profile import profile
from twellctl.text.blocks import token_stream
from twellctl.text.reading import read_texts


def gates_of(folder, ids) -> list[torch.Tensor]:
    """The gate `[M, N]` of each layer, read off the gate's own projection."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    gates = []
    for name, module in model.named_modules():
        if name.endswith("gate_proj"):
            module.register_forward_hook(lambda m, x, y: gates.append(y.flatten(0, 1)))
        if name.endswith("gate_up_proj"):
            module.register_forward_hook(
                lambda m, x, y: gates.append(y.chunk(2, -1)[0].flatten(0, 1))
            )
    with torch.inference_mode():
        model(ids)
    return gates


def windows_of(text_file, tokenizer, count, seq_len):
    ids = [
        i for part in token_stream(read_texts([str(text_file)], "text"), tokenizer) for i in part
    ]
    starts = torch.linspace(0, len(ids) - seq_len, count).long().tolist()
    return torch.tensor([ids[start : start + seq_len] for start in starts])


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_figures_are_those_counted_by_hand(make_model, tmp_path, tokenizer, text_file, family):
    # 300 neurons: the second tile is ragged
    convert(make_model(family, seed=3, intermediate_size=300), tmp_path / "model")
    found = profile(tmp_path / "model", [str(text_file)], windows=20, seq_len=48)
    ids = windows_of(text_file, tokenizer, 20, 48)
    assert (found.windows, found.seq_len, found.tokens) == (20, 48, 960)
    for layer, gate in zip(found.layers, gates_of(tmp_path / "model", ids), strict=True):
        fired = gate > 0
        nnz = sorted(fired.sum(-1).tolist())
        assert layer.nnz_mean == pytest.approx(sum(nnz) / 960, rel=1e-12)
        assert layer.density == pytest.approx(layer.nnz_mean / 300, rel=1e-12)
        for share in (10, 50, 90, 99):
            assert getattr(layer, f"nnz_p{share}") == nnz[math.ceil(share * 960 / 100) - 1]
        assert layer.nnz_max == nnz[-1]
        assert layer.dead == int((~fired.any(0)).sum())
        packed = pack(gate, found.tile, layer.slots)
        assert layer.overflow == packed.overflowed.double().mean() == 0
        fewer = pack(gate, found.tile, max(1, layer.slots - 8))
        assert layer.slots == 8 or fewer.overflowed.any()


def position_ranges(found) -> list[tuple[int, int]]:
    return [(part.first, part.last) for part in found.by_position]


@pytest.fixture
def kinds_of_text(tmp_path, text_file) -> dict[str, list]:
    """Files and folders, by kind; all so short that windows span two kinds."""
    sources = list(read_texts([str(text_file)], "text"))
    notes = tmp_path / "notes"
    notes.mkdir()
    for name in ("a", "b"):
        (notes / f"{name}.txt").write_text(sources.pop()[:600])
    chat = tmp_path / "chat.jsonl"
    chat.write_text("".join(json.dumps({"text": text[:50]}) + "\n" for text in sources[:12]))
    code = [tmp_path / "2.txt", tmp_path / "3.txt"]
    for path in code:
        path.write_text(sources.pop()[:900])
    return {"notes": [notes], "chat": [chat], "code": code}


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_parts_are_those_counted_by_hand(
    make_model, tmp_path, tokenizer, kinds_of_text, family, monkeypatch
):
    # 20 windows: 7, 7, 6
    monkeypatch.setattr("twellctl.evaluation.windows.BATCH_TOKENS", 7 * 48)
    convert(make_model(family, seed=3, intermediate_size=300), tmp_path / "model")
    code, more_code = kinds_of_text["code"]
    (notes,), (chat,) = kinds_of_text["notes"], kinds_of_text["chat"]
    ordered = [("code", code), ("notes", notes), ("chat", chat), ("code", more_code)]
    data = [f"code={path}" if kind == "code" else str(path) for kind, path in ordered]
    found = profile(tmp_path / "model", data, windows=20, seq_len=48)
    assert found.data == tuple(data)

    ids, kinds = [], []
    for kind, path in ordered:
        for text in read_texts([str(path)], "text"):
            tokens = [0, *tokenizer(text, add_special_tokens=False)["input_ids"]]
            ids += tokens
            kinds += [kind] * len(tokens)
    starts = torch.linspace(0, len(ids) - 48, 20).long().tolist()
    windows = torch.tensor([ids[start : start + 48] for start in starts])
    batches = [gates_of(tmp_path / "model", batch) for batch in windows.split(7)]
    gates = [torch.cat(layer) for layer in zip(*batches, strict=True)]
    kinds = [kind for start in starts for kind in kinds[start : start + 48]]
    assert len({tuple(kinds[i : i + 48]) for i in range(0, 960, 48)}) > 3  # some span two kinds

    ranges = [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 47)]
    assert position_ranges(found) == ranges
    positions = torch.arange(48).repeat(20)
    expected = [(positions >= first) & (positions <= last) for first, last in ranges]
    assert [part.kind for part in found.by_kind] == ["code", "notes", "chat"]
    expected += [torch.tensor([kind == k for k in kinds]) for kind in ("code", "notes", "chat")]
    for part, picked in zip((*found.by_position, *found.by_kind), expected, strict=True):
        fired = [(gate.relu()[picked] != 0).sum().item() for gate in gates]
        densities = [count / (int(picked.sum()) * gates[0].shape[-1]) for count in fired]
        assert part.tokens == int(picked.sum()) > 0
        assert part.layers == tuple(densities)
        assert part.density == pytest.approx(sum(densities) / 2, rel=1e-12)
    for parts in (found.by_position, found.by_kind):
        mean = sum(part.tokens * part.density for part in parts) / found.tokens
        assert mean == pytest.approx(found.density, rel=1e-12)


def test_positions_end_with_the_window(relu_llama, text_file):
    for ranges in ([(0, 0)], [(0, 0), (1, 1), (2, 3), (4, 4)]):
        found = profile(relu_llama, text_file, windows=3, seq_len=ranges[-1][1] + 1)
        assert position_ranges(found) == ranges
        assert [part.tokens for part in found.by_position] == [3 * (b - a + 1) for a, b in ranges]


def test_names_of_kinds(relu_llama, kinds_of_text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "notes")
    (tmp_path / "notes" / "x=a.txt").write_text("a file with such a name " * 20)
    data = ["x=a.txt", "y=x=a.txt", ".", "../2.txt", "/".join([str(tmp_path), "notes", "x=a.txt"])]
    found = profile(relu_llama, data, windows=40, seq_len=16)
    assert [part.kind for part in found.by_kind] == ["x=a", "y", "notes", "2"]
    for missing in ("none.txt", "z=none.txt"):
        with pytest.raises(TwellError, match=r"^none\.txt does not exist"):
            profile(relu_llama, ["../2.txt", missing])


def test_a_kind_that_no_window_meets_has_no_density(success, relu_llama, kinds_of_text, tmp_path):
    small = tmp_path / "small.txt"
    small.write_text("x")
    code, more_code = kinds_of_text["code"]
    words = ["--data", code, "--data", small, "--data", more_code, "--windows", 2, "--seq-len", 16]
    _, err = success("profile", relu_llama, *words, "--json", tmp_path / "profile.json")
    found = read_profile(tmp_path / "profile.json").by_kind[1]
    assert (found.kind, found.tokens, found.density) == ("small", 0, None)
    assert found.layers == (None, None)
    assert any("no window holds a token of small: raise --windows" in line for line in err)


def test_dead_neurons_and_means(silu_llama, tmp_path, text_file):
    convert(silu_llama, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for layer in model.model.layers:
        nn.init.zeros_(layer.mlp.gate_proj.weight)  # a gate of 0 does not fire
    model.save_pretrained(tmp_path / "model")
    found = profile(tmp_path / "model", [str(text_file)], windows=4, seq_len=32)
    assert [layer.dead for layer in found.layers] == [96, 96]
    assert (found.density, found.dead_fraction) == (0, 1)
    assert [layer.slots for layer in found.layers] == [8, 8]


@pytest.mark.parametrize(
    ("spoilt", "slots", "overflow"), [(0, 8, 0), (1, 8, 1e-5), (2, 16, 0), (100_001, 16, 0)]
)
def test_slots_are_the_fewest_that_one_row_in_100_000_may_overflow(spoilt, slots, overflow):
    gate = torch.full((100_000, 32), -1.0)
    gate[:, 16:24] = 1  # exactly full with eight slots
    gate[:spoilt, 24] = 1  # one over
    count = LayerCount(32, 16, torch.device("cpu"))
    for part in gate.split(30_000):
        count.add(part, part.relu())
    found = count.summary()
    assert (found.slots, found.overflow) == (slots, overflow)


def test_rows_that_are_not_finite_overflow_whatever_the_slots():
    gate = torch.full((10, 32), -1.0)
    gate[3, 5] = -torch.inf
    gate[4, 5] = torch.nan
    count = LayerCount(32, 16, torch.device("cpu"))
    count.add(gate, gate.relu())
    found = count.summary()
    assert (found.slots, found.overflow, found.nnz_max) == (8, 0.2, 1)


def test_json_comes_back_equal(relu_llama, tmp_path, text_file):
    found = profile(relu_llama, [str(text_file)], windows=2, seq_len=16)
    save_profile(found, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == found
    content = json.loads((tmp_path / "profile.json").read_text())
    assert content["schema_version"] == 1
    assert content["density"] == found.density
    assert (content["dtype"], content["tile"]) == ("float32", 256)
    assert {"twellctl", "torch", "transformers"} == set(content["versions"])
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


def test_a_short_text_counts_once(success, relu_llama, tmp_path, text_file):
    """Its windows overlap: they say less of it than as many of a long text would."""
    short = tmp_path / "short.txt"
    short.write_text(next(iter(read_texts([str(text_file)], "text")))[:400])
    few, many = (profile(relu_llama, short, windows=n, seq_len=16) for n in (4, 64))
    assert few.distinct_tokens == 64
    assert many.tokens == 64 * 16 > many.text_tokens == many.distinct_tokens
    words = ("profile", relu_llama, "--data", short, "--windows", "64", "--seq-len", "16")
    _, err = success(*words)
    assert f"the text has {many.text_tokens} tokens: its windows overlap" in err
    for windows, overlap in ((64, True), (2, False)):
        words = ("eval", relu_llama, "--data", short, "--windows", windows, "--seq-len", "16")
        _, err = success(*words)
        assert any("its windows overlap" in line for line in err) == overlap


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        (("intermediate_size",), 0, "intermediate_size is 0"),
        (("intermediate_size",), "96", "intermediate_size is '96'"),
        (("layers",), [], "it has no layers"),
        (("layers", 0, "nnz_mean"), None, "layers[0].nnz_mean is None"),
        (("layers", 1, "dead"), True, "layers[1].dead is True"),
        (("tokens",), "<b>", "tokens is '<b>'"),
        (("versions",), 1, "versions is 1"),
    ],
)
def test_a_changed_profile_is_refused(relu_llama, tmp_path, text_file, place, value, sentence):
    found = profile(relu_llama, str(text_file), windows=2, seq_len=16)
    save_profile(found, tmp_path / "p.json")
    with json_in(tmp_path / "p.json") as content:
        for key in place[:-1]:
            content = content[key]
        content[place[-1]] = value
    with pytest.raises(TwellError, match=re.escape(sentence)):
        read_profile(tmp_path / "p.json")


@pytest.mark.parametrize("changes", [{"intermediate_size": 9600}, {"layers": 2.0}])
def test_a_profile_that_does_not_fit_the_model_is_no_part_of_an_export(
    relu_llama, tmp_path, text_file, changes
):
    found = profile(relu_llama, str(text_file), windows=2, seq_len=16)
    if density := changes.get("layers"):
        layers = [dataclasses.replace(layer, density=density) for layer in found.layers]
        changes = {"layers": tuple(layers)}
    with pytest.raises(TwellError, match="was changed: profile the model again"):
        export(relu_llama, tmp_path / "out", profile=dataclasses.replace(found, **changes))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds no JSON object"),
        ("{}", r"no schema_version"),
        ('{"schema_version": 2}', "schema_version 2, this twellctl reads 1"),
        ('{"schema_version": 1}', "not a complete profile"),
        ('{"schema_version": 1, "by_kind": [1]}', "not a complete profile"),
        (None, "cannot be read: No such file"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path, content, sentence):
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TwellError, match=sentence):
        read_profile(path)


def test_bad_calls_are_refused(cli, make_model, relu_llama, silu_llama, text_file, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("def f(): pass")
    with pytest.raises(TwellError, match=r"holds \d+ tokens, less than one window of 200"):
        profile(relu_llama, [str(short)], seq_len=200)
    code, _, err = cli("profile", relu_llama)
    assert (code, err[-1]) == (2, "error: no text to read: give --data FILE")
    with pytest.raises(TwellError, match="is a SiLU model"):
        profile(silu_llama, [str(text_file)])
    with pytest.raises(TwellError, match="is a gelu model: make it ReLU with 'twellctl convert"):
        profile(make_model(hidden_act="gelu"), [str(text_file)])
    with pytest.raises(UsageError, match="seq-len must be 1 to 256"):
        profile(relu_llama, [str(text_file)], seq_len=257)
    with pytest.raises(UsageError, match="windows must be >= 1, got 0"):
        profile(relu_llama, [str(text_file)], windows=0)


def test_command_shows_a_table(success, refusal, relu_llama, text_file, tmp_path):
    words = ["profile", relu_llama, "--data", text_file, "--windows", 3, "--seq-len", 24, "--json"]
    out, _ = success(*words, tmp_path / "profile.json")
    assert all(part in out for part in ("overflow", "density by position", "16-23"))
    assert "kind of text" not in out
    assert out.splitlines()[-1].startswith(f"next: twellctl export {relu_llama} OUT --profile ")
    assert read_profile(tmp_path / "profile.json").windows == 3
    assert "is not a folder you may write to" in refusal(*words, tmp_path / "none/profile.json")


def test_command_shows_the_kinds_of_text(success, relu_llama, kinds_of_text):
    code, more_code = map(str, kinds_of_text["code"])
    data = [code, f"[mine]={more_code}"]
    words = ["--data", data[0], "--data", data[1], "--windows", 4, "--seq-len", 24]
    out, _ = success("profile", relu_llama, *words)
    found = profile(relu_llama, data, windows=4, seq_len=24)
    rows = [line.split() for line in out.split("density by kind of text")[1].splitlines()]
    for part in found.by_kind:
        assert [part.kind, str(part.tokens), f"{part.density:.2%}"] in rows
