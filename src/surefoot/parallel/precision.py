"""Names of precisions and the dtypes they mean."""

from typing import Literal

import torch

Precision = Literal["fp32", "bf16", "fp64"]


def compute_dtype(precision: Precision) -> torch.dtype:
    """The dtype of products and of the residual stream."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[precision]
