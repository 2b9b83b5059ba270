"""An export under FSDP2 trains over the kernels: its parameters are gathered for each pass."""

import pytest
import torch
import torch.distributed as dist
from on_gpu import HOPPER
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from twellctl.bundle import twell_ffn
from twellctl.bundle.twell_model import gated_ffns, twell_class
from twellctl.convert import convert
from twellctl.export import export

pytestmark = HOPPER


@pytest.fixture
def one_process(tmp_path):
    """A group of this process alone."""
    how = {"init_method": f"file://{tmp_path}/store", "world_size": 1, "rank": 0}
    dist.init_process_group("nccl", **how, device_id=torch.device("cuda:0"))
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("mixed", [False, True], ids=["bf16", "fp32 gathered as bf16"])
def test_a_sharded_export_has_the_gradients_of_a_whole_one(
    make_model, tmp_path, monkeypatch, one_process, mixed
):
    convert(make_model("llama", hidden_size=128, intermediate_size=520), tmp_path / "relu")
    export(tmp_path / "relu", tmp_path / "out")
    ids = ((torch.arange(340).view(2, 170) * 37) % 512).to("cuda")
    calls, run = [], twell_ffn._train_ffn_op
    monkeypatch.setattr(twell_ffn, "_train_ffn_op", lambda *given: calls.append(1) or run(*given))

    def open_model(dtype: torch.dtype):
        return twell_class("LlamaForCausalLM").from_pretrained(
            tmp_path / "out", dtype=dtype, twell_route="twell"
        )

    whole = open_model(torch.bfloat16).to("cuda")
    whole(ids, labels=ids, use_cache=False).loss.backward()
    assert len(calls) == len(gated_ffns(whole))

    sharded = open_model(torch.float32 if mixed else torch.bfloat16)
    how = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if mixed else {}
    for layer in sharded.model.layers:
        fully_shard(layer, **how)
    fully_shard(sharded, **how)
    sharded(ids, labels=ids, use_cache=False).loss.backward()
    assert len(calls) == 2 * len(gated_ffns(whole))
    wanted = dict(whole.named_parameters())
    for name, parameter in sharded.named_parameters():
        found, grad = parameter.grad.full_tensor().float(), wanted[name].grad.float()
        assert (found - grad).norm() <= 0.02 * grad.norm(), name
