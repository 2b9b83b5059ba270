"""The spread of what fires against counts made here."""

import torch

from twellctl.firing.counts import LayerCount


def test_the_spread_of_a_layer():
    torch.manual_seed(0)
    gate = torch.rand(1000, 64) - torch.rand(1000, 1) ** 0.2  # tokens of many densities
    gate[:, :5] = -1
    count = LayerCount(64, 16, torch.device("cpu"))
    for part in gate.split(300):
        count.add(part, part.relu())
    found, nnz = count.summary(), sorted((gate > 0).sum(1).tolist())
    assert (found.nnz_p10, found.nnz_p90, found.dead) == (nnz[99], nnz[899], 5)
