"""Text in, tokens out, and back."""
