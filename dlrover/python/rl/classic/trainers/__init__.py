"""A trainer in each module."""
