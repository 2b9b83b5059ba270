"""Files that are read within bounds and written whole."""
