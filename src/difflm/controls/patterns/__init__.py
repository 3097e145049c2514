"""Patterns: regular expressions and JSON schemas as automata over the tokens of a vocabulary."""
