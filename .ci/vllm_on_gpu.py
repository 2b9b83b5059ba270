"""vLLM with twellctl's plugin and vLLM alone: are answers the same, how fast. For developers.

    python .ci/vllm_on_gpu.py equal FOLDER --gpus 0,1
    python .ci/vllm_on_gpu.py time Llama-3.1-8B/config.json --density 0.02 --density 0.05

It needs a GPU, vLLM, and twellctl importable with what its kernels need. It downloads nothing.
"""

import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM

from twellctl.bench.random_model import make_model, open_shape
from twellctl.bundle.twell_config import TILE, new_twell
from twellctl.convert import convert
from twellctl.export import export
from twellctl.firing.counts import count_layers
from twellctl.firing.profiled import Profile
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import fingerprint
from twellctl.models.quantised import kept_layers, round_tensors
from twellctl.models.schemes import SCHEMES
from twellctl.models.silu_form import choose_form, factors, scaled

app = typer.Typer(help=__doc__, pretty_exceptions_enable=False)
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
STEPS = 130
SMALL = {
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
EAGER, TWO = {"enforce_eager": True}, {"tensor_parallel_size": 2}
SETTINGS = {  # plugins, route, options of vLLM; the first one is what the others are compared with
    "own_graphs": ("", "auto", {}),
    "own_eager": ("", "auto", EAGER),
    "own_two": ("", "auto", EAGER | TWO),
    "eager": ("twellctl", "twell", EAGER),
    "graphs": ("twellctl", "twell", {}),
    "graphs_auto": ("twellctl", "auto", {}),
    "chunks": ("twellctl", "twell", {"max_num_batched_tokens": 64, "enable_prefix_caching": True}),
    "ngram": ("twellctl", "twell", {"speculative_config": NGRAM | {"prompt_lookup_min": 1}}),
    "two": ("twellctl", "twell", TWO),
}


@app.command()
def equal(folder: Path, gpus: str = "0", fp8: bool = True):
    """Compare log-probabilities in vLLM with transformers in float32.

    `make` writes an export to FOLDER, `ask` serves it in each of SETTINGS, side by side (tensor
    parallel where --gpus are two, like 0,1), `judge` ends with 1 where errors are more than those
    of transformers in bf16. Each is a command, too. Logs stay in FOLDER.
    """
    ids, asked = gpus.split(","), {}
    folder.mkdir(parents=True, exist_ok=True)
    if _step(folder, "make", ids[:1], "--fp8" if fp8 else "--no-fp8").wait():
        sys.exit(f"no export: {folder}/make.log")
    for name, (plugins, route, options) in SETTINGS.items():
        (folder / f"{name}.json").unlink(missing_ok=True)
        on = ids[:2] if "tensor_parallel_size" in options else [ids[len(asked) % len(ids)]]
        if len(on) == options.get("tensor_parallel_size", 1):
            more = {"VLLM_PLUGINS": plugins, "TWELL_ROUTE": route}
            asked[name] = _step(folder, "ask", on, name, **more)
    failed = [name for name, process in asked.items() if process.wait()]
    off = _step(folder, "judge", ids[:1], TWELL_ROUTE="dense").wait()
    logs = (folder / f"{name}.log" for name in ("make", *asked, "judge"))
    print(*chain(*map(_shown_lines, logs)), sep="\n")
    sys.exit(f"failed, see the logs in {folder}: {', '.join(failed)}" if failed else off)


def _step(folder: Path, step: str, gpus: list[str], word: str = "", **more) -> subprocess.Popen:
    name = word if step == "ask" else step
    more |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    more |= {"VLLM_CACHE_ROOT": str(folder.absolute() / "cache" / name), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, __file__, step, str(folder), *filter(None, [word])]
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(command, env=os.environ | more, stdout=log, stderr=log)


def _shown_lines(log: Path) -> list[str]:
    """Rows of tables, and how FFNs run."""
    lines = log.read_text().splitlines()
    return [line for line in lines if line.startswith("| ") or "TwELL, rank" in line]


@app.command(hidden=True)
@torch.no_grad()
def make(folder: Path, fp8: bool = True):
    (folder / "shape").mkdir(parents=True, exist_ok=True)
    (folder / "shape/config.json").write_text(json.dumps(SMALL))
    _, model, layers, fires = _draw(folder / "shape", 0.05, 2048, louder=10)
    model.config.hidden_act = "silu"
    model.save_pretrained(folder / "silu")
    convert(folder / "silu", folder / "relu", overwrite=True)
    profile = Profile(
        model="random",
        fingerprint=fingerprint(open_checkpoint(folder / "relu")),
        data=("ids",),
        windows=8,
        seq_len=1024,
        tokens=8192,
        text_tokens=8192,
        dtype="bfloat16",
        device=DEVICE,
        versions={},
        intermediate_size=SMALL["intermediate_size"],
        tile=TILE,
        layers=tuple(layers),
        by_position=(),
        by_kind=(),
    )
    quantize = "fp8" if fp8 else None
    export(folder / "relu", folder / "export", profile=profile, quantize=quantize, overwrite=True)
    print(f"| FP8: {fp8}, {fires}")


@torch.no_grad()
def _draw(config: Path, density: float, context: int, louder: float = 1):
    """Shape, model, what fires in its layers, and that in words; FFNs write `louder` times it."""
    shape = open_shape(config, None, context=context)
    generator = torch.Generator(DEVICE).manual_seed(0)
    model = make_model(shape, density, dtype=torch.bfloat16, generator=generator)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight *= louder
    length = min(1024, shape.context)
    ids = torch.tensor([_ids(length, seed, shape.vocabulary) for seed in range(8)], device=DEVICE)
    layers = count_layers(model, ids, TILE)
    fires = [layer.density for layer in layers]
    return shape, model, layers, f"{min(fires):.2%} to {max(fires):.2%} fires"


def _ids(length: int, seed: int, vocabulary: int = SMALL["vocab_size"]) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, vocabulary, (length,), generator=generator).tolist()


