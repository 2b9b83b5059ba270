"""convert --bits 4: weights rounded inside the fit, against stock readers and plain torch."""

import functools
import json
import shutil

import pytest
import torch
from compiled import EVERY_CASE
from edits import json_in, weights_in
from fits import FAMILIES, QUICK
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from twellctl.bundle.twell_int4 import expand, kept_codes, pack, unpack
from twellctl.convert import convert
from twellctl.doctor import doctor
from twellctl.errors import TwellError, UsageError
from twellctl.evaluate import evaluate
from twellctl.export import export
from twellctl.finetune import finetune
from twellctl.fitting.grid import Grid
from twellctl.fitting.layerwise import Layerwise
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model, load_tokenizer, quiet_transformers, read_tensors
from twellctl.profile import profile

pytestmark = pytest.mark.usefixtures("no_answers")

ROUND = QUICK | {"bits": 4, "group_size": 16}


@pytest.fixture(scope="module")
def rounded(make_model, text_file, tmp_path_factory):
    """`rounded(family, **settings)`: (source, folder, what `convert` returned); read only."""

    @functools.cache
    def fit(family="llama", **settings):
        source = make_model(family, **FAMILIES.get(family, {}))
        out = tmp_path_factory.mktemp("rounded") / "out"
        done = convert(source, out, data=[str(text_file)], **ROUND | settings)
        return source, out, done

    return fit


def test_codes_are_packed_as_they_are_unpacked():
    codes = torch.randint(-8, 8, (5, 24), dtype=torch.int8)
    packed = pack(codes)
    assert packed.dtype == torch.int32
    assert packed.shape == (5, 3)
    assert torch.equal(unpack(packed), codes)
    first = sum((int(code) + 8) << 4 * i for i, code in enumerate(codes[0, :8]))
    assert int(packed[0, 0]) % 2**32 == first


def test_a_weight_is_code_times_the_scale_of_its_group():
    codes = torch.tensor([[-8, 7, 1, 0]], dtype=torch.int8)
    scales = torch.tensor([[0.5, -2.0]], dtype=torch.bfloat16)
    assert expand(codes, scales).tolist() == [[-4.0, 3.5, -2.0, 0.0]]


