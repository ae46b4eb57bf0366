"""``mhla bench gpu-check``: the first minutes on a GPU that has never been seen, each step in a process of its own."""
