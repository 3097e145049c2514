"""Watching a text condense: its making as frames, and the page that plays them."""

from difflm.app.studio.player import PlayedText, Recording, write_player

__all__ = [
    "PlayedText",
    "Recording",
    "write_player",
]
