"""Memory of the GPU that nothing uses any more."""

import gc

import torch


def free_unused() -> None:
    """Give back what PyTorch keeps for later, after what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
