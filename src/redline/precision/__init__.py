"""Precision: dtypes of a run (recipe.py), scales of fp8 (fp8.py), what its casts lose (fp8_stats.py)."""

from redline.precision.fp8 import NEVER, Fp8Spec, Fp8State
from redline.precision.fp8_stats import Fp8Row
from redline.precision.recipe import DTYPES, Recipe, make_recipe

__all__ = ["DTYPES", "NEVER", "Fp8Row", "Fp8Spec", "Fp8State", "Recipe", "make_recipe"]
