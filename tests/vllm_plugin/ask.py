"""A script: vLLM answers prompts. `ask.py '{"folder": ..., "prompts": [[id]], ...}' OUT.json`

Also in the request: "new_tokens", and settings of vLLM's LLM. OUT.json gets "rows", for each prompt
its tokens with the new ones, and the log-probability of each but the first; and "calls", how often
the operator of the plugin ran in this process after the start.
"""

import json
import sys
from pathlib import Path


def answer(folder, prompts, new_tokens, **settings) -> dict:
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(folder, disable_log_stats=True, max_model_len=256, seed=0, **settings)
    sampling = SamplingParams(
        temperature=0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    calls = []
    if hasattr(torch.ops.twell, "ffn_vllm"):  # a plain import of ours would register it
        from twellctl.bundle import twell_ffn

        packed_ffn = twell_ffn.gated_ffn
        twell_ffn.gated_ffn = lambda *a, **k: calls.append(1) or packed_ffn(*a, **k)
    rows = []
    for output in llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling):
        (written,) = output.outputs
        tokens = [*output.prompt_token_ids, *written.token_ids]
        told = [*output.prompt_logprobs[1:], *written.logprobs]
        found = [one[token].logprob for token, one in zip(tokens[1:], told, strict=True)]
        rows.append({"tokens": tokens, "logprobs": found})
    return {"rows": rows, "calls": len(calls)}


if __name__ == "__main__":
    request, out = sys.argv[1:]
    Path(out).write_text(json.dumps(answer(**json.loads(request))))
