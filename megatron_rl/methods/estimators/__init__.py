"""Advantage estimators, one file per paper."""
