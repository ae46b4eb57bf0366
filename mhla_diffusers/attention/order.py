"""Sort keys by content, so that the keys of a block are similar and its mean represents them.

Neighbours along the curve of :mod:`.layout` need not be alike. So every head of every sample sorts the keys of each
stretch of the curve, and their values with them: a stretch is halved, and each half again down to one block, every time
by the channel that varies most within the part. Blocks stay uniform, and queries keep the curve's order. Of the rules
tried on trained attention (``studies/real_weights``) none brings more at that price.
"""

import torch

_NUMBERS, _DEVICE_NUMBERS = 2**18, 2**26
"""Numbers of keys that are worked on at once: on a CPU so that they stay in its cache, and elsewhere."""
STRETCH = 256
"""Keys that are sorted among themselves, in blocks of 16 and more."""


def stretch_of(block_size: int) -> int:
    """Return the keys per stretch: at most 256, but always two blocks, and four of blocks below 16 keys."""
    blocks = 4 if block_size < 16 else 2
    while block_size >= 16 and 2 * blocks * block_size <= STRETCH:
        blocks *= 2
    return blocks * block_size


def blocks_per_state(block_size: int) -> int:
    """Return how many key blocks share a state: a stretch of them, or one for blocks below 16 tokens."""
    return stretch_of(block_size) // block_size if block_size >= 16 else 1


@torch.no_grad()
def content_order(keys: torch.Tensor, exists: torch.Tensor, block_size: int) -> torch.Tensor:
    """Sort the keys of every stretch by content.

    Equal keys stay in order, and keys that do not count come last. Sums are kept in the type of the keys: the
    kernels keep them in float32, so float32 keys are sorted alike.

    Args:
        keys: rows along the curve after RoPE, (B, H, R, D), R a multiple of ``block_size``.
        exists: bool (1 or B, R), False for padding and masked keys.
        block_size: keys of a block.

    Returns:
        int64 (B, H, R): the row whose key comes first, second and so on.
    """
    batch, heads, rows, channels = keys.shape
    stretch = stretch_of(block_size)
    padding = -rows % stretch
    stretches = torch.nn.functional.pad(keys, (0, 0, 0, padding)).view(-1, stretch, channels)
    real = torch.nn.functional.pad(exists, (0, padding)).view(len(exists), 1, -1, stretch)
    real = real.expand(batch, heads, -1, -1).reshape(-1, stretch)
    numbers = _NUMBERS if keys.device.type == "cpu" else _DEVICE_NUMBERS
    at_once = max(1, numbers // (stretch * channels))
    found = []
    for some, real_ones in zip(stretches.split(at_once), real.split(at_once), strict=True):
        order, length = torch.arange(stretch, device=keys.device).expand(len(some), -1), stretch
        while length > block_size:
            order = order.unflatten(1, (-1, length)).sort(dim=-1).values.flatten(1)
            places = (order + torch.arange(len(some), device=keys.device)[:, None] * stretch).flatten()
            part = some.flatten(0, 1).index_select(0, places).view(len(some), -1, length, channels)
            weight = real_ones.gather(1, order).unflatten(1, (-1, length))[..., None].to(keys.dtype)
            total = weight.sum(dim=2, keepdim=True).clamp_min(1)
            apart = (part - (weight * part).sum(dim=2, keepdim=True) / total) * weight
            channel = apart.square().sum(dim=2, keepdim=True).argmax(dim=-1, keepdim=True)
            column = part.gather(-1, channel.expand(-1, -1, length, 1))
            # NaN would come after what is not a key
            column = column.masked_fill((weight == 0) | column.isnan(), torch.inf).squeeze(-1)
            order = order.unflatten(1, (-1, length)).gather(-1, column.argsort(dim=-1, stable=True)).flatten(1)
            length //= 2
        found.append(order)
    starts = torch.arange(0, rows + padding, stretch, device=keys.device)
    return (torch.cat(found).view(batch, heads, -1, stretch) + starts[:, None]).flatten(2)[..., :rows]
