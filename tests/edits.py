"""What the files of a model hold, for a test to change."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow
import pyarrow.parquet
from safetensors.torch import load_file, save_file
from torch import Tensor


@contextmanager
def json_in(path: Path) -> Iterator[dict]:
    content = json.loads(path.read_text())
    yield content
    path.write_text(json.dumps(content))


@contextmanager
def weights_in(folder: Path) -> Iterator[dict[str, Tensor]]:
    """Of one file, which may be a link: what it leads to stays."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    yield tensors
    file.unlink()
    save_file(tensors, file, {"format": "pt"})


def linked(source: Path, folder: Path, *left_out: str) -> Path:
    """A new `folder` with links to all files of `source`, but for some."""
    folder.mkdir()
    for path in source.iterdir():
        if path.name not in left_out:
            (folder / path.name).symlink_to(path)
    return folder


def contents(folder: Path) -> dict[Path, bytes | None]:
    """Of all that lies in it; None of a folder."""
    return {p: p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def jsonl(path: Path, rows: Iterable[dict]) -> Path:
    """A file of these rows."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_table(path: Path, table: pyarrow.Table) -> None:
    """A parquet file, or an Arrow file as the datasets library saves one."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
        return
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
