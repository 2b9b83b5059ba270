"""From a loaded model to the tokens after many prompts at once. It knows no text and no HTTP."""
