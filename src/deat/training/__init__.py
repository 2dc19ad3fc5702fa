"""Training: the visible loop, its settings, its records and the folder a run leaves."""
