"""What messages of a chat hold, as clients and data sets spell it. No torch.

The server refuses what is not listed here; of rows, what is left to the chat template.
"""

import json
from contextlib import suppress
from typing import Any

# who speaks, by OpenAI's names, and as templates call them
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
ROLES |= {"tool": "tool", "function": "tool"}
TEXTS = ("text", "input_text", "output_text")  # kinds of parts


def with_object(call: Any) -> Any:
    """A call of a function with its arguments as the object that templates write, not its text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return call | {"function": function | {"arguments": arguments}}
