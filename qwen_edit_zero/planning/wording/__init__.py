"""Quantities, tables and plots as people read them."""
