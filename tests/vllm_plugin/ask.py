"""A script: vLLM answers prompts. `ask.py '{"folders": [...], "prompts": [[id]], ...}' OUT.json`

Also in the request: "new_tokens", and settings of vLLM's LLM. OUT.json gets, for each folder,
"rows": for each prompt its tokens with the new ones, and the log-probability of each but the first;
and "calls": how often the operator that exports and the plugin share ran in this process, or that
of FP8 weights. "played" in the request: a GPU is played, on which the kernels run over FP8 weights.
"""

import gc
import json
import sys
from pathlib import Path

import torch
from torch.nn.functional import linear
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from twellctl.bundle import twell_ffn
from twellctl.bundle.twell_choice import WayPlan
from twellctl.bundle.twell_dense import gated_ffn
from twellctl.bundle.twell_int4 import expand, unpack
from twellctl.vllm import fp8_ffn as plugins_fp8
from twellctl.vllm import models
from twellctl.vllm.plans import Planned


def answer(folder: str, prompts: list, new_tokens: int, calls: list, **settings) -> dict:
    llm = LLM(folder, disable_log_stats=True, max_model_len=256, seed=0, **settings)
    sampling = SamplingParams(
        temperature=0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    calls.clear()  # those of the start
    rows = []
    for output in llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling):
        (written,) = output.outputs
        tokens = [*output.prompt_token_ids, *written.token_ids]
        likely = [*output.prompt_logprobs[1:], *written.logprobs]
        found = [one[token].logprob for token, one in zip(tokens[1:], likely, strict=True)]
        rows.append({"tokens": tokens, "logprobs": found})
    return {"rows": rows, "calls": len(calls)}


def play_kernels() -> None:
    """Let all go over kernels, which find W_down in both layouts and the dense way beside them."""

    def run(dense, x, ffn, **numbers):
        assert ffn.turned.is_contiguous()
        assert torch.equal(ffn.turned.t().float(), ffn.down.values.float())
        y = gated_ffn(x, ffn)
        beside = dense.run(None, None, x, None, numbers["slots"])
        # a flip of one rounding of h is seen; a weight or scale in a wrong place gives far more
        held = x.isfinite().all(-1)  # of what vLLM starts with not all is
        assert (beside - y)[held].abs().sum() <= 0.2 * y[held].abs().sum()
        return y

    def plan_layers(layers, most, device, dtype, sources, dense, engine) -> Planned:
        x = torch.ones(3, layers[0].sizes.K, dtype=torch.bfloat16)
        assert dense(x).run().shape == x.shape  # so it is measured
        plan = WayPlan.parse("1+ union")
        return Planned("over played kernels", {layer.sizes: plan for layer in layers})

    plugins_fp8.sparse_ffn_of_engine = run
    models.plan_layers = plan_layers


def play_products_of_int4() -> None:
    """Let weights in 4 bits, as vLLM loads and fuses them, be computed with plainly: its build for
    CPUs has such products for AVX-512 alone."""
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel

    def keep(kernel, layer) -> None:
        setattr(layer, kernel.w_zp_name, None)

    def apply(kernel, layer, x, bias=None) -> torch.Tensor:
        packed, scales, _ = kernel._get_weight_params(layer)
        return linear(x, expand(unpack(packed), scales), bias)

    CPUWNA16LinearKernel.process_weights_after_loading = keep
    CPUWNA16LinearKernel.apply_weights = apply


def main(request: str, out: str) -> None:
    calls, computed = [], twell_ffn.gated_ffn
    twell_ffn.gated_ffn = lambda *a: calls.append(1) or computed(*a)
    compute = plugins_fp8.TwellFp8FFN.compute
    plugins_fp8.TwellFp8FFN.compute = lambda *a: calls.append(1) or compute(*a)
    wanted, answers = json.loads(request), []
    if wanted.pop("played", False):
        play_kernels()
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        play_products_of_int4()
    for folder in wanted.pop("folders"):
        answers.append(answer(folder, calls=calls, **wanted))
        gc.collect()
        cleanup_dist_env_and_memory()
    Path(out).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
