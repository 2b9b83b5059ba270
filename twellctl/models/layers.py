"""The layers of a stock model: the modules that hold its gated FFNs."""

from torch import nn

from twellctl.bundle.twell_model import gated_ffns


def ffn_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder's layers, in order."""
    names = {id(module): name for name, module in model.named_modules()}
    parents = [names[id(ffn)].rpartition(".")[0] for ffn in gated_ffns(model)]
    return [model.get_submodule(parent) for parent in parents]
