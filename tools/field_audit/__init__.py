"""Adapters that call the advantage and loss functions of other trainers, for tools/field."""
