"""How much may be held at once: sizes are chosen for two cores and a few gigabytes, and grow on an accelerator."""

from __future__ import annotations

import torch

GROWTH = 32  # an accelerator is slow on small pieces, and has the memory for large ones


def room(device: torch.device, size: int) -> int:
    """``size`` bytes on a CPU; on an accelerator up to 32 times that, at most a twelfth of its memory."""
    if device.type != "cuda":
        return size
    return max(size, min(GROWTH * size, torch.cuda.get_device_properties(device).total_memory // 12))
