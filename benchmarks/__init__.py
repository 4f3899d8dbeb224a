"""Measurements that people run by hand; none of them is a test."""
