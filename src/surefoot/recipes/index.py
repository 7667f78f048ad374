"""Recipes by the name they are called by on the command line."""

from collections.abc import Callable

from surefoot.config.run import RunConfig
from surefoot.recipes.tiny import tiny

RECIPES: dict[str, Callable[[], RunConfig]] = {"tiny": tiny}
