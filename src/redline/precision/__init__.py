"""Precision: the dtypes of a run (recipe.py), the scaling state of fp8 (fp8.py)."""

from redline.precision.fp8 import Fp8Spec, Fp8State
from redline.precision.recipe import DTYPES, Recipe, make_recipe

__all__ = ["DTYPES", "Fp8Spec", "Fp8State", "Recipe", "make_recipe"]
