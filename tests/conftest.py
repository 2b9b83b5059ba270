"""Tiny models of every family, made here: the suite reads nothing outside the checkout.

In the environment: TWELL_TEST_KILLS, how often each command is killed at a random moment (else 1);
TWELL_TEST_EVERY_CASE, set: also what is like another, or takes long, such as kernels at all sizes,
as they ship and with every mistake, and the whole of quickstart; TWELL_TEST_ANSWERS, how many
random answers are judged (else 400); TWELL_TEST_BUILDS, a folder that keeps what is compiled for
the next session of this machine; TWELL_TEST_MODEL, the folder of a real pretrained SiLU model,
without which some tests are skipped.

What takes long to import is imported where it is used: the process that only deals tests out to
others (`pytest -n`) has no need of it.
"""

import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for children too: tiny models gain from no more

import pytest
from other_processes import Started, warm_answers, warm_process

FAMILIES = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "phi3": {"pad_token_id": 0},
    "smollm3": {"pad_token_id": 0},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "pad_token_id": 0},
    "minicpm3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "pad_token_id": 0,
    },
    "qwen3_5_text": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "head_dim": 8,
        "pad_token_id": 0,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.3,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def stdlib_texts(count: int) -> list[str]:
    """The first `count` sources of the standard library, by name."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:count]
    return [path.read_text(encoding="utf-8") for path in files]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """What all processes of a session share: what is compiled once (compiled.py), and warm.py."""
    if not hasattr(config, "workerinput"):
        session = contextlib.ExitStack()
        config.add_cleanup(session.close)
        folder = session.enter_context(tempfile.TemporaryDirectory(prefix="twell-tests-"))
        os.environ.setdefault("TWELL_TEST_BUILDS", folder)
        os.environ["TWELL_TEST_WARM"] = session.enter_context(warm_process(Path(folder)))


def pytest_report_header():
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return None
    return "no GPU: the tests of tests/gpu are left out"


def pytest_collection_modifyitems(config, items):
    """The longest tests first, so that no process is left with one alone at the end; and so that
    one process runs all guides, which need what README says."""
    import torch

    first = ["test_the_whole_job", "test_what_a_guide_says_runs"]
    items.sort(key=lambda item: first.index(name) if (name := item.originalname) in first else 2)
    if not torch.cuda.is_available():  # some two thousand, to say so of each takes its time
        on_gpus = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=on_gpus)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported until all tests are collected stays: no garbage collection looks at it, then
    or from there on. A trainer asks for some, and each would take a quarter of a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def imported_stays():
    """As `pytest_collection`: what the tests of a module import stays."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tokenizer():
    """A byte-level BPE of 512 tokens with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(stdlib_texts(10), trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|endoftext|>", bos_token="<|endoftext|>"
    )
    made.chat_template = CHAT_TEMPLATE
    return made


@pytest.fixture(scope="session")
def sentencepiece():
    """A tokenizer as SentencePiece models have it: "▁" for a space, a token for any byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["▁", "a", "b", "c", "▁a", "▁b"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + i for i, word in enumerate(words)} | {"<s>": 300}
    model = models.BPE(vocab, [("▁", "a"), ("▁", "b")], byte_fallback=True)
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    made.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")