def prompts() -> tuple[list[list[int]], list[list[int]]]:
    """Random prompts, where the last ones loop; and prompts with the same beginning."""
    lengths = [1, 5, 9, 16, 17, 33, 48, 64, 65, 96, 130, 200, 257, 300, 400, 512, 900]
    plain = [_ids(n, n) for n in lengths] + [_ids(6, n) * n for n in (3, 6, 12, 20)]
    return plain, [_ids(200, 0) + _ids(n, n) for n in (3, 9, 20, 31)]


@app.command(hidden=True)
def ask(folder: Path, setting: str):
    llm = _engine(folder / "export", 1, 1024, [1, 4, 8, 16, 32], **SETTINGS[setting][2])

    def run(texts: list[list[int]], **more) -> list[dict]:
        rows, asked = [], [{"prompt_token_ids": ids} for ids in texts]
        for found in llm.generate(asked, _sampling(24, logprobs=0, **more), use_tqdm=False):
            tokens = [*found.prompt_token_ids, *found.outputs[0].token_ids]
            given = [*(found.prompt_logprobs or [None])[1:], *found.outputs[0].logprobs]
            pairs = zip(tokens[-len(given) :], given, strict=True)
            row = {"tokens": tokens, "logprobs": [one[token].logprob for token, one in pairs]}
            rows.append(row | {"cached": found.num_cached_tokens or 0})
        return rows

    plain, shared = prompts()
    rows = run(plain, prompt_logprobs=0) + run(shared[:1])[:0] + run(shared)
    drafts = sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_drafts")
    (folder / f"{setting}.json").write_text(json.dumps({"rows": rows, "drafts": drafts}))


