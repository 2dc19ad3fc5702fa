"""Helpers that know nothing of training: text, numbers, files, locks, processes, signals, random draws."""
