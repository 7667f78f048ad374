"""Runs by name: each recipe is a function that returns a RunConfig."""
