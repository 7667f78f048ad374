"""Every numeric tolerance of the tests, each with the noise it was measured against. Loosening one is an entry in CHANGES.md.

Relative, ||a - b|| / ||b|| per tensor, unless it says otherwise.
"""

import torch

# One tensor, the same formula in another order or kernel

FP64_ORDER = 1e-12
"""Sums in another order in fp64: a document alone or inside a row, 1, 2 or 4 micro-batches: measured 3e-16 to 2e-15."""
FP64_KERNEL = 1e-13
"""A kernel against torch's own in fp64: measured 4e-16 to a few units in the last place."""
FP32_KERNEL = 2e-6
"""A kernel against fp64 in fp32, 4,096 products of 1e-7 rounding each: measured 3e-7."""
BF16_KERNEL = 1e-2
"""The loss and its gradients with bf16 products, 2^-9 per rounding: measured 3e-3."""
BF16_ATTENTION = 2e-2
"""Attention in bf16, where scores and weights are rounded: measured 4e-3."""
ONE_ROUNDING = {torch.bfloat16: 2**-9, torch.float32: 4e-7, torch.float64: 1e-14}
"""Two ways to round once, by dtype: half a unit in the last place."""

# Whole models

COMPILED = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Compiled blocks against eager ones: fp32 reassociates (1e-6), bf16 keeps fused intermediates in fp32 (1e-2)."""
BF16_LOSS = 1e-2
"""bf16 loss against fp64; rounding averages out over tokens: measured 1e-3."""
BF16_GRADIENT = 6e-2
"""bf16 gradients against fp64, two layers: measured 2e-2."""
HUGGING_FACE = 1e-5
"""fp32 against transformers; its own eager and SDPA attention differ by up to 1e-6."""
STORIES_NATS = 2e-5
"""Absolute, nats per token, of the trained model: fp32 sums in another order move the last digit."""

# Whole runs

FP64_RANKS = 1e-10
"""24 steps of AdamW on one rank and on two, in fp64: measured 1e-13. The promise's own bound."""
RANKS = {"fp32": 1e-4, "bf16": 2e-2}
"""Weights and losses after 8 steps on one rank and on two. Adam turns noise in a small gradient into a step of the learning rate's size:
measured 4e-6 in fp32, 3e-3 in bf16."""
ADAMW = {torch.float32: 2e-6, torch.float64: 1e-12}
"""50 steps of fused AdamW against its equations in fp64: measured 4e-7 in fp32, 1e-15 in fp64."""
CLIPPED_MOMENTS = {torch.float32: 1e-6, torch.float64: 1e-14}
"""First moments after one clipped step against the gradient divided by hand: one or two roundings."""
CLIPPED_NORM = {"fp32": 1e-5, "bf16": 1e-2, "fp64": 1e-6}
"""The norm a clipped gradient leaves with; the norm itself is summed from fp32 norms per tensor (fp64: from fp64)."""
GOLDEN = {"fp64": 1e-9, "fp32": 2e-5, "bf16": 1e-2}
"""Losses of 24 steps on another processor: fp64 noise grows to 1e-12, fp32 to 2e-6, bf16 to 2e-3."""

# Estimates and statistics

ACTIVATION_FACTOR = 1.1
"""activation_bytes leaves out angles, masks and normalisers: measured within 3 %."""
NOISE_SIGMAS = 5.0
"""Of 1/sqrt(n): over 64 lags chance passes 5 once in 30,000 seeds, and the seeds here are fixed."""
RESIDENT_GROWTH_MIB = 8.0
"""Opening 10 billion tokens and reading 50 batches: measured 0.0 to 1.5 MiB; a tenth of a percent of the tokens would be 19."""
ALLOCATED_MIB = 4.0
"""A batch of 4 rows with its temporaries and eight cached blocks of samples: measured 1.8 MiB."""

# Cures

CLIPPING = 1e-12
"""50 steps of ZClip and AdaGC in fp64 against their equations in plain Python floats: measured 1e-15 to 2e-14 (a variance brought up to date
one by one)."""
MASKING_MS = 2.0
"""Milliseconds, the best of 20, for the repeated n-grams of 8,192 tokens."""

# The guard's detectors

TREND_NATS = 0.1
"""The robust trend against the curve it follows, nats: noise of 0.02 moves it by 0.01, a fall of 0.05 a step by 0.06."""
SPREAD_SHARE = 0.8
"""A robust standard deviation of 64 values against the true one: its own standard error is 0.12, the forecast's noise adds 0.2."""

# The drill

INTERVAL_DIGITS = 1e-5
"""Absolute: published limits of exact intervals are printed with five digits."""
