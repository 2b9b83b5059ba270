"""twellctl quickstart: the whole pipeline on a tiny model, on any machine, without a download.

It trains a SiLU Llama on the source of Python's standard library, then does what a user does with a
real model: fit, fine-tune, profile, export, load the export, generate.
"""

import contextlib
import dataclasses
import json
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from twellctl.convert import convert
from twellctl.errors import TwellError
from twellctl.export import export
from twellctl.files.home import from_home
from twellctl.files.outputs import not_ours_in_model, staged
from twellctl.finetune import FineTuned, Interrupted, finetune
from twellctl.firing.profiled import save_profile
from twellctl.models.carried import clean_side_file
from twellctl.models.loading import default_device, quiet_transformers
from twellctl.profile import profile
from twellctl.text.blocks import Blocks, read_blocks, token_stream, write_tokens
from twellctl.text.reading import read_texts
from twellctl.training.progress import Progress
from twellctl.training.recipe import resolve_recipe

Bar = Callable[[str], contextlib.AbstractContextManager[Callable[[int, int], None]]]
END = "<|endoftext|>"
CORPUS_CHARACTERS = 2_000_000
VOCABULARY = 512
SEQ_LEN = 128
BATCH = 8
STEPS = 300
LEARNING_RATE = 3e-3
FIT: dict[str, Any] = {  # settings of `convert`
    "tokens": 65536,
    "seq_len": SEQ_LEN,
    "density": 0.15,
    "steps": 100,
    "step_tokens": 1024,
}
PROMPT = "def __init__(self"


@dataclass(frozen=True)
class QuickStarted:
    """What changed from the SiLU model to its sparse export, on held-out text.

    Losses are nats per token, and densities are shares of neurons that fire."""

    out: Path
    export: Path
    silu_loss: float
    relu_loss: float
    sparse_loss: float
    relu_density: float
    density: float
    text: str


def quickstart(
    out: str | Path,
    *,
    overwrite: bool = False,
    note: Callable[[str], None] = lambda title: None,
    progress: Bar = lambda what: contextlib.nullcontext(lambda done, total: None),
    run: Progress | None = None,
) -> QuickStarted:
    """Run the whole pipeline into the folder `out`, in under three minutes on two CPU cores.

    `note` receives each step. `progress(what)` is a context that gives a function for `(done,
    total)`. `run` receives what fine-tuning reports.
    """
    out = from_home(out)
    torch.set_num_threads(1)  # so small a model gains little from more, and loses when it is busy
    try:
        how = {"overwrite": overwrite, "not_ours": lambda old: not_ours_in_model(old / "export")}
        with staged(out, **how) as stage:
            tuned, text = _whole_job(stage, note, progress, run)
    except Interrupted:
        raise KeyboardInterrupt from None  # its checkpoint went with the rest
    return QuickStarted(
        out=out,
        export=out / "export",
        silu_loss=_known(tuned.teacher_cross_entropy),
        relu_loss=_known(tuned.first_cross_entropy),
        sparse_loss=_known(tuned.cross_entropy),
        relu_density=_known(tuned.first_density),
        density=tuned.density,
        text=text,
    )


def _known(figure: float | None) -> float:
    """A figure of a run that has a teacher and held-out text, as this one does."""
    if figure is None:
        raise RuntimeError("fine-tuning did not measure its losses")
    return figure


def _whole_job(
    out: Path, note: Callable[[str], None], progress: Bar, run: Progress | None
) -> tuple[FineTuned, str]:
    """Everything, into the folder `out`; how fine-tuning ended, and what the export writes."""
    _write_corpus(out)
    note("training a SiLU model of half a million parameters on Python's own source")
    _train_silu(out, progress)
    note("convert: a ReLU model is fitted, layer by layer, without end-to-end training")
    data = [str(out / "train.jsonl")]
    convert(out / "silu", out / "relu", data=data, **FIT)
    note("finetune: a price on what fires, the SiLU model as teacher")
    how = {"data": data, "eval_data": [str(out / "val.jsonl")], "teacher": str(out / "silu")}
    recipe = resolve_recipe("quickstart", how)
    tuned = finetune(out / "relu", out / "sparse", recipe, progress=run)
    note("profile: which neurons fire")
    found = profile(out / "sparse", [str(out / "val.jsonl")], windows=64, seq_len=SEQ_LEN)
    found = dataclasses.replace(found, model="sparse", data=("val.jsonl",))  # as OUT has them
    save_profile(found, out / "profile.json")
    note("export, load and generate")
    export(out / "sparse", out / "export", profile=out / "profile.json")
    return tuned, _generate(out / "export")


def _write_corpus(out: Path) -> None:
    """train.jsonl and val.jsonl: every twentieth file of the standard library is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    files = sorted(
        path
        for top in root.iterdir()
        if top.name not in skipped  # site-packages may hold many thousands
        for path in ([top] if top.suffix == ".py" else top.rglob("*.py"))
        if not skipped & set(path.relative_to(root).parts)
    )
    np.random.default_rng(0).shuffle(files)
    total, kept = 0, []
    for file in files:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            kept.append(file.read_text(encoding="utf-8"))
            total += len(kept[-1])
        if total > CORPUS_CHARACTERS:
            break
    if len(kept) < 40:
        raise TwellError(f"{root} holds only {len(kept)} sources: this Python came without its own")
    for name, texts in (("val", kept[::20]), ("train", [t for i, t in enumerate(kept) if i % 20])):
        lines = (json.dumps({"text": text}) + "\n" for text in texts if text)
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def _train_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, bos_token=END)


def _train_silu(out: Path, progress: Bar) -> None:
    """Pretrain the tiny SiLU Llama into `out/silu`."""
    train = [str(out / "train.jsonl")]
    tokenizer = _train_tokenizer(read_texts(train, "text"))
    write_tokens(token_stream(read_texts(train, "text"), tokenizer), out / "tokens.bin")
    blocks = Blocks(read_blocks(out / "tokens.bin", SEQ_LEN))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config).to(default_device())
    with progress("steps") as show:
        _pretrain(model, blocks, show)
    with quiet_transformers():
        model.save_pretrained(out / "silu")
        tokenizer.save_pretrained(out / "silu")
        clean_side_file(out / "silu" / "tokenizer_config.json")
    (out / "tokens.bin").unlink()


def _pretrain(model: PreTrainedModel, blocks: Blocks, progress: Callable[[int, int], None]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, STEPS, pct_start=0.1)
    order = np.random.default_rng(0).integers(0, len(blocks), (STEPS, BATCH))
    for done, picked in enumerate(order, 1):
        ids = torch.stack([blocks[i]["input_ids"] for i in picked]).to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress(done, STEPS)


def _generate(folder: Path) -> str:
    """Some text by the export itself, through its own code."""
    torch.manual_seed(0)
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        model = model.to(default_device()).eval()
        prompt = tokenizer(PROMPT, return_tensors="pt").to(model.device)
        # drawn: the likeliest token of so small a model is a space, again and again
        how = {"do_sample": True, "temperature": 0.6, "top_k": 0, "pad_token_id": 0}
        made = model.generate(**prompt, max_new_tokens=32, **how)
    return tokenizer.decode(made[0])
