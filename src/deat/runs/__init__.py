"""Runs: what is trained (request), where it is kept (run_dir, schema), and how it is trained, loaded and scored."""
