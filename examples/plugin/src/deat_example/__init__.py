"""A method, a task, an attack and a model, which deat finds by the entry points of this package."""
