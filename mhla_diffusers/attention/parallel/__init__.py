"""One attention over several processes, each of which holds a share of the tokens: context parallelism."""
