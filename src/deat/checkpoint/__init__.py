"""Checkpoint files: written atomically, verified before use, read without running code."""
