"""Runs by a recipe: built, begun, trained through their stages, saved, scored; `lockstep.recipes` exports the names."""
