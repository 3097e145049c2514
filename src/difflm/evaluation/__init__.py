"""Protocols that measure a model, the tables they print and the records they leave."""
