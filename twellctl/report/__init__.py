"""What was measured, for people: advice in words, tables in a notebook."""
