"""Draft heads: one layer that guesses what a model writes next, out of what the model just made."""
