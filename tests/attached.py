"""Decoders with a cache."""

import torch

from twellctl.decoding.decoder import Decoder
from twellctl.decoding.paged_cache import PagedCache


def attached(decoder: Decoder, num_pages: int) -> Decoder:
    """The decoder, over a cache of its own."""
    with torch.inference_mode():
        decoder.attach(PagedCache(decoder.shapes, num_pages, decoder.device))
    return decoder
