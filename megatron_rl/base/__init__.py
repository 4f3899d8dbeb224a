"""Modules without dependencies: words for messages, declared values, files that a recipe names, recipes of the package."""
