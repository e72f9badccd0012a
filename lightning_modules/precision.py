"""Regions that stay in fp32 under autocast."""

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["full_precision"]


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Switch autocast off inside; does nothing on the meta device, which has no autocast."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
