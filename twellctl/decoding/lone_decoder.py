"""Models whose state is not in pages (recurrent layers), one sequence at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from twellctl.decoding.decoder import Wanted
from twellctl.decoding.fired_counts import FiredCounts
from twellctl.decoding.paged_cache import LayerShape, PagedCache, cache_argument
from twellctl.models.defaults import LONGEST, context_of


class LoneDecoder:
    """A `Decoder` (decoder.py) of one row; tables are not looked at.

    A pass that begins at position 0 begins a sequence; each other pass continues the one before.
    """

    max_rows = 1
    most_rough = 0
    capturable = stable = False
    kernels = None

    def __init__(self, model: PreTrainedModel):
        config = model.config.get_text_config()
        self.shapes: Sequence[LayerShape] = ()
        self.device = model.device
        self.vocab_size = model.get_input_embeddings().num_embeddings
        self.context = context_of(config.to_dict()) or LONGEST
        self.prefill_chunk = self.context  # states that recur are not continued by many tokens
        self._model, self._cache_argument = model, cache_argument(model)
        self._cache = DynamicCache(config=model.config)
        self._fired = FiredCounts(model, config.num_hidden_layers)
        self.neurons, self.mapped = self._fired.neurons, self._fired.mapped

    def attach(self, cache: PagedCache) -> None:
        """Nothing of it is used: transformers' own cache grows with each sequence."""

    def widths(self, max_pages: int) -> list[int]:
        return [max_pages]

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        tables: Tensor,
        last: int = 1,
        wanted: Wanted = Wanted.EXACT,
    ) -> tuple[Tensor, Tensor]:
        """As `Decoder.run`, but that the host reads where the tokens stand."""
        if int(positions[0, 0]) == 0:
            self._cache = DynamicCache(config=self._model.config)
        with self._fired.counted(1, last):
            done = self._model(
                input_ids=tokens.to(self.device, torch.long),
                use_cache=True,
                logits_to_keep=max(last, 1),
                **{self._cache_argument: self._cache},
            )
        logits = done.logits[:, done.logits.shape[1] - last :]
        return logits, self._fired.found(1, last, self.device)
