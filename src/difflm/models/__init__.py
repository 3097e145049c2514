"""Trained models: what they are asked, how they are composed, and how they run."""
