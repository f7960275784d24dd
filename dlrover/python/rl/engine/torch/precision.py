"""Precisions by the names that settings give them."""

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What passes are computed in."""
