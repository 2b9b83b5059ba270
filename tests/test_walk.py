"""The walk over layers, with methods that are not the product's: attention too, and no ReLU."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from twellctl.errors import TwellError
from twellctl.files.made_of import Record
from twellctl.fitting import linears
from twellctl.fitting.grid import Grid
from twellctl.fitting.kept import KeptLayers
from twellctl.fitting.layerwise import Layerwise
from twellctl.fitting.least_squares import Products, solved
from twellctl.fitting.method import Change
from twellctl.fitting.walk import Text, Walk
from twellctl.models.loading import quiet_transformers

GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 8, "pad_token_id": 0}
QUERY, OUT, DOWN = "self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"


class Nothing:
    """A method that changes nothing, and remembers its blocks."""

    activation = None

    def __init__(self):
        self.before = []

    def look(self, layerwise, ids):
        self.looked_at = ids

    def change(self, block, before):
        self.before.append(list(before))
        return Change({}, {"number": float(len(before))})


class Coarse(Nothing):
    """q to 8 bits, o and down to 2; if it `mends`, o and then down are solved for. SiLU stays."""

    def __init__(self, mends=True):
        super().__init__()
        self.mends = mends

    def change(self, block, before):
        tensors = {}
        for name, most in ((QUERY, 127), (OUT, 1), (DOWN, 1)):
            weight = block.changed.module.get_submodule(name).weight
            scale = weight.abs().amax(1, keepdim=True) / most
            tensors[f"{name}.weight"] = (weight / scale).round() * scale
            tensors[f"{name}.scale"] = scale
        block.put(tensors)
        if self.mends:
            tensors[f"{OUT}.weight"] = self.nearer(block, OUT)
            block.put(tensors)
            tensors[f"{DOWN}.weight"] = self.down(block)
        return Change(tensors, super().change(block, before).figures)

    def nearer(self, block, name):
        """The weight of a linear layer that gives what the original's does, of what it reads."""
        weight = block.changed.module.get_submodule(name).weight
        products = Products(weight.shape[1], len(weight), weight.device)
        for read in block.reads([QUERY, name]):
            assert read.inputs.keys() == read.wanted.keys() == {QUERY, name}
            root, inputs = read.weights.sqrt(), read.inputs[name]
            rest = read.wanted[name] - inputs @ weight.T
            products.add(inputs.T * root, rest.T * root)
        products.over_processes()
        return weight + solved(products, (weight.shape[1],), 1e-4).T

    def down(self, block):
        text, ffn = block.ffn_text(), block.changed.weights
        hidden = nn.functional.silu(ffn.gates(text.z)) * ffn.ups(text.z)
        rest = text.wanted(slice(None)) - ffn(text.z, nn.functional.silu)
        products, root = Products(hidden.shape[1], rest.shape[1], rest.device), text.weights.sqrt()
        products.add(hidden.T * root, rest.T * root)
        products.over_processes()
        return ffn.down + solved(products, (hidden.shape[1],), 1e-3).T


@pytest.fixture(scope="module")
def text():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 512, (100, 32), generator=generator)
    return Text(ids[:90], ids[90:])


@pytest.fixture
def walk(make_model, text, tmp_path):
    """`walk(method, family, folder)`: (the walk, the source's folder), before its first layer."""

    def begin(method, family="llama", folder="run", **changes):
        source = make_model(family, **changes)
        if not (tmp_path / folder).exists():
            (tmp_path / folder).mkdir()
            Record.begin(tmp_path / folder, {})
        model = AutoModelForCausalLM.from_pretrained(source).eval().requires_grad_(False)
        layerwise = Layerwise(model, 32, torch.device("cpu"))
        return Walk(
            layerwise, text, method, KeptLayers(tmp_path / folder), torch.float32, 0
        ), source

    return begin


def quiet(*how_far):
    pass


@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("phi3", {}), ("gemma2", GEMMA)])
def test_a_model_that_is_not_changed_stays_as_it_is(walk, text, family, changes):
    begun, _ = walk(method := Nothing(), family, **changes)
    layers = begun.run(quiet)
    assert [layer.states_differ < 1e-5 for layer in layers] == [True, True]
    assert method.before == [[], [{"number": 0.0}]]
    assert torch.equal(method.looked_at, text.fitted[:16])
    held = begun.held_out()
    assert held.kl < 1e-6
    assert held.same_token > 0.99


