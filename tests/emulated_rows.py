"""`step_rows` (kernels/decode/step_rows.cuh) on a CPU; the judge is emulated_step.py's."""

import copy

import torch
from emulated_kernels import EmulatedKernels
from emulated_step import EPS, SMEM_BYTES, Done, Model, cached


def words_of_rows(K: int, columns: int, blocks: int) -> int:
    """How many words lie in the four turns; `columns` of q, k and v."""
    return 4 * (24 * K + 8 * columns + blocks * (8 + 48 * 8) + 16 * 16 * K)


def rows_of(model: Model) -> list[Model]:
    """The model's texts: tokens, positions and pages of their own, one at the model's position."""
    rows = []
    for i, table in enumerate(model.table.view(model.rows, -1)):
        row = copy.copy(model)
        row.table, row.token = table.contiguous(), (3 * i + 7) % len(model.embeddings)
        row.position = (model.position - 37 * i) % (model.position + 1)
        rows.append(row)
    return rows


def emulate(
    kernels: EmulatedKernels, model: Model, blocks: int, seeds: tuple[int, ...]
) -> list[Done]:
    """A step after the other of the same tokens, by `blocks` blocks; what each row got."""
    K, D, rows = model.K, model.D, rows_of(model)
    B, columns = len(rows), (model.H + 2 * model.Hkv) * D
    words = torch.full((words_of_rows(K, columns, blocks),), -1, dtype=torch.int32)
    epoch = torch.zeros(1, dtype=torch.int32)
    tokens = torch.tensor([row.token for row in rows], dtype=torch.int32)
    positions = torch.tensor([row.position for row in rows], dtype=torch.int32)
    tables = torch.stack([row.table for row in rows])
    logits = torch.full((len(seeds), B, model.vocabulary), torch.nan)
    counts = torch.full((len(seeds), model.layers, B), -1, dtype=torch.int32)
    sizes = model.layers, model.N, model.vocabulary, model.H, model.Hkv
    weights = model.embeddings, model.last_norm, model.head, model.cos, model.sin
    for i, seed in enumerate(seeds):
        kernels.launch(
            f"step_rows_{K}_{D}",
            (blocks,),
            256 + 128,
            (
                *(model.told(), *sizes, tokens, positions, tables, B, tables.stride(0)),
                *(*weights, EPS, D**-0.5, words, epoch, counts[i], logits[i]),
            ),
            SMEM_BYTES,
            at_once=blocks,
            seed=seed,
            beside=model.memory(),
        )
    assert epoch == len(seeds) * model.layers
    return [Done(logits[:, i], counts[:, :, i], cached(row)) for i, row in enumerate(rows)]
