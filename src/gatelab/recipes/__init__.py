"""Recipes: plain functions that return the settings of a run."""
