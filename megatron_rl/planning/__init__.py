"""Forecasts from a recipe: memory by arithmetic and by building, time of a step, search of layouts, simulation."""
