"""Attention over several processes: what they send each other, and where the time of a long video would go."""
