"""Trained models: their interface, how they are composed, and how they run."""