def _engine(folder: Path | str, gib: int, context: int, graphs: list[int], **options):
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    if not options.get("enforce_eager"):
        options["compilation_config"] = {"cudagraph_capture_sizes": sorted(graphs)}
    if GPU:  # engines stand side by side
        options |= {"kv_cache_memory_bytes": gib << 30, "gpu_memory_utilization": 0.05 * gib}
    always = {
        "dtype": "bfloat16",
        "seed": 0,
        "skip_tokenizer_init": True,
        "max_model_len": context,
        "max_num_seqs": max(8, *graphs),
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
    }
    return LLM(str(folder), **always | options)


def _sampling(new: int, **more):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, **more)


@app.command(hidden=True)
@torch.no_grad()
def judge(folder: Path):
    files = {name: folder / f"{name}.json" for name in SETTINGS}
    answers = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    exact, off = {}, not answers
    for dtype in (torch.float32, torch.bfloat16):
        how = {"trust_remote_code": True, "dtype": dtype}
        model = AutoModelForCausalLM.from_pretrained(folder / "export", **how).to(DEVICE).eval()
        for text in {tuple(row["tokens"]) for one in answers.values() for row in one["rows"]}:
            ids = torch.tensor([text], device=DEVICE)
            found = model(ids[:, :-1]).logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])
            exact.setdefault(text, []).append(found.flatten().cpu())
    print("| setting | tokens | mean error, of bf16 | most | first tokens | cached | drafts |")
    for name, answer in answers.items():
        rows, errors = answer["rows"], []
        for row in rows:
            num, (right, bf16) = len(row["logprobs"]), exact[tuple(row["tokens"])]
            both = torch.stack((torch.tensor(row["logprobs"]), bf16[-num:]))
            errors.append((both - right[-num:]).abs())
        errors = torch.cat(errors, 1)
        (mean, mean16), (most, most16) = errors.mean(1).tolist(), errors.amax(1).tolist()
        off |= (wrong := not (mean < 1.5 * mean16 and most < 3 * most16))
        pairs = zip(chain(*prompts()), rows, next(iter(answers.values()))["rows"], strict=True)
        same = [one["tokens"][len(p)] == other["tokens"][len(p)] for p, one, other in pairs]
        print(f"| {name}{' OFF' * wrong} | {errors.shape[1]} | {mean:.4f}, {mean16:.4f}", end="")
        print(f" | {most:.3f}, {most16:.3f} | {sum(same)} of {len(same)}", end="")
        print(f" | {sum(row['cached'] for row in rows)} | {answer['drafts']:.0f} |")
    sys.exit(int(off))


@app.command("time")
def time_all(
    config: Path,
    density: Annotated[list[float], typer.Option()],
    batch: Annotated[list[int], typer.Option()] = (1, 16, 64),
    fp8: bool = True,
    prefill: int = 16384,
):
    """Time vLLM's own class and the plugin, one after the other, with the weights of an export.

    They are random, in the shape of CONFIG. Decoding of --batch sequences after prompts of 64
    tokens: the median of 100 steps by the clock, and of later ones by the graphs alone. Prefills of
    1 x --prefill tokens and in 8 prompts: the median of five. Milliseconds.
    """
    os.environ["VLLM_PLUGINS"] = ""
    weights: dict[str, torch.Tensor] = {}
    _register_loader(weights)
    logging.getLogger("vllm.twellctl").addHandler(logging.StreamHandler(sys.stdout))
    print(f"{torch.cuda.get_device_name() if GPU else 'CPU'}, {config}, FP8: {fp8}")
    print("|", *(f"{n} sequences | graphs alone |" for n in batch), f"1 x {prefill} | 8 x |")
    own: list[float] = []
    for each in density:
        weights.clear()
        written, fires = _as_exported(config, each, fp8, prefill + 512, weights)
        if not own:
            own = _measure(written, "vLLM's own", batch, prefill)
            os.environ["VLLM_PLUGINS"] = "twellctl"
            import twellctl.vllm

            twellctl.vllm.register()
        _measure(written, fires, batch, prefill, own)


