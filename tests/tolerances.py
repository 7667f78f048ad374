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

# Muon

NEWTON_SCHULZ = {torch.bfloat16: 3e-2, torch.float32: 5e-6, torch.float64: 5e-14}
"""Five Newton-Schulz steps against the polynomial of the singular values: measured 1.5e-2, 1.4e-6 and 6e-15."""
ORTHOGONAL_RANGE = (0.675, 1.21)
"""Absolute, of singular values in bf16: the polynomial's own range is 0.682 to 1.2024, rounded 0.7 to 1.2; measured 0.680 to 1.138."""
ORTHOGONAL_RMS = 2e-2
"""Root mean square of an update with bf16 Newton-Schulz against exact arithmetic: measured 1e-3."""

# Optimisers

OPTIMISERS = {torch.float32: 1e-6, torch.float64: 1e-12}
"""Weights and moments after 50 steps of an elementwise optimiser against its equations in fp64: measured 3e-7 to 8e-7 in fp32, 2e-15 in fp64."""
RECOMPUTED_UPDATE = 1e-9
"""An update recomputed from moments and weights in fp64 against the difference of weights that are 100 times larger: measured below."""

# QK-clip

QK_CLIPPED = 1e-3
"""Largest logit of a clipped head over the threshold, less 1, on the batch that was clipped for, at a rate near 0 in fp32: measured 4e-8 to 2e-7; the bound is the published one (science.md 7.2)."""
MUON = {torch.float32: 1e-6, torch.float64: 1e-14}
"""50 steps of Muon with fp32 Newton-Schulz against its equations in fp64: measured 4e-7 and 4e-16."""
TORCH_MUON = 2e-2
"""Movement over 20 steps against torch.optim.Muon, whose Newton-Schulz is bf16 too: measured 5e-3, its own distance from fp32 4e-3."""
UPDATE_RECOMPUTED = 1e-13
"""An update in fp64 recomputed from momentum, gradients and weights against the difference of weights: measured 7e-15."""
NARROW_DRIFT = 6e-2
"""Movement of 4,096 bf16 weights over 200 updates, each a hundredth of a bf16 digit, against that of fp32 weights: chance is 1.3e-2."""
NARROW_MOMENTS = 3e-2
"""Moments in bf16 against fp32 after 200 steps, each rounded by up to 2^-7 over and over: measured 0.8e-2 to 1.3e-2 over four seeds."""
NARROW_WEIGHTS = {"adamw": 5e-3, "adam": 5e-3, "stable_adamw": 5e-3, "lion": 6e-2}
"""Weights with moments in bf16 against fp32 after 200 steps of a rate of 1e-2: measured 0.8e-3 to 1.7e-3, of Lion, whose signs turn over,
1.6e-2 to 2.2e-2."""
ROUNDED_MEAN = 1e-2
"""The mean of 512 or more elements after hundreds of stochastic roundings against exact arithmetic: measured 5e-4 and 1.3e-3."""

# The gradient noise scale

NOISE_SCALE = 0.3
"""Critical batch size of about 40 smoothed measurements of 8 rows against the gradients of 192 rows one by one: both are estimates."""
VERTEX = 1e-9
"""Of a parabola's vertex, relative (absolute in log2): three points and a dozen operations in fp64 leave 1e-14; a wrong neighbour or spacing shows at 1e-2."""

# Parametrizations

MUP_PACKAGE = 3e-5
"""Mean absolute activations over four steps in fp64 against the mup package on transformers' Llama, whose norms and angles are in fp32: measured
5e-8 before the first update and up to 7e-6 after, as Adam turns noise in a small gradient into a step; a decay left out shows as 2e-4."""

# Sweeps

ARITHMETIC = 1e-12
"""Means and deviations of a few numbers near 1 in fp64, summed in another order: a few times 2e-16."""

# Precision

