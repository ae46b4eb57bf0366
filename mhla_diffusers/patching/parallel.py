"""What diffusers' ``enable_parallelism`` has told an attention."""

from typing import Any

from ..attention.parallel.place import Group, Parallel


def parallel_of(config: Any) -> Parallel | None:
    """The processes of a diffusers ``ParallelConfig`` or None, which has been set up; None without context parallelism."""
    settings = getattr(config, "context_parallel_config", None)
    if settings is None:
        return None
    # registers what PyTorch's functional collectives do under torch.compile
    from torch.distributed import _functional_collectives  # noqa: F401

    meshes = settings._ring_mesh, settings._ulysses_mesh, settings._flattened_mesh
    groups = (Group(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank()) for mesh in meshes)
    return Parallel(*groups, anything=settings.ring_anything or settings.ulysses_anything)
