"""Meshes, layouts and the indices that a rank holds under them."""
