"""Helpers that know nothing of training: files, locks, text, numbers, processes, signals, random draws."""
