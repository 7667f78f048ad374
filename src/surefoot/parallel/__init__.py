"""Makes a model run on many devices, from outside."""
