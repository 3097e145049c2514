"""Texts, words and ids: everything between a file and a batch."""
