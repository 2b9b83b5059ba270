"""What one model folder hands to the next: weights, and files that a model needs, by their names.

Nothing else goes along: no stray file, no code, no path of this machine, and nothing that a link
fetches from outside the folder.
"""

import json
import re
import shutil
from pathlib import Path

from twellctl.errors import TwellError
from twellctl.files.strict_json import json_text
from twellctl.models.checkpoint import FIT_FILE, REPORT_FILE, Checkpoint
from twellctl.models.shards import ABOVE, INDEX, ORIGINAL, SINGLE

METRICS_FILE = "metrics.jsonl"  # in a run folder, and in what it becomes
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")  # or in tokenizer_config.json
SIDE_FILES = {
    "generation_config.json",
    *CHAT_TEMPLATES,
    REPORT_FILE,
    FIT_FILE,
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
}
TEMPLATES = "additional_chat_templates"
CARD = "README.md"
_LICENCE = re.compile(r"(licen[sc]e|notice|copying|use_policy)(-\w+)?(\.(txt|md))?", re.IGNORECASE)
CODE = ("auto_map", "custom_generate")  # entries of settings that name code
_OF_A_MACHINE = ("_name_or_path", "name_or_path", "special_tokens_map_file", "tokenizer_file")


def copy_weights(checkpoint: Checkpoint, folder: Path) -> None:
    """The weights as they are. `TwellError` for those of which some lie in the folder above."""
    if any(shard.startswith(ABOVE) for shard in checkpoint.shards):
        raise TwellError(
            f"{checkpoint.name} has its attention in the folder above: take the model that it is a "
            "copy of"
        )
    names = checkpoint.shards if checkpoint.shards == (SINGLE,) else (*checkpoint.shards, INDEX)
    for name in names:
        shutil.copyfile(own_file(checkpoint.path / name), folder / name)


def copy_side_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Tokenizer, chat templates, generation config, licence, and the report of a fine-tuning."""
    own_file(checkpoint.path / "config.json")  # what it says goes along as well
    for source in sorted(checkpoint.path.iterdir()):
        if source.name in SIDE_FILES or _LICENCE.fullmatch(source.name):
            _copy_side_file(source, folder / source.name)
    for source in sorted((checkpoint.path / TEMPLATES).glob("*.jinja")):
        (folder / TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(own_file(source, checkpoint.path), folder / TEMPLATES / source.name)


def model_files(checkpoint: Checkpoint) -> list[Path]:
    """All files that say what a model computes, and which tokens: not how it was made."""
    names = {"config.json", INDEX, *checkpoint.shards, *SIDE_FILES} - {REPORT_FILE, FIT_FILE}
    found = [checkpoint.path / name for name in sorted(names)]
    templates = sorted((checkpoint.path / TEMPLATES).glob("*.jinja"))
    return [path for path in (*found, *templates) if path.is_file()]


def write_config(folder: Path, config: dict) -> None:
    """config.json as transformers writes it."""
    kept = {key: value for key, value in config.items() if key not in _OF_A_MACHINE}
    (folder / "config.json").write_text(json_text(kept), encoding="utf-8")


def own_file(path: Path, folder: Path | None = None) -> Path:
    """Where the content of `path`, a file of the model in `folder` (its parent), really lies.

    `TwellError` if that is outside. A snapshot of the hub's cache has its files in `blobs` next to
    `snapshots`, or in the `blobs` that all models of the cache share.
    """
    real, inside = path.resolve(), (folder or path.parent).resolve()
    roots = [inside]
    snapshot = inside.parent if inside.name == ORIGINAL else inside
    if snapshot.parent.name == "snapshots":
        repository = snapshot.parent.parent
        roots += [repository / "blobs", repository.parent / "blobs"]
    if not any(root in real.parents for root in roots):
        raise TwellError(
            f"{path} is a link to {real}, outside its model folder: put the file itself there"
        )
    return real


def _copy_side_file(source: Path, target: Path) -> None:
    """Copy and clean one; `TwellError` unless it is a file. Other licences are skipped."""
    real = own_file(source)
    if real.is_file():
        shutil.copyfile(real, target)
        clean_side_file(target)
    elif source.name in SIDE_FILES:
        raise TwellError(f"{source} is not a regular file: put the file itself there")


def clean_side_file(path: Path) -> None:
    """Take out of a settings file what is of a machine or leads to code, and a name that only
    newer versions of transformers know."""
    content = json_object(path) if path.name.endswith("_config.json") else None
    if content is None:
        return
    kept = {k: v for k, v in content.items() if k not in (*_OF_A_MACHINE, *CODE)}
    if (name := kept.get("tokenizer_class")) == "TokenizersBackend":  # of transformers 5
        kept["tokenizer_class"] = "PreTrainedTokenizerFast"
    elif name is not None and not str(name).isidentifier():
        del kept["tokenizer_class"]
    if kept != content:
        path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def json_object(path: Path) -> dict | None:
    """The object in a JSON file; None if there is no such file, or it holds no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer of a model folder has one."""
    content = json_object(folder / "tokenizer_config.json") or {}
    return bool(content.get("chat_template")) or any(
        (folder / name).is_file() for name in CHAT_TEMPLATES
    )
