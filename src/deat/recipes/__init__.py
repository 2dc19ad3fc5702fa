"""The paper's setups, one file a recipe. Importing this package registers all of its files."""

from importlib import import_module
from pkgutil import iter_modules

from deat.recipes.overrides import apply_overrides
from deat.recipes.recipe import Recipe, RecipeRow, get_recipe, list_recipes, register_recipe

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["Recipe", "RecipeRow", "apply_overrides", "get_recipe", "list_recipes", "register_recipe"]
