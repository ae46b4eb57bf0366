"""Quality of generated images and videos, comparable with published numbers: ``mhla eval``."""
