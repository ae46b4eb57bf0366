"""The demo: what plain linear attention loses and MHLA keeps, measured on a tiny pipeline within minutes."""
