"""A grid of runs, one for each row and seed: claimed, played, judged and written down."""
