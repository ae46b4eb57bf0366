"""How much memory a device has left."""

import os

import torch


def free_bytes(device: torch.device) -> int:
    """Bytes that are free on a CUDA device, or in the machine for any other."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