@pytest.mark.parametrize(
    ("family", "keep"),
    [
        (family, keep)
        for family in ("llama", "phi3", "qwen2", "gemma2")
        for keep in (False, True)
        if EVERY_CASE or not keep or family == "llama"
    ],
)
def test_the_reader_of_the_format_and_ours_load_the_same_weights(rounded, family, keep):
    pytest.importorskip("compressed_tensors", reason="the reader of this format")
    _, out, _ = rounded(family, keep_activation=keep)
    with quiet_transformers():
        stock = AutoModelForCausalLM.from_pretrained(out)
        ours = load_model(open_checkpoint(out))
        ids = torch.arange(1, 9)[None]
        given = ours(ids).logits, stock(ids).logits
    torch.testing.assert_close(*given, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_have_the_dtype_of_the_source_in_all_its_files(
    make_model, text_file, tmp_path, dtype
):
    pytest.importorskip("compressed_tensors", reason="the reader of this format")
    how = {"dtype": dtype, "shard_size": "60KB", "tie_word_embeddings": True}
    source, out = make_model("llama", **how), tmp_path / "out"
    convert(source, out, data=[str(text_file)], **ROUND)
    export(out, tmp_path / "one")
    export(tmp_path / "one", tmp_path / "other")
    assert len(list(source.glob("*.safetensors"))) > 1
    made = open_checkpoint(out)
    ids = torch.arange(1, 9)[None]
    with quiet_transformers():
        stock, ours = AutoModelForCausalLM.from_pretrained(out), load_model(made)
        assert torch.equal(ours(ids).logits, stock(ids).logits)
    scales = {name: t for name, t in read_tensors(made, packed=True) if name.endswith("_scale")}
    assert {scale.dtype for scale in scales.values()} == {dtype}
    expected = dict(read_tensors(made))
    for folder in ("one", "other"):
        for name, tensor in read_tensors(open_checkpoint(tmp_path / folder)):
            assert torch.equal(tensor, expected[name]), name


def test_every_linear_layer_of_the_blocks_is_packed_and_nothing_else(rounded):
    source, out, done = rounded()
    tensors, before = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    linears = {
        n.removesuffix(".weight") for n, t in before.items() if ".layers." in n and t.dim() == 2
    }
    assert len(linears) == 14
    for layer in linears:
        packed, scale = tensors[f"{layer}.weight_packed"], tensors[f"{layer}.weight_scale"]
        N, K = tensors[f"{layer}.weight_shape"].tolist()
        assert packed.shape == (N, K // 8)
        assert scale.shape == (N, K // 16)
        assert f"{layer}.weight" not in tensors
    for name in tensors.keys() & before.keys():
        if ".mlp." not in name:  # whose biases are fitted
            assert torch.equal(tensors[name], before[name])
    config = json.loads((out / "config.json").read_text())
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"]) == (4, 16)
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert done.fitted.map_neurons == 16


@pytest.mark.parametrize("keep", [False, True])
def test_what_was_measured_is_what_the_folder_computes(rounded, text_file, keep):
    """KL to the source on text, as the fit held it out and as `eval` finds it."""
    source, out, done = rounded(keep_activation=keep)
    judged = evaluate(out, data=[str(text_file)], reference=source, seq_len=32, max_tokens=512)
    assert judged.text.score.kl == pytest.approx(done.fitted.held_out.kl, rel=0.5)
    assert done.fitted.density == (1.0 if keep else pytest.approx(judged.text.density, abs=0.1))


def test_the_model_itself_is_rounded_better_by_sums_than_to_the_nearest(rounded, text_file):
    source, out, _ = rounded(keep_activation=True)
    nearest = load_model(open_checkpoint(source))
    for name, module in nearest.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.data = Grid(16, torch.float32).nearest(module.weight.data).weight
    tokenizer = load_tokenizer(open_checkpoint(source))
    ids = tokenizer(text_file.read_text(), return_tensors="pt").input_ids[0, :2048].view(-1, 32)
    by_sums = load_model(open_checkpoint(out))
    first = load_model(open_checkpoint(source))
    with torch.no_grad():
        wanted = first(ids).logits.log_softmax(-1)
        kl = [
            float((wanted.exp() * (wanted - m(ids).logits.log_softmax(-1))).sum(-1).mean())
            for m in (by_sums, nearest)
        ]
    assert kl[0] < 0.8 * kl[1]


def test_a_killed_run_ends_in_the_same_bits(rounded, text_file, tmp_path, monkeypatch):
    source, out, _ = rounded()
    again = tmp_path / "out"
    how = {"data": [str(text_file)], **ROUND}

    def stop(done, total, differ, left):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, again, progress=stop, **how)
    done = convert(source, again, **how)
    assert done.fitted.kept == 1
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_an_export_has_its_silu_form_in_the_scales(rounded, tmp_path):
    _, out, _ = rounded()
    export(out, tmp_path / "export")
    plain, form = (load_file(path / "model.safetensors") for path in (out, tmp_path / "export"))
    assert plain.keys() == form.keys()
    gate, down = ".mlp.gate_proj.weight_scale", ".mlp.down_proj.weight_scale"
    changed = {n for n in plain if not torch.equal(plain[n], form[n])}
    assert {n.partition(".layers.")[2][1:] for n in changed} >= {gate, down}
    assert all(n.endswith(("weight_scale", "bias")) for n in changed)
    one, other = open_checkpoint(out), open_checkpoint(tmp_path / "export")
    for (name, a), (_, b) in zip(read_tensors(one), read_tensors(other), strict=True):
        assert torch.equal(a, b), name


def test_a_layer_that_is_loaded_keeps_its_codes(rounded, tmp_path):
    """Also where an export's SiLU form is taken out, and until its weight is changed."""
    _, out, _ = rounded()
    export(out, tmp_path / "export")
    for folder in (out, tmp_path / "export"):
        model = load_model(open_checkpoint(folder))
        linears = [m for m in model.model.layers.modules() if isinstance(m, nn.Linear)]
        for linear in linears:
            codes, scales = kept_codes(linear)
            assert torch.equal(expand(codes, scales), linear.weight)
        assert not any("packed" in name for name in model.state_dict())
        with torch.no_grad():
            linears[0].weight[0, 0] += 1
        assert kept_codes(linears[0]) is None


def test_an_export_runs_over_its_own_code_and_saves_bf16(rounded, tmp_path):
    _, out, _ = rounded()
    export(out, tmp_path / "export")
    with quiet_transformers():
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "export", trust_remote_code=True)
        plain = load_model(open_checkpoint(out))
        ids = torch.arange(1, 9)[None]
        torch.testing.assert_close(ours(ids).logits, plain(ids).logits, rtol=1e-3, atol=1e-3)
        ours.save_pretrained(tmp_path / "saved")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
        torch.testing.assert_close(again(ids).logits, ours(ids).logits)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"group_size": 16}, "group-size is for rounded weights: add --bits 4"),
        ({"keep_activation": True}, "keep-activation is for rounded weights: add --bits 4"),
        ({"bits": 3}, "bits must be 4, got 3"),
        ({"bits": 4, "map_rank": 20}, r"got 64: take another --map-rank than 20"),
        ({"bits": 4, "group_size": 64}, r"layers \(32, 112\), got 64: take 16"),
        ({"bits": 4, "group_size": 12}, r"multiple of 8 .* got 12: take 16"),
    ],
)
def test_settings_that_do_not_go_together(make_model, text_file, tmp_path, settings, said):
    with pytest.raises(UsageError, match=said):
        convert(make_model("llama"), tmp_path / "out", data=[str(text_file)], **QUICK | settings)
    assert not (tmp_path / "out").exists()


