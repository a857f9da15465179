"""Measurements of a training run, each with its source."""
