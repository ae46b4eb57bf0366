"""Which pipeline, called how, into which folder; and names as users write them."""