def test_of_the_model_itself_there_is_nothing_to_profile(rounded, text_file, tmp_path):
    _, out, _ = rounded(keep_activation=True)
    for refuse in (
        lambda: profile(out, data=[str(text_file)]),
        lambda: export(out, tmp_path / "a", profile=tmp_path / "profile.json"),
        lambda: export(out, tmp_path / "a", bench=tmp_path / "bench.json"),
    ):
        with pytest.raises(TwellError, match=r"is a SiLU model in 4 bits, made with --keep-activ"):
            refuse()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_5_text"])
def test_an_export_of_the_model_itself_is_as_it_was(rounded, family, tmp_path):
    """Its files say nothing of code; the activation is the family's own."""
    _, out, _ = rounded(family, keep_activation=True)
    with json_in(out / "config.json") as config:
        before = dict(config)
    done = export(out, tmp_path / "export")
    assert (done.class_name, done.sharpness, done.has_original) == (None, None, False)
    one, other = (load_file(path / "model.safetensors") for path in (out, tmp_path / "export"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert json.loads((tmp_path / "export/config.json").read_text()).items() >= before.items()
    named = {path.name for path in out.iterdir()}
    assert {path.name for path in (tmp_path / "export").iterdir()} == named
    _, bundle, *_ = doctor(tmp_path / "export").folder
    assert (bundle.state, bundle.what) == ("none", "none: every neuron fires")


def test_the_card_of_an_export_has_what_was_measured(rounded, text_file, tmp_path):
    source, out, _ = rounded(keep_activation=True)
    measured = tmp_path / "eval.json"
    judged = evaluate(out, data=[str(text_file)], reference=source, seq_len=32, max_tokens=512)
    measured.write_text(json.dumps(judged.to_json()))
    folder = shutil.copytree(out, tmp_path / "copy")
    with json_in(folder / "config.json") as config:
        config["twell"]["source"] = "owner/model"
    export(folder, tmp_path / "export", evaluation=measured)
    card = (tmp_path / "export/README.md").read_text()
    assert (
        f"| this model | text of its evaluation | {judged.text.score.cross_entropy:.4f} |" in card
    )
    assert "Every neuron is computed for every token." in card
    assert "base_model: owner/model\nbase_model_relation: quantized\n" in card
    assert "trust_remote_code" not in card


def test_the_model_itself_is_rounded_where_relu_would_do_harm(make_model, text_file, tmp_path):
    """Of a family that uses its activation outside of FFNs, too."""
    pytest.importorskip("compressed_tensors", reason="the reader of this format")
    source, out, data = make_model("qwen3_5_text"), tmp_path / "out", [str(text_file)]
    with pytest.raises(TwellError, match="it cannot be fitted"):
        convert(source, out, data=data, **ROUND)
    convert(source, out, data=data, **ROUND, keep_activation=True)
    ids = torch.arange(1, 9)[None]
    with quiet_transformers():
        stock, ours = AutoModelForCausalLM.from_pretrained(out), load_model(open_checkpoint(out))
    torch.testing.assert_close(ours(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-4)


def test_cards_say_what_a_folder_is(rounded, tmp_path):
    _, out, _ = rounded()
    export(out, tmp_path / "export")
    _, control, _ = rounded(keep_activation=True)
    of_fit, of_export, of_control = (
        (path / "README.md").read_text() for path in (out, tmp_path / "export", control)
    )
    assert "- relu" in of_fit
    assert "tags:\n- twell\n---" in of_control
    assert "Every neuron is computed for every token." in of_control
    for card in (of_fit, of_export, of_control):
        assert "except the LM head are in 4 bits: weights in 4 bits with one scale" in card
    assert "`vllm serve export`. It has kernels for weights in 4 bits." in of_export
    assert "from an export in bf16" not in of_export


def test_a_linear_layer_that_is_never_called_is_named(make_model):
    layerwise = Layerwise(load_model(open_checkpoint(make_model("llama"))), 8, torch.device("cpu"))
    layerwise.first_states(torch.arange(8)[None])
    assert [len(names) for names in layerwise.layer(0).linears()] == [3, 1, 2, 1]
    layerwise.layers[0].more = torch.nn.Linear(2, 2)
    with pytest.raises(TwellError, match="more is not called when its layer is"):
        layerwise.layer(0).linears()


def test_a_relu_model_is_not_rounded(relu_llama, text_file, tmp_path):
    for keep in (False, True):
        with pytest.raises(TwellError, match="already ReLU: give the model that it was made from"):
            convert(
                relu_llama, tmp_path / "out", data=[str(text_file)], **ROUND, keep_activation=keep
            )


def test_what_changes_weights_refuses_it(rounded, text_file, tmp_path):
    _, out, _ = rounded()
    for refuse in (
        lambda: finetune(out, tmp_path / "a", data=[str(text_file)]),
        lambda: convert(out, tmp_path / "b"),
        lambda: export(out, tmp_path / "c", quantize="fp8"),
    ):
        with pytest.raises(TwellError, match=r"is quantised already \(4 bits\): take the model"):
            refuse()


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("part", "changed", "said"),
    [
        ("weight_scale", None, "up_proj lacks its scales or its shape"),
        ("weight_shape", None, "up_proj lacks its scales or its shape"),
        ("weight_shape", torch.tensor([5, 5]), r"says \[5, 5\], its weight is \[112, 32\]"),
        ("weight_shape", torch.tensor([112.0, 32.0]), "up_proj lacks its scales or its shape"),
        ("weight_packed", torch.zeros(9, 4, dtype=torch.int32), "they are not those of"),
        ("weight_packed", torch.zeros(112, 4, dtype=torch.int64), "they are not those of"),
        ("weight_scale", torch.zeros(112, 4), "8 inputs share a scale, .* group_size 16: fetch"),
        ("weight_scale", torch.zeros(112, 2, dtype=torch.int32), r"\[112, 32\] of I32"),
        ("weight_scale", torch.full((112, 2), torch.nan), "up_proj.weight holds NaN"),
        ("weight", torch.zeros(112, 32), "or it has a weight, too"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(rounded, tmp_path, part, changed, said):
    _, out, _ = rounded()
    folder = shutil.copytree(out, tmp_path / "out")
    with weights_in(folder) as tensors:
        tensors.pop(f"{UP}.{part}", None)
        if changed is not None:
            tensors[f"{UP}.{part}"] = changed
    with pytest.raises(TwellError, match=said):
        load_model(open_checkpoint(folder))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("group_size", 32, "16 inputs share a scale, by config.json's group_size 32"),
        ("num_bits", 8, r"is quantised \(compressed-tensors\): take the original"),
        ("symmetric", False, r"is quantised \(compressed-tensors\): take the original"),
        ("actorder", "group", r"is quantised \(compressed-tensors\): take the original"),
    ],
)
def test_a_config_that_says_otherwise_is_refused(rounded, tmp_path, key, value, said):
    _, out, _ = rounded()
    folder = shutil.copytree(out, tmp_path / "out")
    with json_in(folder / "config.json") as config:
        config["quantization_config"]["config_groups"]["group_0"]["weights"][key] = value
    with pytest.raises(TwellError, match=said):
        open_checkpoint(folder)


def test_the_int4_model_of_somebody_else_is_refused(rounded, tmp_path):
    _, out, _ = rounded(keep_activation=True)
    folder = shutil.copytree(out, tmp_path / "out")
    with json_in(folder / "config.json") as config:
        del config["twell"]
    with pytest.raises(TwellError, match=r"is quantised \(compressed-tensors\): take the original"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("family", "factor"), [("llama", 1.0), ("granite", 0.3), ("gemma2", None), ("cohere", 1.0)]
)
def test_what_a_layer_adds_as_it_is(make_model, family, factor):
    model = load_model(open_checkpoint(make_model(family, **FAMILIES[family])))
    layerwise = Layerwise(model, 32, torch.device("cpu"))
    layerwise.first_states(torch.arange(32)[None])
    layer = layerwise.layer(0)
    assert layer.linears()[0][0] == "self_attn.q_proj"
    for name in ("self_attn.o_proj", layer.ffn_name):
        assert layer.factor_of(name) == (factor and pytest.approx(factor, rel=1e-3))
