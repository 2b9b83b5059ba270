"""Which neurons fire: how they are counted and what a profile of them holds."""
