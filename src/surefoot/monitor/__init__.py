"""Rows out. Watches a run and writes down what happened; never steers it."""
