"""Results, for people: tables in a notebook, plots, the page of a run."""
