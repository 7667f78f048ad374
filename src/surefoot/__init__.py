"""Surefoot pretrains language models and keeps the run on its feet."""
