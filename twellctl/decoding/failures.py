"""What went wrong in the engine, as errors that hold no frame and so no tensor."""

import torch

from twellctl.decoding.engine import EngineError, GuideError, OutOfMemory

NO_NUMBERS = (
    "the model computed NaN in place of the next token's probabilities: change the prompt; if all "
    "prompts fail so, the model is broken or its dtype too narrow"
)


def failure_of(error: BaseException) -> EngineError:
    """The same as an engine's error."""
    text = " ".join(str(error).split())
    # the CPU's allocator raises a plain RuntimeError
    no_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if no_memory or "can't allocate memory" in text:
        return OutOfMemory("out of memory: shorten the prompt or lower max_tokens")
    return EngineError(f"{type(error).__name__}: {text}")


def failure_of_guide(error: BaseException) -> GuideError:
    """Raises `error` again if it is no failure, but an order to stop."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    if isinstance(error, GuideError):
        return error
    return GuideError(f"the grammar of this answer failed: {failure_of(error)}")
