"""A script: vLLM answers prompts. `ask.py '{"folders": [...], "prompts": [[id]], ...}' OUT.json`

Also in the request: "new_tokens", and settings of vLLM's LLM. OUT.json gets, for each folder,
"rows": for each prompt its tokens with the new ones, and the log-probability of each but the first;
and "calls": how often the operator that exports and the plugin share ran in this process.
"""

import gc
import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from twellctl.bundle import twell_ffn


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
        told = [*output.prompt_logprobs[1:], *written.logprobs]
        found = [one[token].logprob for token, one in zip(tokens[1:], told, strict=True)]
        rows.append({"tokens": tokens, "logprobs": found})
    return {"rows": rows, "calls": len(calls)}


def main(request: str, out: str) -> None:
    calls, packed_ffn = [], twell_ffn.gated_ffn
    twell_ffn.gated_ffn = lambda *a, **k: calls.append(1) or packed_ffn(*a, **k)
    wanted, answers = json.loads(request), []
    for folder in wanted.pop("folders"):
        answers.append(answer(folder, calls=calls, **wanted))
        gc.collect()
        cleanup_dist_env_and_memory()
    Path(out).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
