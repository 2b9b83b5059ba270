"""How good a model is: loss on text, and what fires there, in one pass."""
