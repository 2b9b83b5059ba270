"""What stands under serve-local: the HTTP protocol on one side, an engine of tokens below it."""
