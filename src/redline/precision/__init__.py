"""Precision: the dtypes of a run (recipe.py)."""

from redline.precision.recipe import DTYPES, Recipe, make_recipe

__all__ = ["DTYPES", "Recipe", "make_recipe"]
