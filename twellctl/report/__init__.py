"""Results, for people: tables in a notebook, plots."""
