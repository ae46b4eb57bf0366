"""How much memory a device has left."""

import gc
import os

import torch


def free_bytes(device: torch.device) -> int:
    """Bytes that are free on a CUDA device, or in the machine for any other; what nothing uses is given back first."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
