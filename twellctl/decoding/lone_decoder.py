"""One sequence at a time over transformers' own cache: for models whose state is not in pages."""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from twellctl.decoding.fired_counts import FiredCounts
from twellctl.decoding.paged_cache import cache_argument


class LoneDecoder:
    """A `Decoder` (decoder.py) of one row; tables and positions are not looked at."""

    page_bytes = 0
    max_rows = 1
    capturable = False
    kernels = None

    def __init__(self, model: PreTrainedModel):
        config = model.config.get_text_config()
        self.device = model.device
        self.vocab_size = model.get_input_embeddings().num_embeddings
        self.context = config.max_position_embeddings
        self.prefill_chunk = self.context  # states that recur are not continued by many tokens
        self._model, self._cache_argument = model, cache_argument(model)
        self._fired = FiredCounts(model, config.num_hidden_layers)
        self.neurons, self.mapped = self._fired.neurons, self._fired.mapped

    def open_cache(self, num_pages: int) -> None:
        """There is none: transformers' grows with each sequence."""

    def widths(self, max_pages: int) -> list[int]:
        return [max_pages]

    def prefill(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        self._cache = DynamicCache(config=self._model.config)
        return self._forward(tokens)

    def step(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        return self._forward(tokens[None])

    def _forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        with self._fired.counted(1):
            done = self._model(
                input_ids=tokens.to(torch.long),
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_argument: self._cache},
            )
        return done.logits[:, -1], self._fired.of_last_tokens(1, self.device)
