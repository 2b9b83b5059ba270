"""The command line: the commands, their options and what becomes of their errors."""
