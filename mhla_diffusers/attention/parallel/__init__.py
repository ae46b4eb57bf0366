"""Context parallelism: one attention over several processes that each hold a share of the tokens."""