def _register_loader(weights: dict[str, torch.Tensor]) -> None:
    """Let vLLM's load format "made" take the `weights` that are there when a model is loaded."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class Made(BaseModelLoader):
        def download_model(self, model_config):
            pass

        def load_weights(self, model, model_config):
            model.load_weights(iter(list(weights.items())))

    register_model_loader("made")(Made)


def _as_exported(config: Path, density: float, fp8: bool, context: int, weights: dict):
    """Its config.json, and what fires; the tensors come into `weights`."""
    shape, model, layers, fires = _draw(config, density, context)
    form, _ = choose_form(layers, shape.layers)
    twell = new_twell(shape.layers, None, "silu") | form
    twell |= {"slots": [one.slots for one in layers], "densities": [one.density for one in layers]}
    written = shape.config | {"hidden_act": "silu", "twell": twell}
    written |= {"architectures": [type(model).__name__], "max_position_embeddings": context}
    drawn = {name: weight.detach() for name, weight in model.named_parameters()}
    by = factors(drawn, form, model.config.intermediate_size)
    tensors = ((n, scaled(w, by[n].to(DEVICE)) if n in by else w) for n, w in drawn.items())
    if fp8:
        kept = kept_layers(model)
        linears = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        scheme = SCHEMES["fp8"]
        tensors = round_tensors(tensors, frozenset(linears - set(kept)), scheme)
        written["quantization_config"] = scheme.quantization_config(kept)
    weights.update(tensors)
    return written, fires


def _measure(config: dict, what: str, batches: list[int], prefill: int, own=()) -> list[float]:
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()  # what drawing left, too
    how = {"load_format": "made", "max_num_batched_tokens": prefill, "disable_log_stats": True}
    with tempfile.TemporaryDirectory() as folder:  # vLLM keeps its choice of a class by the name
        (Path(folder) / "config.json").write_text(json.dumps(config))
        llm = _engine(folder, 6, prefill + 512, batches, **how)
        engine = llm.llm_engine
        _decode(engine, batches[0])  # the first is slow
        times = [ms for batch in batches for ms in _decode(engine, batch)]
        times += [_prefill(engine, n, prefill // n) for n in (1, 8)]
        del llm, engine
        gc.collect()
        cleanup_dist_env_and_memory()
        torch._dynamo.reset()
    over = [base / ms for base, ms in zip(own or times, times, strict=True)]
    cells = (f"{ms:.3f}, {x:.2f}x |" for ms, x in zip(times, over, strict=True))
    print(f"| {what} |", *cells, flush=True)
    return times


def _add(engine, length: int, new: int, seed: int) -> None:
    ids = _ids(length, seed, engine.model_config.get_vocab_size())
    engine.add_request(f"{length} {seed}", {"prompt_token_ids": ids}, _sampling(new))


def _decode(engine, batch: int) -> tuple[float, float]:
    """A step by the clock; and its graph alone, later, since events cost time; nan without any."""
    for seed in range(batch):
        _add(engine, 64, STEPS + 40, seed)
    marks, graphs, replay = [], [], torch.cuda.CUDAGraph.replay

    def timed(graph) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay(graph)
        end.record()
        graphs.append((start, end))

    while engine.has_unfinished_requests():
        engine.step()
        marks.append(time.perf_counter())
        if len(marks) == STEPS:
            torch.cuda.CUDAGraph.replay = timed
    torch.cuda.CUDAGraph.replay = replay
    if graphs:
        torch.cuda.synchronize()
    alone = statistics.median(s.elapsed_time(e) for s, e in graphs) if graphs else float("nan")
    steps = [after - before for before, after in pairwise(marks[:STEPS])]
    return statistics.median(steps[-100:]) * 1e3, alone


def _prefill(engine, num: int, length: int) -> float:
    times = []
    for turn in range(6):
        for prompt in range(num):
            _add(engine, length, 1, 100 * turn + prompt)
        start = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:])


if __name__ == "__main__":
    app()
