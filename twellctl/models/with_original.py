"""A folder that holds a fit and its original: `twell_original` in it is a model folder, too.

Tensors that both have, byte for byte, lie once: in files without others, which the index of
`twell_original` names as files of the folder above. So transformers loads either folder as it is.
"""

from collections.abc import Mapping
from pathlib import Path

from twellctl.models.carried import CODE, copy_side_files, own_file, write_config
from twellctl.models.checkpoint import Checkpoint
from twellctl.models.loading import opened, read_tensors
from twellctl.models.originals import are_equal, is_of_layers, not_made_from
from twellctl.models.shard_writer import write_shards
from twellctl.models.shards import ABOVE, ORIGINAL


def equal_tensors(original: Checkpoint, fit: Checkpoint) -> set[str]:
    """The names of the tensors that both store with the same bytes, outside of FFNs.

    `TwellError` for a fit that differs in more than FFNs, and rounded layers.
    """
    layers = range(original.ffn.num_layers)
    of_ffns = {name for layer in layers for name in original.ffn_tensors(layer)}
    found = set()
    with opened(original) as theirs, opened(fit) as ours:
        for name in (name for name in original.tensors if name in fit.tensors):
            if name in of_ffns:
                continue
            if are_equal(ours(name), theirs(name)):
                found.add(name)
            elif not (fit.scheme and is_of_layers(name)):
                raise not_made_from(fit, original, name)
    return {name for name in found if not fit.tensors[name].parts}


def write_original(original: Checkpoint, folder: Path, shared: Mapping[str, str]) -> None:
    """Put `original` into the model folder `folder`, without the tensors that lie there already,
    `shared`: their files."""
    for shard in original.shards:
        own_file(original.path / shard)
    within = folder / ORIGINAL
    within.mkdir()
    own = [name for name in original.tensors if name not in shared]
    elsewhere = {name: ABOVE + file for name, file in shared.items()}
    write_shards(read_tensors(original, own), within, elsewhere=elsewhere)
    copy_side_files(original, within)
    config = {key: value for key, value in original.config.items() if key not in CODE}
    write_config(within, config)
