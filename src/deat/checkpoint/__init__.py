"""Checkpoints: written whole or not at all, found by verification, read without running anything."""
