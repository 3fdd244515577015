"""Reusable steps. Nothing here imports another step; graphs join them."""
