"""How near a kernel's tensors come to the same formula in float64."""


def nearness(got, wanted):
    """The largest difference beside the largest number."""
    if not wanted.numel():
        return 0.0
    assert got.shape == wanted.shape
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-30))


def check_types(got, truth, peers, dtype):
    """Tensors of a 16-bit type err at most twice as much as the same formula in PyTorch with operands of that type."""
    for kernel, exact, peer in zip(got, truth, peers, strict=True):
        assert kernel.dtype == dtype
        assert nearness(kernel, exact) <= 2 * nearness(peer, exact)