UNSCALED_FP16 = 5e-3
"""Per tensor, gradients by way of a loss scale in fp16 against fp32: measured up to 9e-4, with 1024 as with 65536."""
FP8_LOOPS = 1e-6
"""Blockwise fp8 in fp32 arithmetic against loops over blocks: the same fp8 values, scaled back by a product there and a division here."""
FP8_TORCHAO = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""Outputs and both gradients against torchao's emulation: bit for bit rowwise, whose scales are powers of two; tensorwise measured 1e-7 in fp32,
and 3e-3 in bf16, where we round what is scaled back to bf16 before the product and torchao does not."""
PRECISION_RANKS = {
    "bf16_pure": (1e-4, 2e-3, 2e-2),
    "fp16": (1e-5, 5e-4, 3e-3),
    "tensorwise": (5e-4, 1e-2, 0.25),
    "rowwise": (2e-4, 5e-3, 6e-2),
    "blockwise": (2e-4, 5e-3, 6e-2),
}
"""Two ranks against one over three steps: loss, gradient norm, and per tensor the first moments after the first step, relative. Measured, the
worse of DDP and FSDP2: bf16_pure 6e-6, 4e-4, 4e-3; fp16 6e-7, 5e-5, 5e-4; tensorwise, whose scales are those of each rank's rows, 8e-5, 1.4e-3,
0.07; rowwise 3e-5, 1e-3, 0.016; blockwise 1.3e-5, 9e-4, 0.014: where bf16 differs in its last digit, an fp8 operand differs by an eighth."""
PRECISION_MICRO_BATCHES = 8e-3
"""Per tensor, bf16 gradients of four micro-batches against one of all rows: measured 3.4e-3; summed in bf16 it would be 6e-3 for four, and grow."""
PRECISION_CLIPPED = {"fp32": 1e-5, "fp64": 1e-6, "bf16": 1e-5, "bf16_pure": 1e-2, "fp16": 1e-5, "fp8": 1e-5}
"""The norm with which a gradient 1,000 times too large leaves; only bf16_pure has gradients narrower than fp32."""
LAW_BY_HAND = 2e-6
"""A published power law against its exponents added up by hand with seven digits of the logarithms."""
LAW_ROUNDED = 0.03
"""A published law against the figures published with it, which are rounded to two digits: the worst, Porian's batch, is 2.5 % off."""
FORK_FIRST_UPDATE = 0.1
"""Size of Adam's first update over the rate: 1 where every element has a gradient well above epsilon, and decay takes 3e-4 of the weight on top;
measured 0.98 to 1.00, while moments that were not started anew gave 49 and 0.2."""
FORK_ROUNDED = 1e-5
"""Adam's corrected moments after one multiplication in fp32 more; the correction of 1 - 0.999^10 in fp32 costs three digits of seven."""

# Context parallelism

CONTEXT_BF16 = 1.5
"""How much further from fp64 bf16 attention and its gradients are on four ranks in a ring than on one: up to 1.3 over four
seeds, 5.4e-3 against 4.2e-3; its backward starts from the rounded output instead of the unrounded weights."""
CONTEXT_RUN = {"loss": 2e-5, "gradient": 3e-2}
"""Two context ranks against one in bf16: the loss and every gradient of the first step. Measured, the worse of ring and all-to-all, DDP and FSDP2:
4.5e-6 and 8.4e-3, where bf16 itself is 2e-2 from fp64 (BF16_GRADIENT); a mask that forgets documents shows at 1e-1 and more."""
TENSOR_BF16 = (1e-4, 3e-3, 3e-2)
"""Two tensor parallel ranks against one, bf16: loss, gradient norm and the gradient of any tensor of the first step, relative. What is
summed over ranks are partial sums that were rounded to bf16 (2^-9) where one rank rounds the sum once: measured 1e-6, 3e-4, 5e-3, and on four
ranks up to 8e-6, 3e-4, 1.3e-2."""
OTHER_LAYOUT = 1e-10
"""Losses, norms, weights and moments in fp64 of a run continued on other ranks against the one that was not: sums of other orders; promise 6."""

# Pipelines

PIPELINE_BF16 = 0.02
"""Per tensor, bf16 gradients of micro-batches through two stages against the same micro-batches on one process."""

ACTIVATION_SHARE = 0.05
"""Formula of activations against storages alive after a forward: the largest deviation measured over 18 variants is about 3 %. What the
formula leaves out are single numbers, and the copies of the angles that FSDP2 makes in the compute dtype for every block."""