@pytest.fixture(scope="session")
def make_model(tokenizer, tmp_path_factory):
    """`make_model(family, **config)` writes a random SiLU model and returns its folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from twellctl.models.loading import quiet_transformers

    def make(family: str = "llama", *, seed: int = 0, shard_size: str = "5GB", **changes) -> Path:
        config = AutoConfig.for_model(family, **TINY | FAMILIES.get(family, {}) | changes)
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0, 0.3)
        folder = tmp_path_factory.mktemp(family) / "model"
        with quiet_transformers():
            model.save_pretrained(folder, max_shard_size=shard_size)
            tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def silu_llama(make_model) -> Path:
    """A tiny SiLU Llama; read only."""
    return make_model("llama")


@pytest.fixture(scope="session")
def relu_llama(silu_llama, tmp_path_factory) -> Path:
    """The tiny Llama, converted; read only."""
    from twellctl.convert import convert

    out = tmp_path_factory.mktemp("relu") / "model"
    convert(silu_llama, out)
    return out


def _forget_remote_code() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def load_trusted(tmp_path_factory):
    """Load an export with its own code, which transformers copies to a module cache made here.

    Other caches, whose code would be found first, are no longer on sys.path.
    """
    import transformers

    cache = str(tmp_path_factory.mktemp("modules"))

    def load(folder: Path, door: type = transformers.AutoModelForCausalLM, **options):
        return door.from_pretrained(folder, trust_remote_code=True, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", cache)
        kept = [path for path in sys.path if not (Path(path) / "transformers_modules").exists()]
        patch.setattr(sys, "path", kept)
        _forget_remote_code()
        yield load
        _forget_remote_code()


@pytest.fixture(scope="session")
def export_llama(relu_llama, tmp_path_factory) -> Path:
    """The tiny Llama, exported; read only."""
    from twellctl.export import export

    out = tmp_path_factory.mktemp("exports") / "exported"
    export(relu_llama, out)
    return out


@pytest.fixture(scope="session")
def uninterrupted(relu_llama, text_file, tmp_path_factory):
    """What `finetune` returned of the tiny Llama, by `finetune_runs.SMALL`; read only."""
    from finetune_runs import small

    from twellctl.finetune import finetune

    return finetune(relu_llama, tmp_path_factory.mktemp("whole") / "out", small(text_file))


@pytest.fixture(scope="session")
def limits_programs():
    """Tests that run programs are skipped where none can be limited."""
    from twellctl.evaluation import limited

    if why_not := limited.guards().why_not:
        pytest.skip(why_not)


@pytest.fixture
def exported(export_llama, tmp_path) -> Path:
    """A copy of that export, which a test may spoil."""
    return Path(shutil.copytree(export_llama, tmp_path / "exported"))


@pytest.fixture
def no_answers(monkeypatch):
    """No answers are compared, by eval or at the end of a run: they take as long as the rest."""
    for module in ("twellctl.training.teacher", "twellctl.evaluate"):
        monkeypatch.setattr(importlib.import_module(module), "prompts_in", lambda *given: [])


@pytest.fixture
def count_less(monkeypatch):
    """Benches count fewer tokens and copy less, and samples of a time are short."""
    monkeypatch.setattr("twellctl.bench.timing.SAMPLE_SECONDS", 0.001)
    monkeypatch.setattr("twellctl.bench.model.COUNTED_TOKENS", 512)
    monkeypatch.setattr("twellctl.bench.decode.COUNTED_TOKENS", 512)
    monkeypatch.setattr("twellctl.bench.decode_floors.COPIED_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr("twellctl.bench.random_model.SET_TOKENS", 512)


@pytest.fixture
def both_forms(monkeypatch):
    """What stands in for the decoder over kernels, where there is no GPU."""
    from small_benches import BothForms

    monkeypatch.setattr("twellctl.bench.decode_runs.KernelDecoder", BothForms)


@pytest.fixture
def cli(monkeypatch, capfd):
    """`cli(*words)` runs the command line in this process: (exit code, stdout, lines of stderr).

    What lasts is not said there, however slow the machine is.
    """
    from twellctl.cli.main import main
    from twellctl.screens import ui

    monkeypatch.setattr(ui, "PATIENCE", 600)
    terminate = signal.getsignal(signal.SIGTERM)

    def run(*words) -> tuple[int, str, list[str]]:
        monkeypatch.setattr(sys, "argv", ["twellctl", *map(str, words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capfd.readouterr()
        return stop.value.code, out, err.splitlines()

    yield run
    signal.signal(signal.SIGTERM, terminate)


@pytest.fixture
def refusal(cli):
    """`refusal(*words, code=1)`: the line of stderr that a command ends with, and says no more."""

    def run(*words, code: int = 1) -> str:
        ended, out, err = cli(*words)
        assert (ended, out, len(err)) == (code, "", 1), (out, err)
        return err[0]

    return run


@pytest.fixture
def success(cli):
    """`success(*words)`: stdout, and the lines of stderr, of a command that ends well."""

    def run(*words) -> tuple[str, list[str]]:
        code, out, err = cli(*words)
        assert code == 0, err
        return out, err

    return run


def write_texts(path: Path, characters: int) -> Path:
    """A jsonl of real text: the beginnings of some twenty sources of the standard library."""
    lines = (json.dumps({"text": text[:characters]}) + "\n" for text in stdlib_texts(20))
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """Short texts, since each run and each profile makes tokens of all of them."""
    return write_texts(tmp_path_factory.mktemp("text") / "text.jsonl", 3000)


@pytest.fixture(scope="session")
def long_text(tmp_path_factory) -> Path:
    """Enough to learn something from."""
    return write_texts(tmp_path_factory.mktemp("text") / "long.jsonl", 8000)


@pytest.fixture(scope="session")
def real_model() -> Path:
    """A real pretrained SiLU model, if the environment names one."""
    folder = os.environ.get("TWELL_TEST_MODEL")
    if not folder:
        pytest.skip("TWELL_TEST_MODEL names no model folder")
    return Path(folder)


@pytest.fixture(scope="session")
def warm():
    """`warm(way, *given)`: what warm.py answers."""
    with warm_answers() as ask:
        yield lambda *words: ask(words)


@pytest.fixture(scope="session")
def processes(warm):
    """`processes(job, count, *words)`: what each of `count` processes answers (sharded_jobs.py)."""
    return lambda job, count, *words: warm("fork", job, count, words)


@pytest.fixture
def started(warm, tmp_path):
    """`started(*words, code="", terminal=None, **environment)`: a command as it begins."""
    begun = []

    def start(*words, code="", terminal=None, **environment) -> Started:
        folder = tmp_path / f"streams-{len(begun)}"
        begun.append(Started(warm, folder, list(map(str, words)), code, terminal, environment))
        return begun[-1]

    yield start
    for process in begun:
        process.kill()


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """A driver of a Chromium; tests that want it are skipped where there is none."""
    from browser import start_chromium

    driver = start_chromium(tmp_path_factory.mktemp("chromium"))
    yield driver
    driver.quit()
