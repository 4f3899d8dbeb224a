"""Advantage estimators, one file per method."""
