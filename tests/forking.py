"""How the processes of the tests begin: forked from one that has imported everything, so that they start at once."""

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])
