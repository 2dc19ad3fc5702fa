"""A grid of runs, one for each row and seed: claimed, trained, evaluated and recorded."""