def test_linear_layers_are_read_as_stock_transformers_computes(walk, text):
    """All of them in one forward, those of the first block on the same states in both models."""
    found = []

    class Reader(Nothing):
        def change(self, block, before):
            names = [
                n for n, m in block.original.module.named_modules() if isinstance(m, nn.Linear)
            ]
            if not before:
                found.extend(block.reads(names))
            return super().change(block, before)

    begun, source = walk(Reader())
    begun.run(quiet)
    assert [len(read.weights) for read in found] == [64 * 32, 26 * 32]
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(source).eval()
    seen = {}
    first = model.model.layers[0]
    for name in found[0].inputs:
        first.get_submodule(name).register_forward_hook(
            lambda m, args, out, name=name: seen.update({name: (args[0], out)})
        )
    first.register_forward_pre_hook(lambda m, args: seen.update({"states": args}))
    with torch.no_grad():
        model(text.fitted)
    assert len(found[0].inputs) == 7
    for name in found[0].inputs:
        for number, of in enumerate(("inputs", "wanted")):
            given = torch.cat([getattr(read, of)[name] for read in found])
            torch.testing.assert_close(
                given, seen[name][number].flatten(0, 1), rtol=1e-4, atol=1e-4
            )
    weights = torch.cat([read.weights for read in found])
    (states,) = seen["states"]
    expected = 1 / states.flatten(0, 1).square().mean(-1)
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-6)


def test_a_method_may_change_attention_first_and_then_the_ffn(walk, text):
    """What is kept, by its names, is the model that was measured."""
    rough, _ = walk(Coarse(mends=False), folder="rough")
    rough.run(quiet)
    begun, source = walk(Coarse())
    begun.run(quiet)
    held = begun.held_out()
    assert held.kl < 0.5 * rough.held_out().kl
    with quiet_transformers():
        model, first = (AutoModelForCausalLM.from_pretrained(source).eval() for _ in range(2))
    for index, layer in enumerate(model.model.layers):
        tensors = begun.kept.get(index).tensors
        names = {f"{name}.{kind}" for name in (QUERY, OUT, DOWN) for kind in ("weight", "scale")}
        assert tensors.keys() == names
        layer.load_state_dict(tensors, strict=False)
    with torch.no_grad():
        ours, theirs = (m(text.held_out).logits[:, :-1].log_softmax(-1) for m in (model, first))
    kl = float((theirs.exp() * (theirs - ours)).sum(-1).mean())
    assert held.kl == pytest.approx(kl, rel=1e-3)


def test_a_walk_that_was_killed_goes_on_to_the_same_bits(walk):
    whole, _ = walk(Coarse(), folder="whole")
    layers = whole.run(quiet)

    class Killed(BaseException):
        pass

    def kill(*how_far):
        raise Killed

    with pytest.raises(Killed):
        walk(Coarse())[0].run(kill)
    again, _ = walk(method := Coarse())
    assert again.num_kept == 1
    assert again.run(quiet) == layers
    assert len(method.before) == 1  # the first layer was not changed again
    for index in range(2):
        found, expected = (w.kept.get(index).tensors for w in (again, whole))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_what_a_method_refuses_names_the_layer(walk):
    class Refuses(Nothing):
        def change(self, block, before):
            if before:
                raise TwellError("no")
            return super().change(block, before)

    with pytest.raises(TwellError, match=r"^layer 1 cannot be fitted: no$"):
        walk(Refuses())[0].run(quiet)


def test_what_attention_adds_mends_the_states_before_it(walk, text, monkeypatch):
    """Rounded after a broken layer, it brings the states nearer to the original's."""
    left = {}

    class Mends(Coarse):
        def change(self, block, before):
            if not before:
                return super().change(block, before)
            for name in ("as it is", "mended"):
                if name == "as it is":
                    monkeypatch.setattr(linears, "_factor", lambda block, names: None)
                linears.round_linears(block, [[OUT]], Grid(8, torch.float32))
                monkeypatch.undo()
                left[name] = self.left(block)
            return Change({}, {})

        def left(self, block):
            weight = block.changed.module.get_submodule(OUT).weight
            return sum(
                float((read.away + read.wanted[OUT] - read.inputs[OUT] @ weight.T).square().sum())
                for read in block.reads([OUT])
            )

    walk(Mends(mends=False))[0].run(quiet)
    assert left["mended"] < 0.9 * left["as it is"]
