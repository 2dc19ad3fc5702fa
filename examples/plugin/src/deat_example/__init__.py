"""A method, a task, an attack, a model and a logger, which deat finds by the entry points of this package."""
