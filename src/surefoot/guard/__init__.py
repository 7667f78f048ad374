"""Signals, findings, diagnosis, action: pure functions over numbers. No torch, no files."""
